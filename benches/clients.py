"""Pool clients side by side: Penstock, redis-py with hiredis, LMCache's native client.

Each transport has a server of its own. In each pass all clients and settings take turns. After
every get the contents are verified. A client's figure is the median of its best setting. Ratios are
medians of the ratios pass by pass. Run it as ``python -m benches.clients``.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benches import report
from benches.pool_clients import Address, Client, Values, open_all
from benches.report import GIB, MIB, progress, size_name
from lab.servers import PoolServer

TRANSPORTS = ("redis-tcp", "redis-unix", "valkey-tcp", "valkey-unix")


@dataclass
class Series:
    """One client, one setting, one size: a figure for each pass."""

    client: str
    setting: str
    put_seconds: list[float] = field(default_factory=list)
    get_seconds: list[float] = field(default_factory=list)
    put_cpu: list[float] = field(default_factory=list)
    get_cpu: list[float] = field(default_factory=list)


class Payload:
    """Values in one block of memory, and a second block for the values that come back."""

    def __init__(self, total: int, size: int) -> None:
        self.size = size
        self.count = total // size
        self.bytes = self.count * size
        rng = np.random.default_rng(size)
        self._source = rng.integers(0, 256, self.bytes, dtype=np.uint8)
        self._target = np.zeros(self.bytes, dtype=np.uint8)

    def source(self, name: str) -> Values:
        return self._cut(name, self._source)

    def target(self, name: str) -> Values:
        """The second block, filled with zeros."""
        self._target.fill(0)
        return self._cut(name, self._target)

    def verify(self, who: str) -> None:
        if not np.array_equal(self._source, self._target):
            raise ValueError(f"{who} returned other bytes than were put")

    def _cut(self, name: str, block: Any) -> Values:
        view = memoryview(block)
        return [
            (f"{name}:{self.size}:{i}", view[i * self.size : (i + 1) * self.size])
            for i in range(self.count)
        ]


def timed(work: Callable[[Values], None], values: Values) -> tuple[float, float]:
    """Wall seconds, and CPU seconds of all threads of this process."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    work(values)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return wall, cpu


def measure(clients: Sequence[Client], payload: Payload, passes: int) -> list[Series]:
    """All clients take turns in every pass. Each pass begins with another one; one is warm-up."""
    series = [Series(client.name, client.setting) for client in clients]
    for number in range(passes + 1):
        for step in range(len(clients)):
            which = (number + step) % len(clients)
            client, found = clients[which], series[which]
            put = timed(client.put, payload.source(client.name))
            get = timed(client.get, payload.target(client.name))
            payload.verify(f"{client.name}, {client.setting}")
            if number:
                found.put_seconds.append(put[0])
                found.put_cpu.append(put[1])
                found.get_seconds.append(get[0])
                found.get_cpu.append(get[1])
    return series


def best(series: Sequence[Series], client: str, direction: str) -> Series:
    """The client's setting with the lowest median."""
    own = [s for s in series if s.client == client]
    return min(own, key=lambda s: statistics.median(getattr(s, f"{direction}_seconds")))


def rows(series: Sequence[Series], payload: Payload) -> list[dict[str, Any]]:
    """One row a client: its best put and best get."""
    names = list(dict.fromkeys(s.client for s in series))
    found = []
    for name in names:
        row: dict[str, Any] = {"client": name, "size": payload.size}
        for direction in ("put", "get"):
            own = best(series, name, direction)
            seconds = getattr(own, f"{direction}_seconds")
            penstock = getattr(best(series, names[0], direction), f"{direction}_seconds")
            row[direction] = {
                "setting": own.setting,
                "mib_per_second": payload.bytes / MIB / statistics.median(seconds),
                "cpu_seconds_per_gib": statistics.median(getattr(own, f"{direction}_cpu"))
                * GIB
                / payload.bytes,
                "penstock_to_this": report.median_ratio(seconds, penstock),
            }
        found.append(row)
    return found


def run_transport(transport: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All sizes over one server and transport."""
    kind, _, over = transport.partition("-")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, PoolServer(kind, Path(folder)) as server:
        address = Address(kind, server.port, str(server.socket) if over == "unix" else None)
        for size in args.sizes:
            payload = Payload(args.total_mib * MIB, size)
            clients = open_all(address)
            try:
                progress(f"{transport}, {size_name(size)}: {len(clients)} clients and settings")
                series = measure(clients, payload, args.passes)
            finally:
                for client in clients:
                    client.close()
            server.command("FLUSHALL")
            found += [{"transport": transport} | row for row in rows(series, payload)]
    return found


def tables(result: list[dict[str, Any]], sizes: Sequence[int]) -> str:
    """Two tables a transport: throughput with Penstock's ratio, and the client's CPU seconds."""
    found = {(r["transport"], r["client"], r["size"]): r for r in result}
    parts = []
    for transport in dict.fromkeys(row["transport"] for row in result):
        clients = dict.fromkeys(r["client"] for r in result if r["transport"] == transport)
        cells = {c: [found[transport, c, size] for size in sizes] for c in clients}
        heads = [size_name(size) for size in sizes]
        parts.append(
            report.table(
                [f"{transport}: SET/GET MiB/s (Penstock's speed to it)", *heads],
                [[client, *map(_speed, row)] for client, row in cells.items()],
            )
        )
        parts.append(
            report.table(
                [f"{transport}: SET/GET client CPU s/GiB", *heads],
                [[client, *map(_cpu, row)] for client, row in cells.items()],
            )
        )
    return "\n\n".join(parts)


def _speed(row: dict[str, Any]) -> str:
    put, get = row["put"], row["get"]
    speed = f"{put['mib_per_second']:.0f}/{get['mib_per_second']:.0f}"
    return f"{speed} (x{put['penstock_to_this']:.2f}/{get['penstock_to_this']:.2f})"


def _cpu(row: dict[str, Any]) -> str:
    return f"{row['put']['cpu_seconds_per_gib']:.2f}/{row['get']['cpu_seconds_per_gib']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.clients", description=__doc__)
    parser.add_argument("--sizes", type=report.parse_sizes, default="64KiB,256KiB,1MiB,4MiB")
    parser.add_argument("--total-mib", type=int, default=64, help="bytes of one pass")
    parser.add_argument("--passes", type=int, default=9)
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    args = report.begin(parser)
    result: dict[str, Any] = {"rows": []}
    for transport in args.transports.split(","):
        if shutil.which(f"{transport.partition('-')[0]}-server") is None:
            progress(f"{transport}: no such server here, left out")
            continue
        result["rows"] += run_transport(transport, args)
    congestion = args.environment["machine"]["tcp_congestion_control"]
    tables_and_host = "\n\n".join(
        [tables(result["rows"], args.sizes), f"The host's TCP congestion control: {congestion}."]
    )
    report.finish(args, tables_and_host, result)


if __name__ == "__main__":
    main()
