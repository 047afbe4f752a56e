"""Pairs of payloads as files, to try other comparisons on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benches.witness.payloads import Payload

PAIRS = 4
"""Pairs of each kind and each two ways, or each fault."""
BYTES = 16 << 20
"""About what is written of a family."""


class Raw:
    """A file with payloads and an index of pairs: `NAME.bin` and `NAME.json`.

    Each pair has the place of both payloads in the file, their bytes, and what is known of them.
    """

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{name.replace(' ', '-')}.bin"
        self._path.write_bytes(b"")
        self._places: dict[bytes, int] = {}
        self._pairs: list[dict[str, Any]] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self._written = 0

    def add(
        self,
        family: str,
        where: Payload,
        what: str,
        one: np.ndarray[Any, Any],
        other: np.ndarray[Any, Any],
        *,
        is_honest: bool,
    ) -> None:
        """Takes a pair, if there are not enough of its kind. Equal ones show nothing."""
        kind = where.kind, what
        if self._counts[kind] >= PAIRS or self._written > BYTES or np.array_equal(one, other):
            return
        self._counts[kind] += 1
        places = [self._place(each.tobytes()) for each in (one, other)]
        self._pairs.append(
            {
                "family": family,
                "kind": where.kind,
                "element": where.element,
                "layers": where.layers,
                "rows": where.rows,
                "is_first": where.is_first,
                "is_honest": is_honest,
                "what": what,
                "bytes": where.size,
                "places": places,
            }
        )
        self._path.with_suffix(".json").write_text(json.dumps(self._pairs, indent=1))

    def _place(self, payload: bytes) -> int:
        if payload not in self._places:
            self._places[payload] = self._written
            with self._path.open("ab") as file:
                file.write(payload)
            self._written += len(payload)
        return self._places[payload]
