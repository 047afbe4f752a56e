"""Stores side by side: several clients put and get the same values, in turn.

A get ends in the caller's memory, as KV has to. After every get all bytes are compared. A client
may have several settings; what counts is the best of them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from benches.shared import report
from benches.shared.report import GIB, MIB, progress, size_name
from benches.shared.rows import Times, processor_time, turns

V = TypeVar("V")
Values = Sequence[tuple[str, memoryview]]
"""Names, and the buffers from which values come or to which they go."""


class Way(Generic[V]):
    """A way to put values somewhere and to get them back. Only its operations are timed."""

    name: str
    setting = ""

    def begin(self) -> None:
        """Prepares a pass."""

    def put(self, values: V) -> None:
        """Puts all values; returns when the store has them all."""
        raise NotImplementedError

    def get(self, values: V) -> None:
        """Gets all values into their buffers; raises if one is missing."""
        raise NotImplementedError

    def operations(self) -> dict[str, Callable[[V], None]]:
        """What is timed, in this order."""
        return {"put": self.put, "get": self.get}

    def end(self, values: V) -> None:
        """Removes what the pass has put, if that is to be gone."""

    def facts(self) -> dict[str, Any]:
        """What the result says of it besides times."""
        return {}

    def close(self) -> None:
        """Ends its threads and connections."""

    @property
    def row(self) -> str:
        """Its name and setting."""
        return f"{self.name}, {self.setting}"


class Carried(Protocol[V]):
    """What is put and got."""

    def source(self, name: str) -> V:
        """What the way of this name puts."""
        ...

    def target(self, name: str) -> V:
        """Where the way is to get it, without the bytes that are to come."""
        ...

    def verify(self, who: str) -> None:
        """Raises if other bytes came than were put."""
        ...


class Payload:
    """Values in one block of memory, and a second block for the values that come back."""

    def __init__(self, total: int, size: int, *, fresh: bool = False) -> None:
        """`fresh`: each pass of each way puts bytes that were never put before."""
        self.size = size
        self.count = total // size
        self.bytes = self.count * size
        self._fresh = fresh
        self._source = bytearray(os.urandom(self.bytes))
        self._target = bytearray(self.bytes)

    def source(self, name: str) -> Values:
        if self._fresh:
            self._source[:] = os.urandom(self.bytes)
        return self._cut(name, self._source)

    def target(self, name: str) -> Values:
        self._target[:] = bytes(self.bytes)
        return self._cut(name, self._target)

    def verify(self, who: str) -> None:
        if self._source != self._target:
            raise ValueError(f"{who}: other bytes came than were put")

    def blocks(self) -> tuple[bytearray, bytearray]:
        """The memory of both."""
        return self._source, self._target

    def _cut(self, name: str, block: bytearray) -> Values:
        view = memoryview(block)
        return [
            (f"{name}:{self.size}:{i}", view[i * self.size : (i + 1) * self.size])
            for i in range(self.count)
        ]


def compare(ways: Sequence[Way[V]], carried: Carried[V], passes: int) -> Times:
    """Times of each way's row and operation."""
    times = Times()
    for number, way in turns(ways, passes):
        way.begin()
        values = carried.source(way.name)
        for operation, work in way.operations().items():
            if operation != "put":
                values = carried.target(way.name)
            times.run(number, way.row, operation, partial(work, values))
        carried.verify(way.row)
        way.end(values)
    return times


Opened = Callable[[Payload], AbstractContextManager[Sequence[Way[Values]]]]
"""Opens the ways that are compared with this payload."""


def by_size(
    args: argparse.Namespace,
    baseline: str,
    opened: Opened,
    *,
    values: int | None = None,
    fresh: bool = False,
) -> list[dict[str, Any]]:
    """A row for each size and name of a way. A pass moves so many values, or `--total-mib`."""
    found = []
    for size in args.sizes:
        total = values * size if values else args.total_mib * MIB
        payload = Payload(total, size, fresh=fresh)
        with opened(payload) as ways:
            try:
                progress(f"{size_name(size)}: {args.passes} passes of {len(ways)} ways")
                times = compare(ways, payload, args.passes)
            finally:
                for way in ways:
                    way.close()
        found += [_row(times, ways, name, baseline, payload) for name in _names(ways)]
    return found


def _names(ways: Sequence[Way[V]]) -> list[str]:
    return list(dict.fromkeys(way.name for way in ways))


def _row(
    times: Times, ways: Sequence[Way[Values]], name: str, baseline: str, payload: Payload
) -> dict[str, Any]:
    """Figures of the best settings of a way."""

    def best(name: str, operation: str) -> Way[Values]:
        own = [way for way in ways if way.name == name]
        return min(own, key=lambda way: times.median(way.row, operation))

    row: dict[str, Any] = {"client": name, "size": payload.size}
    for operation in ("put", "get"):
        way, against = best(name, operation), best(baseline, operation)
        processor = times.median(way.row, processor_time(operation))
        row[operation] = {
            "setting": way.setting,
            "seconds": times.each(way.row, operation),
            "mib_per_second": payload.bytes / MIB / times.median(way.row, operation),
            "cpu_seconds_per_gib": processor * GIB / payload.bytes,
            "time_to_baseline": times.ratio(way.row, against.row, operation),
        }
    return row | way.facts()


def speeds(row: dict[str, Any]) -> str:
    """MiB/s of put and get; in brackets, the time as a ratio to the baseline's."""
    put, get = row["put"], row["get"]
    ratios = f"{put['time_to_baseline']:.2f} / {get['time_to_baseline']:.2f}"
    return f"{put['mib_per_second']:.0f} / {get['mib_per_second']:.0f} ({ratios})"


def table(
    heading: str,
    rows: Sequence[dict[str, Any]],
    cell: Callable[[dict[str, Any]], str] = speeds,
) -> str:
    """A row for each client, and a column for each size."""
    sizes = dict.fromkeys(row["size"] for row in rows)
    lines = [
        [client, *(cell(row) for row in rows if row["client"] == client)]
        for client in dict.fromkeys(row["client"] for row in rows)
    ]
    return report.table([heading, *map(size_name, sizes)], lines)
