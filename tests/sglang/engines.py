"""SGLang's real host pools, storage factory and cache controller on the CPU, without a model.

A test fills pages of a host pool with random bytes, has them stored, and loads them elsewhere. Only
the device is not there: pages come and go between host pool and storage.
"""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_pool_entry
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.runtime_context import get_context, get_parallel

from lab.processes import free_port
from penstock.sglang.settings import Settings

PAGE = 16
TOKENS = 16 * PAGE
BUDGET = 1 << 30
"""Of a host pool. Without one, SGLang keeps 10 GiB of the machine free."""
GENEROUS_LIMITS = {"lookup_timeout": 120.0, "load_timeout": 120.0, "store_timeout": 120.0}
"""So that a busy machine does not turn hits into misses."""
DEFAULT_LIMITS = {name: Settings.__dataclass_fields__[name].default for name in GENEROUS_LIMITS}
"""Of a backend whose pool does not answer."""
LAYOUTS = ("page_first", "layer_first", "page_first_direct", "page_head")


def write_model(folder: Path, seed: int = 0) -> Path:
    """A folder with weights and a configuration, as a checkpoint has them."""
    folder.mkdir(parents=True, exist_ok=True)
    data = torch.randint(0, 256, (4096,), generator=torch.Generator().manual_seed(seed))
    header = json.dumps({"w": {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(data.tolist())
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 1e4}))
    return folder


@contextmanager
def one_rank() -> Iterator[None]:
    """This process is all ranks, as for a model on one device."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1
    )
    get_parallel().override_permanently(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0
    )
    yield
    torch.distributed.destroy_process_group()


@contextmanager
def serving(model: Path, **options: Any) -> Iterator[None]:
    """SGLang's configuration, as a server publishes it in its processes."""
    with get_context().override_server_args(model_path=str(model), **options):
        yield


def mha_pool(dtype: torch.dtype = torch.bfloat16, heads: int = 2, layers: int = 3) -> Any:
    """A device pool of a model with grouped-query attention."""
    return MHATokenToKVPool(TOKENS, PAGE, dtype, heads, 8, layers, "cpu", False)


def mha_host(
    layout: str = "page_first",
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 2,
    layers: int = 3,
    device_pool: Any = None,
) -> Any:
    """A host pool of such a model."""
    pool = mha_pool(dtype, heads, layers) if device_pool is None else device_pool
    info = pool.get_device_pool_infos()[0].buffer_info
    with host_memory_budget_scope(BUDGET):
        return get_mha_host_pool_cls(info)(
            info,
            2.0,
            0,
            PAGE,
            layout,
            pin_memory=False,
            device_capacity_tokens=pool.size,
            start_layer=pool.start_layer,
            end_layer=pool.end_layer,
        )


def mla_host(layout: str = "page_first", layers: int = 3) -> Any:
    """A host pool of a model with latent attention."""
    pool = MLATokenToKVPool(TOKENS, PAGE, torch.bfloat16, 16, 8, layers, "cpu", False)
    with host_memory_budget_scope(BUDGET):
        return MLATokenToKVPoolHost(
            pool.get_device_pool_infos()[0].buffer_info,
            2.0,
            0,
            PAGE,
            layout,
            pin_memory=False,
            device_capacity_tokens=pool.size,
            start_layer=pool.start_layer,
            end_layer=pool.end_layer,
            target_layer_num=layers,
        )


def mamba_host(layout: str = "page_first", side_state: bool = False) -> Any:
    """A host pool of recurrent states: one state is a page."""
    slots, layers = 32, 2
    conv = torch.zeros(layers, slots, 6, 3, dtype=torch.bfloat16)
    temporal = torch.zeros(layers, slots, 2, 4, 4, dtype=torch.float32)
    extra = (torch.zeros(slots, 5),) if side_state else ()
    info = MambaStateBufferInfo(conv=(conv,), temporal=temporal, extra_checkpoint_buffers=extra)
    with host_memory_budget_scope(BUDGET):
        return MambaPoolHost(info, 2.0, 0, device_capacity=slots, pin_memory=False, layout=layout)


def tensors(host: Any) -> list[Any]:
    """The memory of a host pool, as bytes."""
    found = host.kv_buffer if isinstance(host.kv_buffer, (list, tuple)) else [host.kv_buffer]
    flat: list[Any] = []
    for each in found:
        flat += each if isinstance(each, (list, tuple)) else [each]
    return [each.view(torch.uint8) for each in flat]


def fill(host: Any, seed: int = 0) -> None:
    """Random bytes in all pages."""
    generator = torch.Generator().manual_seed(seed)
    for memory in tensors(host):
        memory.random_(0, 256, generator=generator)


def page_bytes(host: Any, start: int) -> bytes:
    """The bytes of the page that begins at this index, as SGLang copies them."""
    page = host.get_data_page(start, flat=True)
    return bytes(page.contiguous().view(torch.uint8).numpy().tobytes())


def config(extra: dict[str, Any], **fields: Any) -> Any:
    """SGLang's configuration of a storage backend, for one rank of one by default."""
    values = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "served",
    }
    return HiCacheStorageConfig(**(values | fields), extra_config=extra)


