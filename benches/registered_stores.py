"""Registered stores as pools, beside their own clients: Mooncake's, and the example's.

In each pass both put, get and remove the same values, in turn. Penstock's values are sealed and
verified, and go through the store's program. Those of Mooncake's client go from and to memory that
is registered with it; those of the example's own client stay in this process. Nothing is verified
there. Run it as ``scripts/mooncake.sh .venv 0.3.13.post1 python -m benches.registered_stores``, or
as ``python -m benches.registered_stores --store sqlite``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import penstock
from benches import report
from benches.report import MIB, progress, size_name
from lab.distributions import SQLITE, bring
from lab.mooncake import Mooncake
from penstock.pool import Get, Put

BATCH = 8
"""Values in one call."""


class MooncakesOwn:
    """Mooncake's client, in this process."""

    name = "its own client"

    def __init__(self, master: str, values: list[bytearray]) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._client = MooncakeDistributedStore()
        status = self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", master)
        assert status == 0, status
        self._size = len(values[0])
        self._memory = bytearray(2 * BATCH * self._size)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        assert self._client.register_buffer(start, len(self._memory)) == 0
        self._from = [start + n * self._size for n in range(BATCH)]
        self._into = [start + (BATCH + n) * self._size for n in range(BATCH)]
        for number, value in enumerate(values):
            self._memory[number * self._size : (number + 1) * self._size] = value
        self._names = [f"own-{n}" for n in range(BATCH)]

    def put(self) -> None:
        codes = self._client.batch_put_from(self._names, self._from, [self._size] * BATCH)
        assert codes == [0] * BATCH, codes

    def get(self) -> None:
        codes = self._client.batch_get_into(self._names, self._into, [self._size] * BATCH)
        assert codes == [self._size] * BATCH, codes

    def check(self) -> None:
        """What came is what was put."""
        assert self._memory[: BATCH * self._size] == self._memory[BATCH * self._size :]

    def remove(self) -> None:
        self._client.batch_remove(self._names, True)


class SqlitesOwn:
    """The class of the example, in this process."""

    name = "its own client"

    def __init__(self, url: str, values: list[bytearray]) -> None:
        from penstock_store_sqlite import SqliteStore

        self._store = SqliteStore(url)
        self._values = values
        self._keys = [bytes(55) + bytes([n]) for n in range(BATCH)]
        self._got: list[bytes | None] = []

    def put(self) -> None:
        puts = zip(self._keys, self._values, strict=True)
        self._store.put_many([Put(key, memoryview(value), 0) for key, value in puts], 30.0)

    def get(self) -> None:
        room = len(self._values[0])
        self._got = self._store.get_many([Get(key, room, 0) for key in self._keys], 30.0)

    def check(self) -> None:
        """What came is what was put."""
        assert self._got == self._values

    def remove(self) -> None:
        self._store.remove(self._keys, 30.0)


class Pool:
    """Penstock's pool over the same store."""

    name = "Penstock"

    def __init__(self, url: str, values: list[bytearray]) -> None:
        self._pool = penstock.open(url, timeout=30)
        self._values = values
        self._into = [bytearray(len(value)) for value in values]
        self._names = [f"pool-{n}" for n in range(BATCH)]

    def put(self) -> None:
        stored = self._pool.put_many(list(zip(self._names, self._values, strict=True)))
        assert stored == [True] * BATCH, stored

    def get(self) -> None:
        got = self._pool.get_many(self._names, into=self._into)
        assert got == [len(value) for value in self._values], got

    def check(self) -> None:
        """What came is what was put."""
        assert self._into == self._values

    def remove(self) -> None:
        self._pool.remove(self._names)


def timed(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


Own = Callable[[list[bytearray]], Any]
"""Makes the store's own client for some values."""


@contextlib.contextmanager
def mooncake() -> Iterator[tuple[str, Own]]:
    """A Mooncake of its own: the pool's URL, and the client."""
    programs = Path(os.environ["PENSTOCK_TEST_MOONCAKE"])
    with tempfile.TemporaryDirectory() as folder:
        server = Mooncake(programs, Path(folder))
        try:
            server.wait_until_it_stores()
            yield server.url, lambda values: MooncakesOwn(server.master, values)
        finally:
            server.stop()


@contextlib.contextmanager
def sqlite() -> Iterator[tuple[str, Own]]:
    """A data base of its own for each: the pool's URL, and the class."""
    with tempfile.TemporaryDirectory() as folder:
        stores = {"sqlite": "penstock_store_sqlite:SqliteStore"}
        brought = bring(Path(folder) / "site", "penstock-bench", stores)
        sys.path[:0] = [str(brought), str(SQLITE)]
        own = f"sqlite://{folder}/own.db"
        yield f"sqlite://{folder}/pool.db", lambda values: SqlitesOwn(own, values)


STORES = {"mooncake": mooncake, "sqlite": sqlite}


def measure(url: str, own: Own, size: int, passes: int) -> dict[str, Any]:
    values = [bytearray(os.urandom(size)) for _ in range(BATCH)]
    clients = [Pool(url, values), own(values)]
    seconds: dict[str, dict[str, list[float]]] = {
        client.name: {"put": [], "get": []} for client in clients
    }
    for number in range(passes + 1):
        for client in clients if number % 2 else reversed(clients):
            put, get = timed(client.put), timed(client.get)
            client.check()
            client.remove()
            # The first pass sets connections and memory up.
            if number:
                seconds[client.name]["put"].append(put)
                seconds[client.name]["get"].append(get)
    return {"size": size, "batch": BATCH, "seconds": seconds}


def tables(results: list[dict[str, Any]]) -> str:
    rows = []
    for result in results:
        nbytes = result["size"] * result["batch"]
        ours, own = (result["seconds"][name] for name in (Pool.name, MooncakesOwn.name))
        for client, seconds in ((Pool.name, ours), (MooncakesOwn.name, own)):
            rates = [
                f"{nbytes / MIB / statistics.median(seconds[way]):.0f}" for way in ("put", "get")
            ]
            ratios = [
                f"{report.median_ratio(seconds[way], own[way]):.2f}" for way in ("put", "get")
            ]
            rows.append([size_name(result["size"]), client, *rates, " / ".join(ratios)])
    headings = ("value", "client", "put MiB/s", "get MiB/s", "time to its own client's: put / get")
    return report.table(headings, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=list(STORES), default="mooncake")
    parser.add_argument("--sizes", type=report.parse_sizes, default="256KiB,1MiB,4MiB")
    parser.add_argument("--passes", type=int, default=21)
    args = report.begin(parser)
    if args.store == "mooncake" and "PENSTOCK_TEST_MOONCAKE" not in os.environ:
        parser.error("Mooncake is not here: scripts/mooncake.sh runs a command with it")
    results = []
    with STORES[args.store]() as (url, own):
        for size in args.sizes:
            progress(f"values of {size_name(size)}")
            results.append(measure(url, own, size, args.passes))
    found = {"store": args.store, "passes": args.passes, "sizes": results}
    report.finish(args, tables(results), found)


if __name__ == "__main__":
    main()
