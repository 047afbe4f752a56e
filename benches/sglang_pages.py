"""Pages of SGLang's host memory: Penstock as HiCache's storage, against SGLang's own file backend.

Every way does what SGLang's cache controller does with that backend. For its own, SGLang copies
each page. For Penstock it tells where the pages lie. Ways take turns in every pass. After every
load, the pages are compared with what was stored. Run it as
``scripts/sglang.sh .venv 0.5.23 python -m benches.sglang_pages``.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.storage import StorageBackendFactory

from benches import report
from benches.report import MIB, median_ratio, progress, size_name
from lab.servers import PoolServer
from penstock.sglang import compat

LAYERS, HEADS, HEAD_SIZE = 32, 8, 128
"""Of Llama 3 8B: 128 KiB of KV a token in bfloat16."""

LAYOUTS = ("page_first", "layer_first")
TIMEOUT = 60.0
OPERATIONS = ("set", "get", "exists")


class Way(ABC):
    """A storage backend, called as SGLang's cache controller calls it."""

    name: str

    def __init__(self, backend: Any, host: Any) -> None:
        self.backend = backend
        self.host = host
        backend.register_mem_pool_host(host)

    @abstractmethod
    def store(self, keys: list[str], indices: Any) -> None:
        """Backs up pages of host memory."""

    @abstractmethod
    def load(self, keys: list[str], indices: Any) -> None:
        """Loads pages into host memory."""

    def look_up(self, keys: list[str]) -> None:
        """Asks for pages, all of which are there."""
        if self.backend.batch_exists(keys) != len(keys):
            raise RuntimeError(f"{self.name}: a page is gone")

    def clear(self) -> None:
        """Removes all pages."""
        self.backend.clear()


class Copies(Way):
    """SGLang's own backend: it gets and gives copies of pages."""

    name = "SGLang's file backend"

    def store(self, keys: list[str], indices: Any) -> None:
        pages = [self.host.get_data_page(start) for start in indices[:: self.host.page_size]]
        if not self.backend.batch_set(keys, pages):
            raise RuntimeError(f"{self.name}: not stored")

    def load(self, keys: list[str], indices: Any) -> None:
        into = [self.host.get_dummy_flat_data_page() for _ in keys]
        pages = self.backend.batch_get(keys, into)
        for start, page in zip(indices[:: self.host.page_size], pages, strict=True):
            self.host.set_from_flat_data_page(start, page)


class InPlace(Way):
    """Penstock: it gets the places of pages."""

    def __init__(self, name: str, url: str, host: Any) -> None:
        self.name = f"Penstock, {name}"
        made = StorageBackendFactory.create_backend("dynamic", storage_config(url), host)
        super().__init__(made, host)
        if not made.moves_in_place():
            raise RuntimeError("the host pool does not tell its pieces")

    def store(self, keys: list[str], indices: Any) -> None:
        if not all(self.backend.batch_set_v1(keys, indices)):
            raise RuntimeError(f"{self.name}: not stored")

    def load(self, keys: list[str], indices: Any) -> None:
        if not all(self.backend.batch_get_v1(keys, indices)):
            raise RuntimeError(f"{self.name}: not loaded")


def storage_config(url: str) -> Any:
    """SGLang's configuration of a storage backend over this pool."""
    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="llama",
        extra_config={
            "backend_name": "penstock",
            "module_path": "penstock.sglang",
            "class_name": "PenstockStorage",
            "interface_v1": 1,
            "pool": url,
            "model_id": "bench",
            "lookup_timeout": TIMEOUT,
            "load_timeout": TIMEOUT,
            "store_timeout": TIMEOUT,
        },
    )


def host_pool(layout: str, page_tokens: int, pages: int) -> Any:
    """SGLang's host memory of a model with Llama 3 8B's KV."""
    device = MHATokenToKVPool(
        page_tokens, page_tokens, torch.bfloat16, HEADS, HEAD_SIZE, LAYERS, "cpu", False
    )
    info = device.get_device_pool_infos()[0].buffer_info
    with host_memory_budget_scope(4 << 30):
        return get_mha_host_pool_cls(info)(
            info,
            0,
            0,
            page_tokens,
            layout,
            pin_memory=False,
            device_capacity_tokens=device.size,
            start_layer=device.start_layer,
            end_layer=device.end_layer,
            host_token_capacity=pages * page_tokens,
        )


def page_name(number: int, page: int) -> str:
    """The name of a page in a pass, in the form of SGLang's hashes."""
    return hashlib.sha256(f"{number} {page}".encode()).hexdigest()