def extra_config(pool: str, **settings: Any) -> dict[str, Any]:
    """What an operator gives in --hicache-storage-backend-extra-config."""
    return {
        "backend_name": "penstock",
        "module_path": "penstock.sglang",
        "class_name": "PenstockStorage",
        "interface_v1": 1,
        "pool": pool,
        **GENEROUS_LIMITS,
        **settings,
    }


def backend(url: str, host: Any, settings: dict[str, Any] | None = None, **fields: Any) -> Any:
    """The backend, as SGLang's factory makes it and registers a host pool with it."""
    extra = extra_config(url, **(settings or {}))
    made = StorageBackendFactory.create_backend("dynamic", config(extra, **fields), host)
    made.register_mem_pool_host(host)
    made.on_host_pools_registered()
    return made


def names(count: int, salt: str = "") -> list[str]:
    """Names of pages, in the form of SGLang's hashes."""
    return [hashlib.sha256(f"{salt}{n}".encode()).hexdigest() for n in range(count)]


@dataclass
class Engine:
    """SGLang's cache controller with its threads, over host pools.

    It is the controller that SGLang's server makes for every model; with `states`, for one that has
    recurrent states beside its KV.
    """

    url: str
    layout: str = "page_first"
    states: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> Engine:
        device = mha_pool()
        self.host = mha_host(self.layout, device_pool=device)
        self.state_host = mamba_host() if self.states else None
        entries = [self._entry(PoolName.KV, self.host, device, is_anchor=True)]
        if self.states:
            entries.append(self._entry(PoolName.MAMBA, self.state_host, None))
        allocator = PagedTokenToKVPoolAllocator(
            TOKENS, PAGE, torch.bfloat16, "cpu", device, need_sort=False
        )
        self.controller = HybridCacheController(
            allocator,
            HostPoolGroup(entries),
            PAGE,
            torch.distributed.group.WORLD,
            threading.Event(),
            write_policy="write_through",
            io_backend="direct",
            storage_backend="dynamic",
            prefetch_threshold=PAGE,
            model_name="served",
            storage_backend_extra_config=extra_config(self.url, **self.settings),
            enable_storage_metrics=True,
        )
        return self

    @staticmethod
    def _entry(name: Any, host: Any, device: Any, is_anchor: bool = False) -> Any:
        return build_pool_entry(
            name=name,
            host_pool=host,
            device_pool=device,
            layer_mapping={layer: layer for layer in range(3)},
            transfer_layer_id_max=3,
            is_anchor=is_anchor,
        )

    def __exit__(self, *_: object) -> None:
        self.controller.detach_storage_backend()

    @property
    def backend(self) -> Any:
        return self.controller.storage_backend

    def back_up(self, key: Any, hashes: Sequence[str], seed: int = 1) -> tuple[list[bytes], int]:
        """Has SGLang's backup thread store a prompt, with the state at its end. Returns its pages,
        the state's among them, and the tokens stored."""
        indices = self.host.alloc(len(hashes) * PAGE)
        fill(self.host, seed)
        pages = [page_bytes(self.host, int(start)) for start in indices[::PAGE]]
        states = self._states(hashes[-1:])
        if states:
            fill(self.state_host, seed)
            states[0].host_indices = self.state_host.alloc(1)
            pages.append(page_bytes(self.state_host, int(states[0].host_indices)))
        self.controller.write_storage(indices, key, list(hashes), extra_pools=states or None)
        done = self.controller.ack_backup_queue.get(timeout=60).completed_tokens
        self.host.free(indices)
        return pages, done

    def prefetch(self, key: Any) -> list[bytes]:
        """Has SGLang's prefetch threads look for a prompt and load it; returns its pages, and that
        of the state at their end."""
        handle = CacheRequestHandle("request", 0)
        states = self._states(["?"])
        operation = self.controller.prefetch(handle, key, extra_pools=states or None)
        operation = self.controller.prefetch_hit_queue.get(timeout=60)
        if not operation.storage_hit_count:
            return []
        operation.host_indices = self.host.alloc(operation.storage_hit_count)
        if states:
            states[0].host_indices = self.state_host.alloc(1)
        self.controller.prefetch_buffer.put(operation)
        tokens, found = 0, {}
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=60)
            tokens = ack.completed_tokens or tokens
            found = ack.pool_hits or found
            if ack.completed_req:
                break
        pages = [
            page_bytes(self.host, int(start)) for start in operation.host_indices[:tokens:PAGE]
        ]
        self.host.free(operation.host_indices)
        if states and found.get(PoolName.MAMBA):
            pages.append(page_bytes(self.state_host, int(states[0].host_indices)))
        return pages

    def _states(self, keys: Sequence[str]) -> list[Any]:
        """What a prompt needs of recurrent states: the one at its end."""
        if not self.states:
            return []
        policy = PoolHitPolicy.TRAILING_PAGES
        return [PoolTransfer(PoolName.MAMBA, keys=list(keys), hit_policy=policy)]

    def threads_live(self) -> bool:
        """Whether SGLang's storage threads run."""
        threads = (
            self.controller.prefetch_thread,
            self.controller.prefetch_io_aux_thread,
            self.controller.backup_thread,
        )
        return all(thread.is_alive() for thread in threads)


def prompt(tokens: int, seed: int = 0, **key: Any) -> Any:
    """A prompt as SGLang's radix cache names it."""
    return RadixKey(array("q", [(seed * 7919 + n) % 1000 for n in range(tokens)]), **key)
