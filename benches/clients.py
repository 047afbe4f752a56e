"""Pool clients side by side: Penstock, redis-py with hiredis, LMCache's native client.

Each transport has a server of its own. In each pass all clients and settings take turns. After
every get the contents are verified. A client's figure is the median of its best setting. Ratios are
medians of the ratios pass by pass. Run it as ``python -m benches.clients``.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benches.shared import report, stores
from benches.shared.pool_clients import Address, Penstock, open_all
from benches.shared.report import progress
from benches.shared.stores import Payload, Values, Way
from lab.servers import PoolServer

TRANSPORTS = ("redis-tcp", "redis-unix", "valkey-tcp", "valkey-unix")


def measure(transport: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All sizes over one server and transport."""
    kind, _, over = transport.partition("-")
    with tempfile.TemporaryDirectory() as folder, PoolServer(kind, Path(folder)) as server:

        @contextmanager
        def clients(_: Payload) -> Iterator[Sequence[Way[Values]]]:
            socket = str(server.socket) if over == "unix" else None
            yield open_all(Address(kind, server.port, socket))
            server.command("FLUSHALL")

        rows = stores.by_size(args, Penstock.name, clients)
    return [{"transport": transport} | row for row in rows]


def processor_time(row: dict[str, Any]) -> str:
    """The client's CPU seconds for a GiB."""
    return f"{row['put']['cpu_seconds_per_gib']:.2f} / {row['get']['cpu_seconds_per_gib']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.clients", description=__doc__)
    parser.add_argument("--sizes", type=report.parse_sizes, default="64KiB,256KiB,1MiB,4MiB")
    parser.add_argument("--total-mib", type=int, default=64, help="bytes of one pass")
    parser.add_argument("--passes", type=int, default=9)
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    args = report.begin(parser)
    rows, parts = [], []
    for transport in args.transports.split(","):
        if shutil.which(f"{transport.partition('-')[0]}-server") is None:
            progress(f"{transport}: no such server here, left out")
            continue
        progress(transport)
        found = measure(transport, args)
        parts.append(
            stores.table(f"{transport}: SET / GET MiB/s (Penstock is so much faster)", found)
        )
        parts.append(stores.table(f"{transport}: SET / GET CPU s/GiB", found, processor_time))
        rows += found
    congestion = args.environment["machine"]["tcp_congestion_control"]
    parts.append(f"The host's TCP congestion control: {congestion}.")
    report.finish(args, "\n\n".join(parts), {"rows": rows})


if __name__ == "__main__":
    main()