def spent(work: Callable[[], None]) -> float:
    """The seconds that it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(ways: Sequence[Way], host: Any, passes: int, pages: int) -> dict[str, Any]:
    """Seconds of each way and operation, pass by pass; the first pass is warm-up."""
    half = pages * host.page_size
    source, target = torch.arange(half), torch.arange(half, 2 * half)
    seconds: dict[str, dict[str, list[float]]] = {}
    for number in range(passes + 1):
        for step in range(len(ways)):
            way = ways[(number + step) % len(ways)]
            keys = [
                hashlib.sha256(f"{number} {page}".encode()).hexdigest() for page in range(pages)
            ]
            memory = host.kv_buffer.view(torch.int16)
            memory.random_()
            wanted = [host.get_data_page(start).clone() for start in source[:: host.page_size]]
            took = {
                "set": spent(partial(way.store, keys, source)),
                "exists": spent(partial(way.look_up, keys)),
                "get": spent(partial(way.load, keys, target)),
            }
            for page, start in zip(wanted, target[:: host.page_size], strict=True):
                if not torch.equal(
                    page.view(torch.int16), host.get_data_page(start).view(torch.int16)
                ):
                    raise RuntimeError(f"{way.name}: a page came back with other bytes")
            way.clear()
            if number:
                for operation, each in took.items():
                    seconds.setdefault(way.name, {}).setdefault(operation, []).append(each)
    return seconds


def rows_of(seconds: dict[str, Any], layout: str, size: int, pages: int) -> list[dict[str, Any]]:
    """A row for each way: milliseconds a page, and the ratio to SGLang's own backend."""
    own = seconds[Copies.name]
    return [
        {
            "layout": layout,
            "page_bytes": size,
            "way": way,
            **{
                operation: {
                    "ms_per_page": statistics.median(of[operation]) / pages * 1000,
                    "time_to_sglang": median_ratio(of[operation], own[operation]),
                }
                for operation in OPERATIONS
            },
        }
        for way, of in seconds.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds a page of each way; in brackets, times the time of SGLang's own backend."""
    lines = [
        [
            row["layout"],
            size_name(row["page_bytes"]),
            row["way"],
            *(
                f"{row[operation]['ms_per_page']:.3f} ({row[operation]['time_to_sglang']:.2f})"
                for operation in OPERATIONS
            ),
        ]
        for row in rows
    ]
    return report.table(["layout", "page", "way", *(f"{name}, ms" for name in OPERATIONS)], lines)


def open_ways(held: ExitStack, folder: Path, host: Any) -> list[Way]:
    """All ways, over pools that end with `held`."""
    folder.mkdir()
    server = held.enter_context(PoolServer("valkey", folder, "--maxmemory", "2gb"))
    shared = f"bench-sglang-{uuid.uuid4().hex[:8]}"
    held.callback(lambda: Path(f"/dev/shm/penstock-{shared}").unlink(missing_ok=True))
    envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.set(str(folder / "own"))
    return [
        Copies(HiCacheFile(storage_config("")), host),
        InPlace("directory", f"file://{folder}/pool?size=4GiB", host),
        InPlace("shared memory", f"shm://{shared}?size=1GiB", host),
        InPlace("Valkey, unix socket", server.unix_url, host),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.sglang_pages", description=__doc__)
    parser.add_argument(
        "--page-tokens", type=int, nargs="+", default=[16, 64], help="tokens of a page"
    )
    parser.add_argument("--total-mib", type=int, default=128, help="bytes of one pass")
    parser.add_argument("--passes", type=int, default=15)
    parser.add_argument(
        "--folder", type=Path, help="where the files go (default: temporary files')"
    )
    args = report.begin(parser, sglang=compat.version())
    rows: list[dict[str, Any]] = []
    for layout in LAYOUTS:
        for tokens in args.page_tokens:
            size = tokens * 2 * LAYERS * HEADS * HEAD_SIZE * 2
            pages = args.total_mib * MIB // size
            progress(f"{layout}, {size_name(size)}: {args.passes} passes of {pages} pages")
            host = host_pool(layout, tokens, 2 * pages)
            with ExitStack() as held, tempfile.TemporaryDirectory(dir=args.folder) as folder:
                ways = open_ways(held, Path(folder) / "pools", host)
                rows += rows_of(measure(ways, host, args.passes, pages), layout, size, pages)
    report.finish(args, table(rows), {"rows": rows})


if __name__ == "__main__":
    main()
