"""A description's fields, each checked: anybody who may write to a pool may have written it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import PenstockError


class WrongField(PenstockError, ValueError):
    """A field is missing, or holds what it may not hold."""

    kind = "wrong_field"


class Fields:
    """Part of a description. What it gives is of the right type and within bounds; every method
    that gives a field raises :class:`WrongField` if it is not.

    >>> fields = Fields({"block_size": 16})
    >>> fields.number("block_size", 1, 1024)
    16
    >>> fields.text("hash", 64)
    Traceback (most recent call last):
    penstock.lookup.fields.WrongField: `hash` is missing
    """

    def __init__(self, found: Mapping[str, Any], path: str = "") -> None:
        self._found = found
        self._path = path

    def has(self, name: str) -> bool:
        """Whether the field is there and holds something."""
        return self._found.get(name) is not None

    def part(self, name: str) -> Fields:
        """The fields of a part."""
        found = self._of(name, dict, "an object")
        return Fields(found, f"{self._path}{name}.")

    def text(self, name: str, most: int) -> str:
        """A text of 1 to `most` characters."""
        found: str = self._of(name, str, "a text")
        if not 1 <= len(found) <= most:
            raise self._wrong(name, f"it may have 1 to {most} characters, and has {len(found)}")
        return found

    def number(self, name: str, least: int, most: int) -> int:
        """A whole number within bounds."""
        return self._number(name, self._found.get(name), least, most)

    def flag(self, name: str) -> bool:
        """Yes or no; no if the field is missing."""
        return bool(self._of(name, bool, "true or false")) if self.has(name) else False

    def binary(self, name: str, most: int) -> bytes:
        """Bytes in hexadecimal, at most so many."""
        return self._bytes(name, self._of(name, str, "a text"), most)

    def texts(self, name: str, most: int, longest: int) -> tuple[str, ...]:
        """Up to `most` texts of up to `longest` characters."""
        found = self._several(name, most)
        if not all(isinstance(each, str) and len(each) <= longest for each in found):
            raise self._wrong(name, f"it must hold texts of at most {longest} characters")
        return tuple(found)

    def digests(self, name: str, most: int, nbytes: int) -> tuple[bytes, ...]:
        """Up to `most` values of `nbytes` bytes in hexadecimal, at least one."""
        found = [self._bytes(name, each, nbytes) for each in self._several(name, most)]
        if not found or any(len(each) != nbytes for each in found):
            raise self._wrong(name, f"it must hold values of {nbytes} bytes in hexadecimal")
        return tuple(found)

    def rows(self, name: str, most: int, columns: int, highest: int) -> list[tuple[int, ...]]:
        """Up to `most` rows of whole numbers from 0 to `highest`."""
        rows = []
        for row in self._several(name, most):
            if not isinstance(row, list) or len(row) != columns:
                raise self._wrong(name, f"it must hold rows of {columns} numbers")
            rows.append(tuple(self._number(name, each, 0, highest) for each in row))
        return rows

    def _several(self, name: str, most: int) -> Sequence[Any]:
        found: list[Any] = self._of(name, list, "a list")
        if len(found) > most:
            raise self._wrong(name, f"it may have {most} entries, and has {len(found)}")
        return found

    def _number(self, name: str, found: Any, least: int, most: int) -> int:
        # `True` is a number to Python.
        if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
            raise self._wrong(name, f"it must be a whole number from {least} to {most}")
        return found

    def _bytes(self, name: str, found: Any, most: int) -> bytes:
        if isinstance(found, str) and len(found) <= 2 * most:
            try:
                return bytes.fromhex(found)
            except ValueError:
                pass
        raise self._wrong(name, f"it must be at most {most} bytes in hexadecimal")

    def _of(self, name: str, kind: type, said: str) -> Any:
        found = self._found.get(name)
        if not isinstance(found, kind):
            raise self._wrong(name, f"it must be {said}")
        return found

    def _wrong(self, name: str, what: str) -> WrongField:
        field = f"`{self._path}{name}`"
        if not self.has(name):
            return WrongField(f"{field} is missing")
        return WrongField(f"{field} is wrong: {what}")
