"""The pool API: put values under keys, and get them back, verified.

python examples/pool.py [URL]

URL names the pool, as `valkey://localhost:6379` does. Without it the pool is a temporary folder.
"""

import sys
import tempfile

import penstock
from penstock.errors import NotFound, StoreError

with tempfile.TemporaryDirectory() as folder:
    url = sys.argv[1] if len(sys.argv) > 1 else f"file://{folder}/pool?size=64MiB"
    # Only users of one namespace see each other's values.
    with penstock.open(url, namespace="examples") as pool:
        # A value is any buffer: bytes, a numpy array, a CPU tensor. A list of them is one value.
        print("put:", pool.put("prompt", [b"its keys, ", b"its values"]))
        print("get:", bytes(pool.get("prompt")))
        print("contains:", pool.contains(["prompt", "another"]))

        # Many values go together. A miss is None.
        print("put_many:", pool.put_many({"block 0": b"aaaa", "block 1": b"bbbb"}))
        print("get_many:", pool.get_many(["block 0", "block 1", "block 2"]))

        # With `into`, the value is written to memory of yours.
        into = bytearray(4)
        print("get into:", pool.get("block 1", into=into), "bytes,", into)

        print("removed:", pool.remove(["prompt", "block 0", "block 1", "block 2"]))
        try:
            pool.get("prompt")
        except NotFound as error:  # it is a KeyError, too; get(key, default=None) does not raise
            print("miss:", error)

# Opening does not wait for a server. Each operation on a server that fails raises a StoreError.
with penstock.open("valkey://127.0.0.1:1") as pool:
    try:
        pool.get("prompt")
    except StoreError as error:
        print("no server:", type(error).__name__)
