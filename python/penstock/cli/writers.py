"""Whose KV engines of a pool have found to be wrong."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from penstock._native import Store
from penstock.cli import words
from penstock.cli.findings import Finding
from penstock.errors import StoreError
from penstock.pool.namespace import Unreadable, read_namespace

_ADVICE = (
    "one of the two computes wrong KV: compare weights, adapters, settings and hardware of both "
    "engines (each logs its writer when it starts), and restart the one that is wrong. It is "
    "another writer then"
)


def of_marks(store: Store, timeout: float) -> Iterator[Finding]:
    """A finding for each writer that other engines have marked, and none if there is no such. With
    encryption keys, of those that engines with these keys have marked."""
    try:
        marks = store.marks(timeout=timeout)
    except StoreError as error:
        yield Finding("writers", "note", f"whose KV is wrong could not be read: {error}")
        return
    itself = {writer for writer, witness, *_ in marks if writer == witness}
    for writer, witness, at, namespace, counts in marks:
        if writer == witness:
            continue
        said = (
            f"writer {writer}: engine {witness} computed other KV for the same tokens "
            f"({_when(at)}, {_model(store, namespace, timeout)})"
        )
        if counts:
            yield Finding("writers", "warn", f"{said}. Nothing of that writer is loaded", _ADVICE)
        elif witness in itself:
            why = "that engine disagrees with others too, so it is taken to be wrong itself"
            yield Finding("writers", "warn", f"{said}. It does not count: {why}", _ADVICE)
        else:
            why = "others have found that engine to be wrong"
            yield Finding("writers", "note", f"{said}. It does not count: {why}")


def _when(at: int) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        # Whoever can write to the pool can write anything there.
        return "nobody knows when"


def _model(store: Store, namespace: bytes, timeout: float) -> str:
    try:
        described = read_namespace(store, namespace, timeout=timeout)
    except (Unreadable, StoreError):
        described = None
    return f"namespace {namespace.hex()[:8]}, {words.description(described)}"
