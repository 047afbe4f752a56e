"""Pages of SGLang's host memory: Penstock as HiCache's storage, against SGLang's own file backend.

Every way does what SGLang's cache controller does with that backend. For its own, SGLang copies
each page. For Penstock it tells where the pages lie. Ways take turns in every pass. After every
load, the pages are compared with what was stored. Run it as
``scripts/sglang.sh .venv 0.5.23 python -m benches.sglang_pages``.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.storage import StorageBackendFactory

from benches.shared import report
from benches.shared.report import MIB, progress, size_name
from benches.shared.rows import Times
from benches.shared.stores import Way, compare
from lab.segments import Segment
from lab.servers import PoolServer
from penstock.sglang import compat

LAYERS, HEADS, HEAD_SIZE = 32, 8, 128
"""Of Llama 3 8B: 128 KiB of KV a token in bfloat16."""

LAYOUTS = ("page_first", "layer_first")
TIMEOUT = 60.0
OPERATIONS = {"set": "put", "get": "get", "exists": "exists"}
"""SGLang's names of what is timed, and ours."""

Pages = tuple[list[str], Any]
"""Names of pages, and the indices of their tokens in host memory."""


class Backend(Way[Pages]):
    """A storage backend, called as SGLang's cache controller calls it."""

    def __init__(self, backend: Any, host: Any) -> None:
        self.backend = backend
        self.host = host
        backend.register_mem_pool_host(host)

    def operations(self) -> dict[str, Callable[[Pages], None]]:
        return {"put": self.put, "exists": self.exists, "get": self.get}

    def exists(self, pages: Pages) -> None:
        """Asks for pages, all of which are there."""
        if self.backend.batch_exists(pages[0]) != len(pages[0]):
            raise RuntimeError(f"{self.name}: a page is gone")

    def end(self, pages: Pages) -> None:
        self.backend.clear()


class Copies(Backend):
    """SGLang's own backend: it gets and gives copies of pages."""

    name = "SGLang's file backend"

    def put(self, pages: Pages) -> None:
        keys, indices = pages
        copies = [self.host.get_data_page(start) for start in indices[:: self.host.page_size]]
        if not self.backend.batch_set(keys, copies):
            raise RuntimeError(f"{self.name}: not stored")

    def get(self, pages: Pages) -> None:
        keys, indices = pages
        into = [self.host.get_dummy_flat_data_page() for _ in keys]
        copies = self.backend.batch_get(keys, into)
        for start, page in zip(indices[:: self.host.page_size], copies, strict=True):
            self.host.set_from_flat_data_page(start, page)


class InPlace(Backend):
    """Penstock: it gets the places of pages."""

    def __init__(self, name: str, url: str, host: Any) -> None:
        self.name = f"Penstock, {name}"
        made = StorageBackendFactory.create_backend("dynamic", storage_config(url), host)
        super().__init__(made, host)
        if not made.moves_in_place():
            raise RuntimeError("the host pool does not tell its pieces")

    def put(self, pages: Pages) -> None:
        if not all(self.backend.batch_set_v1(*pages)):
            raise RuntimeError(f"{self.name}: not stored")

    def get(self, pages: Pages) -> None:
        if not all(self.backend.batch_get_v1(*pages)):
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


class Carried:
    """Pages in one half of host memory, and their places in the other half. The bytes are others in
    each pass, and so are the names."""

    def __init__(self, host: Any, pages: int) -> None:
        self._host = host
        self._pages = pages
        half = pages * host.page_size
        self._source, self._target = torch.arange(half), torch.arange(half, 2 * half)
        self._pass = 0

    def source(self, name: str) -> Pages:
        self._pass += 1
        self._host.kv_buffer.view(torch.int16).random_()
        self._wanted = [page.clone() for page in self._data(self._source)]
        return self._names(), self._source

    def target(self, name: str) -> Pages:
        return self._names(), self._target

    def verify(self, who: str) -> None:
        for wanted, page in zip(self._wanted, self._data(self._target), strict=True):
            if not torch.equal(wanted, page):
                raise RuntimeError(f"{who}: a page came back with other bytes")

    def _names(self) -> list[str]:
        """In the form of SGLang's hashes."""
        numbers = range(self._pages)
        return [hashlib.sha256(f"{self._pass} {n}".encode()).hexdigest() for n in numbers]

    def _data(self, indices: Any) -> list[Any]:
        starts = indices[:: self._host.page_size]
        return [self._host.get_data_page(start).view(torch.int16) for start in starts]


def rows_of(
    times: Times, ways: Sequence[Way[Pages]], layout: str, size: int, pages: int
) -> list[dict[str, Any]]:
    """A row for each way: milliseconds a page, and the ratio to SGLang's own backend."""
    return [
        {
            "layout": layout,
            "page_bytes": size,
            "way": way.name,
            **{
                name: {
                    "ms_per_page": times.median(way.row, operation) / pages * 1000,
                    "time_to_sglang": times.ratio(way.row, ways[0].row, operation),
                }
                for name, operation in OPERATIONS.items()
            },
        }
        for way in ways
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


def open_ways(held: ExitStack, folder: Path, host: Any) -> list[Backend]:
    """All ways, SGLang's own first, over pools that end with `held`."""
    folder.mkdir()
    server = held.enter_context(PoolServer("valkey", folder, "--maxmemory", "2gb"))
    envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.set(str(folder / "own"))
    return [
        Copies(HiCacheFile(storage_config("")), host),
        InPlace("directory", f"file://{folder}/pool?size=4GiB", host),
        InPlace("shared memory", held.enter_context(Segment("bench-pages")).url("1GiB"), host),
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
                times = compare(ways, Carried(host, pages), args.passes)
                rows += rows_of(times, ways, layout, size, pages)
    report.finish(args, table(rows), {"rows": rows})


if __name__ == "__main__":
    main()
