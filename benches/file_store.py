"""The file store against plain files: the same bytes, with a warm page cache.

Plain files are the least that a store of whole files has to do. A put writes to a temporary name
and renames it. A get opens the file and reads it into the caller's buffer. The file store adds a
header, a checksum, verification, its bound on bytes, and one native call for a batch. memcpy of the
bytes is the limit of both. Run it as ``python -m benches.file_store``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benches.shared import report, stores
from benches.shared.pool_clients import TIMEOUT, Penstock, penstock_key
from benches.shared.stores import Payload, Values, Way


class Plain(Way[Values]):
    """One file for each value."""

    name = "plain files"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    def put(self, values: Values) -> None:
        for name, buffer in values:
            temporary = self._folder / f"{name}.tmp"
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                _write(descriptor, buffer)
            finally:
                os.close(descriptor)
            temporary.rename(self._folder / name)

    def get(self, values: Values) -> None:
        for name, buffer in values:
            descriptor = os.open(self._folder / name, os.O_RDONLY)
            try:
                _read(descriptor, buffer)
            finally:
                os.close(descriptor)

    def end(self, values: Values) -> None:
        for name, _ in values:
            (self._folder / name).unlink()


class FileStore(Penstock):
    """Penstock's file store, one call for all values."""

    name = "file store"

    def __init__(self, folder: Path, payload: Payload) -> None:
        super().__init__(f"file://{folder}?size=4GiB", batch_bytes=payload.bytes)

    def end(self, values: Values) -> None:
        self._store.remove([penstock_key(name) for name, _ in values], timeout=TIMEOUT)


class Memory(Way[Values]):
    """memcpy: no store can be faster."""

    name = "memcpy"

    def __init__(self, payload: Payload) -> None:
        self._copy = memoryview(bytearray(payload.bytes))
        self._ends: dict[str, tuple[int, int]] = {}

    def put(self, values: Values) -> None:
        start = 0
        for name, buffer in values:
            end = start + len(buffer)
            self._copy[start:end] = buffer
            self._ends[name] = start, end
            start = end

    def get(self, values: Values) -> None:
        for name, buffer in values:
            start, end = self._ends[name]
            buffer[:] = self._copy[start:end]


def _write(descriptor: int, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        done += os.write(descriptor, buffer[done:])


def _read(descriptor: int, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        moved = os.readv(descriptor, [buffer[done:]])
        if moved == 0:
            raise EOFError("the file is shorter than its value")
        done += moved


def filesystem(folder: Path) -> str:
    """The type of the file system that a folder lies on."""
    said = subprocess.run(
        ["stat", "--file-system", "--format=%T", str(folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    return said.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.file_store", description=__doc__)
    parser.add_argument("--sizes", type=report.parse_sizes, default="64KiB,256KiB,1MiB,4MiB")
    parser.add_argument("--total-mib", type=int, default=64, help="bytes of one pass")
    parser.add_argument("--passes", type=int, default=15)
    parser.add_argument(
        "--folder", type=Path, help="where the files go (default: temporary files')"
    )
    args = report.begin(parser)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)

        @contextmanager
        def ways(payload: Payload) -> Iterator[Sequence[Way[Values]]]:
            yield [
                Plain(folder / f"plain-{payload.size}"),
                FileStore(folder / f"store-{payload.size}", payload),
                Memory(payload),
            ]

        rows = stores.by_size(args, Plain.name, ways)
        found = {"filesystem": filesystem(folder), "rows": rows}
    report.finish(args, stores.table("put / get, MiB/s (time to plain files)", rows), found)


if __name__ == "__main__":
    main()
