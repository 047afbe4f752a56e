"""Penstock: carries KV cache between a shared pool and the engines that use it.

>>> import penstock
>>> with penstock.open("memory://?size=64MiB") as pool:
...     _ = pool.put("a prompt", b"its keys and values")
...     bytes(pool.get("a prompt"))
b'its keys and values'
"""

from penstock._native import __version__
from penstock.errors import PenstockError
from penstock.pool import AsyncPool, Pool, open, open_async
from penstock.printable import watch_logs

watch_logs(("penstock.lookup", "sglang.penstock", "vllm.penstock"))

__all__ = ["AsyncPool", "PenstockError", "Pool", "__version__", "open", "open_async"]
