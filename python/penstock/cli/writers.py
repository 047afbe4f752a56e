"""Whose KV engines of a pool have found to be wrong."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from penstock._native import Store
from penstock.cli import words
from penstock.cli.findings import Finding
from penstock.errors import StoreError
from penstock.pool.namespace import Unreadable, read_namespace

_MOST = 20
"""The most marks that are told of. Whoever may write to the pool may have made a thousand."""

_ADVICE = (
    "one of the two computes wrong KV: compare weights, adapters, settings and hardware of both "
    "engines (each logs its writer when it starts), and restart the one that is wrong. It is "
    "another writer then"
)


def of_marks(store: Store, timeout: float) -> Iterator[Finding]:
    """A finding for each of the newest marks of writers, and none if there is no such. With
    encryption keys, of those that engines with these keys have made."""
    try:
        marks = store.marks(timeout=timeout)
    except StoreError as error:
        yield Finding("writers", "note", f"whose KV is wrong could not be read: {error}")
        return
    itself = {writer for writer, witness, *_ in marks if writer == witness}
    of_others = [mark for mark in marks if mark[0] != mark[1]]
    of_others.sort(key=lambda mark: (mark[4], mark[2]), reverse=True)
    models: dict[bytes, str] = {}
    for writer, witness, at, namespace, counts in of_others[:_MOST]:
        if namespace not in models:
            models[namespace] = _model(store, namespace, timeout)
        said = (
            f"writer {writer}: engine {witness} computed other KV for the same tokens "
            f"({_time(at)}, {models[namespace]})"
        )
        if counts:
            yield Finding("writers", "warn", f"{said}. Nothing of that writer is loaded", _ADVICE)
        elif witness in itself:
            why = "that engine disagrees with others too, so it is taken to be wrong itself"
            yield Finding("writers", "warn", f"{said}. It does not count: {why}", _ADVICE)
        else:
            why = "others have found that engine to be wrong"
            yield Finding("writers", "note", f"{said}. It does not count: {why}")
    if len(of_others) > _MOST:
        more = len(of_others) - _MOST
        yield Finding("writers", "note", f"{more} more of which engines said so are not shown")


def _time(at: int) -> str:
    """When a mark was made. Whoever may write to the pool may have written any number."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "at no valid time"


def _model(store: Store, namespace: bytes, timeout: float) -> str:
    try:
        described = read_namespace(store, namespace, timeout=timeout)
    except (Unreadable, StoreError):
        described = None
    return f"namespace {namespace.hex()[:8]}, {words.description(described)}"
