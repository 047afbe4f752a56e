"""`penstock bench lookup`: how long it takes to learn which chunks are in a pool."""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from penstock._native import Lookup, Store
from penstock.cli import words
from penstock.errors import StoreError
from penstock.pool.namespace import WHOLE, namespace_digest, object_key

_NAMESPACE = namespace_digest({"kind": "penstock bench lookup"})
_VALUE = b"x"
_BATCH = 1000


@dataclass
class Row:
    """Milliseconds from question to answer, over passes."""

    chunks: int
    p50_ms: float
    p99_ms: float
    us_per_chunk: float


def add_target(targets: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the target to `penstock bench`."""
    lookup = targets.add_parser(
        "lookup",
        help="time to learn which chunks are there",
        description="Stores that many small objects, then asks for all of them at once, as the "
        "scheduler does when a request arrives, pass after pass, and removes them again.",
    )
    words.add_pool_url(lookup)
    lookup.add_argument(
        "--chunks",
        metavar="N[,N…]",
        type=_counts,
        default="1000,10000,100000",
        help="chunks asked for at once (default: %(default)s)",
    )
    words.add_measurement(lookup, passes=21, timed="one look-up")


def _counts(text: str) -> list[int]:
    return [words.count_argument(part) for part in text.split(",")]


def run(args: argparse.Namespace) -> int:
    """Measures every count and shows the figures."""
    store = Store.open(words.pool_url(args), client_name="penstock-bench")
    # Only for this run, because another run may use the same pool at the same time.
    salt = os.urandom(8)
    chunks = [
        hashlib.sha256(salt + n.to_bytes(4, "little")).digest() for n in range(max(args.chunks))
    ]
    keys = [object_key(_NAMESPACE, chunk) for chunk in chunks]
    lookup = Lookup(store)
    try:
        for batch in _batches(keys):
            outcomes = store.put_many([(key, _VALUE) for key in batch], timeout=args.timeout)
            failed = next((each for each in outcomes if isinstance(each, Exception)), None)
            if failed is not None:
                raise failed
        rows = [_measure(lookup, chunks[:count], args) for count in args.chunks]
    finally:
        lookup.shutdown()
        for batch in _batches(keys):
            store.remove(batch, timeout=args.timeout)
    if args.json:
        found = {"url": store.url, "passes": args.passes, "rows": [asdict(row) for row in rows]}
        words.print_measurement(args, found)
    else:
        _show(store.url, rows, args.passes)
    return 0


def _batches(keys: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [keys[at : at + _BATCH] for at in range(0, len(keys), _BATCH)]


def _measure(lookup: Lookup, chunks: list[bytes], args: argparse.Namespace) -> Row:
    seconds = []
    for number in range(args.passes + 1):
        start = time.perf_counter()
        lookup.submit(number, _NAMESPACE, chunks, [WHOLE], args.timeout)
        lookup.wait(args.timeout)
        ((_, answer, _),) = lookup.poll()
        taken = time.perf_counter() - start
        if isinstance(answer, str):
            raise StoreError(f"a look-up of {len(chunks):,} chunks failed: {answer}")
        if not all(answer):
            raise StoreError(
                f"{answer.count(False):,} of {len(chunks):,} objects are gone: the pool is too "
                "small for them, or somebody purges it"
            )
        # The first pass is not counted: it connects.
        if number:
            seconds.append(taken)
    ordered = sorted(seconds)
    median = statistics.median(ordered)
    return Row(
        chunks=len(chunks),
        p50_ms=median * 1e3,
        p99_ms=ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1e3,
        us_per_chunk=median * 1e6 / len(chunks),
    )


def _show(url: str, rows: list[Row], passes: int) -> None:
    table = Table(title=f"{url}, passes: {passes}", box=None)
    for heading in ("chunks", "p50 ms", "p99 ms", "µs a chunk"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row.chunks:,}",
            f"{row.p50_ms:.3f}",
            f"{row.p99_ms:.3f}",
            f"{row.us_per_chunk:.3f}",
        )
    words.console().print(table)
