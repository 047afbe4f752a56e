"""Shared memory of a pool: a name that no other process has, and its removal."""

from __future__ import annotations

import uuid
from pathlib import Path

FOLDER = Path("/dev/shm")


class Segment:
    """A pool's name in shared memory. As a context manager, it removes what lies there at the
    end."""

    def __init__(self, purpose: str) -> None:
        self._name = f"{purpose}-{uuid.uuid4().hex[:8]}"

    def url(self, size: int | str) -> str:
        """The pool's URL, with room for so many bytes, as a number or as ``1GiB``."""
        return f"shm://{self._name}?size={size}"

    def remove(self) -> None:
        """Gives the memory back, if there is any."""
        (FOLDER / f"penstock-{self._name}").unlink(missing_ok=True)

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.remove()
