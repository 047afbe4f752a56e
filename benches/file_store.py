"""The file store against plain files: the same bytes, with a warm page cache.

Plain files are the least that a store of whole files has to do. A put writes to a temporary name
and renames it. A get opens the file and reads it into the caller's buffer. The file store adds a
header, a checksum, verification, its bound on bytes, and one native call for a batch. memcpy of the
bytes is the limit of both. Run it as ``python -m benches.file_store``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from benches import report
from benches.clients import Payload, timed
from benches.pool_clients import TIMEOUT, Values, penstock_key
from benches.report import MIB, progress, size_name


class Way(ABC):
    """A way to put values somewhere and to get them back."""

    name: str

    @abstractmethod
    def put(self, values: Values) -> None:
        """Puts all values."""

    @abstractmethod
    def get(self, values: Values) -> None:
        """Gets all values into their buffers."""

    @abstractmethod
    def clear(self) -> None:
        """Removes all values."""


class Plain(Way):
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

    def clear(self) -> None:
        for file in self._folder.iterdir():
            file.unlink()


class FileStore(Way):
    """Penstock's file store, one call for all values."""

    name = "file store"

    def __init__(self, folder: Path) -> None:
        from penstock._native import Store

        self._store = Store.open(f"file://{folder}?size=4GiB")
        self._keys: dict[str, bytes] = {}

    def put(self, values: Values) -> None:
        for outcome in self._store.put_many(self._items(values), timeout=TIMEOUT):
            if outcome is not True:
                raise OSError(f"not stored: {outcome}")

    def get(self, values: Values) -> None:
        for (_, buffer), outcome in zip(
            values, self._store.get_many(self._items(values), timeout=TIMEOUT), strict=True
        ):
            if outcome != len(buffer):
                raise OSError(f"not found: {outcome}")

    def clear(self) -> None:
        self._store.remove(list(self._keys.values()), timeout=TIMEOUT)

    def _items(self, values: Values) -> list[tuple[bytes, memoryview]]:
        for name, _ in values:
            self._keys.setdefault(name, penstock_key(name))
        return [(self._keys[name], buffer) for name, buffer in values]


class Memory(Way):
    """memcpy: no store can be faster."""

    name = "memcpy"

    def __init__(self, total: int) -> None:
        self._copy = memoryview(bytearray(total))
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

    def clear(self) -> None:
        self._ends.clear()


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


def measure(folder: Path, size: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All ways take turns in every pass. Each pass begins with another one; one is warm-up."""
    payload = Payload(args.total_mib * MIB, size)
    ways: list[Way] = [
        Plain(folder / f"plain-{size}"),
        FileStore(folder / f"store-{size}"),
        Memory(payload.bytes),
    ]
    seconds: dict[tuple[str, str], list[float]] = {}
    for number in range(args.passes + 1):
        for step in range(len(ways)):
            way = ways[(number + step) % len(ways)]
            put, _ = timed(way.put, payload.source("value"))
            get, _ = timed(way.get, payload.target("value"))
            payload.verify(way.name)
            way.clear()
            if number:
                seconds.setdefault((way.name, "put"), []).append(put)
                seconds.setdefault((way.name, "get"), []).append(get)
    return [
        {
            "size": size,
            "way": way.name,
            "operation": operation,
            "mib_per_second": payload.bytes / MIB / statistics.median(seconds[way.name, operation]),
            "time_to_plain": report.median_ratio(
                seconds[way.name, operation], seconds[Plain.name, operation]
            ),
        }
        for way in ways
        for operation in ("put", "get")
    ]


def tables(rows: list[dict[str, Any]], sizes: list[int]) -> str:
    """MiB/s of each way, and its time relative to plain files."""
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        for operation in ("put", "get"):
            cells = [f"{way}, {operation}"]
            for size in sizes:
                row = next(
                    r
                    for r in rows
                    if (r["way"], r["operation"], r["size"]) == (way, operation, size)
                )
                cells.append(f"{row['mib_per_second']:.0f} ({row['time_to_plain']:.2f})")
            lines.append(cells)
    return report.table(["MiB/s (time to plain files)", *map(size_name, sizes)], lines)


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
    result: dict[str, Any] = {"rows": []}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result["filesystem"] = filesystem(Path(folder))
        for size in args.sizes:
            progress(f"{size_name(size)}: {args.passes} passes")
            result["rows"] += measure(Path(folder), size, args)
    report.finish(args, tables(result["rows"], args.sizes), result)


if __name__ == "__main__":
    main()
