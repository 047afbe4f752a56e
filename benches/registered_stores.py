"""Registered stores as pools, beside their own clients: Mooncake's, and the example's.

In each pass both put, get and remove the same values, in turn. Penstock's values are sealed and
verified, and go through the store's program. Those of Mooncake's client go from and to memory that
is registered with it; those of the example's own client stay in this process. Nothing is verified
there. Run it as ``scripts/mooncake.sh .venv 0.3.13.post1 python -m benches.registered_stores``, or
as ``python -m benches.registered_stores --store sqlite``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benches.shared import report, stores
from benches.shared.pool_clients import TIMEOUT, Pool, penstock_key
from benches.shared.stores import Opened, Payload, Values, Way
from lab.distributions import SQLITE, bring
from lab.mooncake import Mooncake
from penstock._native import Buffer
from penstock.pool import Get, Put

BATCH = 8
"""Values in one call."""
OWN = "its own client"


class MooncakesOwn(Way[Values]):
    """Mooncake's client, in this process. The payload is registered with it."""

    name = OWN

    def __init__(self, master: str, payload: Payload) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._client: Any = MooncakeDistributedStore()
        status = self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", master)
        assert status == 0, status
        for block in payload.blocks():
            assert self._client.register_buffer(Buffer(block).address, len(block)) == 0

    def put(self, values: Values) -> None:
        codes = self._client.batch_put_from(*self._places(values))
        assert codes == [0] * len(values), codes

    def get(self, values: Values) -> None:
        codes = self._client.batch_get_into(*self._places(values))
        assert codes == [len(buffer) for _, buffer in values], codes

    def end(self, values: Values) -> None:
        self._client.batch_remove([name for name, _ in values], True)

    def _places(self, values: Values) -> tuple[list[str], list[int], list[int]]:
        return (
            [name for name, _ in values],
            [Buffer(buffer).address for _, buffer in values],
            [len(buffer) for _, buffer in values],
        )


class SqlitesOwn(Way[Values]):
    """The class of the example, in this process. It gives values as objects of its own."""

    name = OWN

    def __init__(self, url: str) -> None:
        from penstock_store_sqlite import SqliteStore

        self._store: Any = SqliteStore(url)
        self._got: list[bytes | None] = []

    def put(self, values: Values) -> None:
        puts = [Put(penstock_key(name), value, 0) for name, value in values]
        self._store.put_many(puts, TIMEOUT)

    def get(self, values: Values) -> None:
        gets = [Get(penstock_key(name), len(buffer), 0) for name, buffer in values]
        self._got = self._store.get_many(gets, TIMEOUT)

    def end(self, values: Values) -> None:
        self._store.remove([penstock_key(name) for name, _ in values], TIMEOUT)

    def operations(self) -> dict[str, Callable[[Values], None]]:
        return super().operations() | {"copy": self._copy}

    def _copy(self, values: Values) -> None:
        """Brings what came to where it is compared."""
        for (_, buffer), value in zip(values, self._got, strict=True):
            assert value is not None
            buffer[:] = value


@contextmanager
def mooncake() -> Iterator[Opened]:
    """A Mooncake of its own, by both clients."""
    programs = Path(os.environ["PENSTOCK_TEST_MOONCAKE"])
    with tempfile.TemporaryDirectory() as folder:
        server = Mooncake(programs, Path(folder))

        @contextmanager
        def ways(payload: Payload) -> Iterator[Sequence[Way[Values]]]:
            yield [Pool(server.url), MooncakesOwn(server.master, payload)]

        try:
            server.wait_until_it_stores()
            yield ways
        finally:
            server.stop()


@contextmanager
def sqlite() -> Iterator[Opened]:
    """A data base of its own for each."""
    with tempfile.TemporaryDirectory() as folder:
        registered = {"sqlite": "penstock_store_sqlite:SqliteStore"}
        brought = bring(Path(folder) / "site", "penstock-bench", registered)
        sys.path[:0] = [str(brought), str(SQLITE)]

        @contextmanager
        def ways(_: Payload) -> Iterator[Sequence[Way[Values]]]:
            yield [Pool(f"sqlite://{folder}/pool.db"), SqlitesOwn(f"sqlite://{folder}/own.db")]

        yield ways


STORES = {"mooncake": mooncake, "sqlite": sqlite}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.registered_stores", description=__doc__)
    parser.add_argument("--store", choices=list(STORES), default="mooncake")
    parser.add_argument("--sizes", type=report.parse_sizes, default="256KiB,1MiB,4MiB")
    parser.add_argument("--passes", type=int, default=21)
    args = report.begin(parser)
    if args.store == "mooncake" and "PENSTOCK_TEST_MOONCAKE" not in os.environ:
        parser.error("Mooncake is not here: scripts/mooncake.sh runs a command with it")
    with STORES[args.store]() as ways:
        rows = stores.by_size(args, OWN, ways, values=BATCH)
    text = stores.table("put / get, MiB/s (time to its own client's)", rows)
    report.finish(args, text, {"store": args.store, "passes": args.passes, "rows": rows})


if __name__ == "__main__":
    main()
