"""The kernel's time to carry the bytes of a load between two processes of one machine.

There is no pool and no engine. One process writes and another one reads, through a unix socket and
through TCP, on two cores and on one, in turn. The kernel copies into pages. The writer's processor
time tells whether these pages were at hand. Where a virtual machine gives free memory back to its
host, some pages have to be fetched from the host first. Run it as ``python -m benches.sockets``.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from typing import Any

from benches.shared import report
from benches.shared.report import MIB, progress
from benches.shared.rows import Times, turns

KINDS = ("unix socket", "TCP")
PLACES = ("two cores", "one core")
ROWS = [(kind, place) for kind in KINDS for place in PLACES]
SENT = 64 << 10
"""Bytes of one write, as a server that speaks RESP writes them."""
RECEIVED = 128 << 10


def connected(kind: str) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    if kind == "unix socket":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        writer = socket.create_connection(listener.getsockname())
        return writer, listener.accept()[0]


def carry(kind: str, place: str, amount: int) -> tuple[float, float]:
    """Processor seconds of the writer, and seconds until all bytes have come."""
    cores = sorted(os.sched_getaffinity(0))
    writer, reader = connected(kind)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.sched_setaffinity(0, {cores[0]})
        data, sent, began = bytes(SENT), 0, time.thread_time()
        while sent < amount:
            sent += writer.send(data[: amount - sent])
        os.write(tell, str(time.thread_time() - began).encode())
        os._exit(0)
    os.sched_setaffinity(0, {cores[0] if place == "one core" else cores[1]})
    try:
        buffer, came, began = bytearray(RECEIVED), 0, time.perf_counter()
        while came < amount:
            came += reader.recv_into(buffer)
        seconds = time.perf_counter() - began
        os.waitpid(child, 0)
        return float(os.read(told, 100)), seconds
    finally:
        os.sched_setaffinity(0, cores)
        writer.close()
        reader.close()
        os.close(told)
        os.close(tell)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.sockets", description=__doc__)
    parser.add_argument("--passes", type=int, default=40)
    parser.add_argument("--mib", type=int, default=112, help="a pass")
    args = report.begin(parser)
    times = Times()
    for number, row in turns(ROWS, args.passes, warm_up=0):
        time.sleep(0.5)
        writer, whole = carry(*row, args.mib * MIB)
        times.add(number, ", ".join(row), "writer_cpu", writer)
        times.add(number, ", ".join(row), "until_it_came", whole)
        progress(f"pass {number + 1} of {args.passes}: {', '.join(row)}")
    result: dict[str, Any] = {"mib": args.mib}
    lines = []
    for row in map(", ".join, ROWS):
        writers, median = times.each(row, "writer_cpu"), times.median(row, "writer_cpu")
        slow = sum(seconds > 3 * median for seconds in writers)
        whole = times.each(row, "until_it_came")
        result[row] = {"writer_cpu": writers, "until_it_came": whole, "slow": slow}
        figures = (median, max(writers), times.median(row, "until_it_came"))
        ms = [f"{seconds * 1e3:.0f}" for seconds in figures]
        lines.append([row, *ms, f"{slow} of {len(writers)}"])
    heads = [
        f"{args.mib} MiB, ms",
        "writer's CPU, median",
        "slowest",
        "until it came, median",
        "above three times the median",
    ]
    report.finish(args, report.table(heads, lines), result)


if __name__ == "__main__":
    main()
