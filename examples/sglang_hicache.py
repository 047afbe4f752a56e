"""HiCache of two SGLang servers over one pool: the second server loads what the first one stored.

python examples/sglang_hicache.py [URL]

URL names the pool, as `valkey://localhost:6379` does. Without it the pool is a temporary folder.
No model runs, so no GPU is needed: random numbers stand for KV in SGLang's host memory. SGLang's
factory makes the storage backends, and the calls are those of its cache controller's threads. The
command at the end starts a real server.
"""

import json
import shlex
import sys
import tempfile
from array import array
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str

PAGE, TOKENS, LAYERS, LAYOUT = 64, 1024, 4, "page_first"
BACKEND: dict[str, object] = {"backend_name": "penstock", "module_path": "penstock.sglang"}
BACKEND |= {"class_name": "PenstockStorage", "interface_v1": 1}

# In place of weights, and for a busy machine. Leave these out in a server.
HERE = {"model_id": "example", "lookup_timeout": 60, "load_timeout": 60, "store_timeout": 60}
RANK = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0}
RANK |= {"attn_cp_size": 1, "is_mla_model": False, "is_page_first_layout": True}


def server(pool: str) -> tuple[Any, Any]:
    """A server's host memory, and its storage backend."""
    kv = MHATokenToKVPool(TOKENS, PAGE, torch.bfloat16, 2, 64, LAYERS, "cpu", False)
    info = kv.get_device_pool_infos()[0].buffer_info
    sizes = {"device_capacity_tokens": TOKENS, "start_layer": 0, "end_layer": LAYERS}
    with host_memory_budget_scope(1 << 30):
        host = get_mha_host_pool_cls(info)(info, 2.0, 0, PAGE, LAYOUT, pin_memory=False, **sizes)
    rest = {"model_name": "", "enable_storage_metrics": False}
    config = HiCacheStorageConfig(**RANK, **rest, extra_config=BACKEND | HERE | {"pool": pool})
    storage = StorageBackendFactory.create_backend("dynamic", config, host)
    storage.register_mem_pool_host(host)
    return host, storage


def pages(tokens: int, salt: str | None = None) -> list[str]:
    """SGLang's names for the pages of a prompt."""
    key = RadixKey(array("q", range(tokens)), cache_salt=salt)
    return list(get_storage_hash_str(key, page_size=PAGE))


with tempfile.TemporaryDirectory() as folder:
    pool = sys.argv[1] if len(sys.argv) > 1 else f"file://{folder}/pool?size=64MiB"
    (host_1, storage_1), (host_2, storage_2) = server(pool), server(pool)
    host_1.kv_buffer.normal_(generator=torch.Generator().manual_seed(0))
    prompt, longer, places = pages(640), pages(960), torch.arange(640)

    print("first server:", sum(storage_1.batch_set_v1(prompt, places)), "pages stored")
    print(f"second server: {storage_2.batch_exists(longer)} of {len(longer)} pages found")
    print("with another salt:", storage_2.batch_exists(pages(960, "tenant")), "found")
    print("second server:", sum(storage_2.batch_get_v1(prompt, places)), "pages loaded")
    both = ([host.get_data_page(start) for start in places[::PAGE]] for host in (host_1, host_2))
    print("same KV:", all(map(torch.equal, *both)))

shown = {**BACKEND, "pool": sys.argv[1] if len(sys.argv) > 1 else "valkey://cache.example:6379"}
print(
    f"python -m sglang.launch_server --model-path MODEL --page-size {PAGE}",
    f"--enable-hierarchical-cache --hicache-mem-layout {LAYOUT} --hicache-storage-backend dynamic",
    f"--hicache-storage-backend-extra-config {shlex.quote(json.dumps(shown))}",
    sep=" \\\n    ",
)
