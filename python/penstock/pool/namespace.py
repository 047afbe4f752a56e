"""Namespaces: which users of a pool may share objects, and the descriptions that people read.

A namespace is a digest over a description of everything that must agree before two users of
a pool share objects. The digest alone says nothing to people. So a description can be published
in the pool, under a well-known key, and ``penstock pool ls`` shows it. Beside the description lies
when the namespace was described first and last, by the clocks of those who did.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from penstock._native import Store
from penstock.errors import ConfigError, PenstockError, Rejected, TooSmall

__all__ = [
    "DESCRIPTIONS",
    "DIGEST_BYTES",
    "RENEWED_SECONDS",
    "ROLL",
    "Published",
    "Unreadable",
    "description_of",
    "model_of",
    "namespace_digest",
    "object_key",
    "publish_namespace",
    "read_description",
    "read_namespace",
    "read_published",
    "remove_namespace",
]

DIGEST_BYTES = 16
"""Bytes of a namespace's digest."""

DESCRIPTION_LIMIT = 64 << 10
"""The most bytes that a description's JSON may have."""

RENEWED_SECONDS = 300.0
"""How old a published description may be before whoever publishes it again renews its time."""

_TIMES = "penstock:described"
"""The field beside a description's own that has the times. It is no part of the digest."""

_MOST_LEVELS = 16
"""The most lists and objects in each other that a description may have."""

_REMOVED_AT_ONCE = 500

# The number is the format version of values. Versions of Penstock with different formats then use
# different namespaces, so a rolling upgrade makes neither remove what it cannot read.
_DIGEST_DOMAIN = b"penstock namespace 2\n"
WHOLE = (0, 1, 0, 1)
"""The span of an object that is not cut by layers or heads."""
_WHOLE = struct.pack("<4H", *WHOLE)

DESCRIPTIONS = hashlib.sha256(b"penstock namespace descriptions 2").digest()[:DIGEST_BYTES]
"""The namespace in which descriptions of namespaces lie. The number is the format version of
values, as for all other namespaces."""

ROLL = hashlib.sha256(b"penstock distrusted writers").digest()[:DIGEST_BYTES]
"""The namespace in which engines tell each other whose KV is wrong, see `Store.marks`."""


def canonical_json(description: Mapping[str, Any]) -> bytes:
    """The one JSON text of a description: sorted keys, no spaces, ASCII.

    Raises:
        ConfigError: the description holds something that JSON has no exact form for.
    """
    try:
        text = json.dumps(
            description, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a namespace's description must be plain JSON: {error}") from error
    return text.encode("ascii")


def namespace_digest(description: Mapping[str, Any]) -> bytes:
    """The namespace of a description. Every difference in the description makes another namespace.

    >>> a = namespace_digest({"model": "m", "dtype": "bfloat16"})
    >>> a == namespace_digest({"dtype": "bfloat16", "model": "m"})
    True
    >>> a == namespace_digest({"model": "m", "dtype": "float16"})
    False
    >>> len(a)
    16

    Raises:
        ConfigError: the description is not plain JSON.
    """
    return hashlib.sha256(_DIGEST_DOMAIN + canonical_json(description)).digest()[:DIGEST_BYTES]


def object_key(namespace: bytes, chunk: bytes) -> bytes:
    """The key, in its fixed-width form, of an object that is not cut by layers or heads."""
    return namespace + chunk.ljust(32, b"\0") + _WHOLE


class Published(NamedTuple):
    """What is published for a namespace."""

    description: dict[str, Any]
    first: int | None = None
    """When the namespace was described first, in seconds since 1970; None if nobody knows. Older
    versions of Penstock do not say it."""
    last: int | None = None
    """When the namespace was described last. Whoever describes it again within
    :data:`RENEWED_SECONDS` leaves this time as it is."""


def publish_namespace(
    store: Store,
    digest: bytes,
    description: Mapping[str, Any],
    *,
    timeout: float = 5.0,
    clock: Callable[[], float] = time.time,
) -> None:
    """Publishes a namespace's description, unencrypted, so that people without keys can read it.

    If a readable description with all these fields is already published, that one stays, and only
    its time is renewed if it is old. An older version of Penstock may have published one with fewer
    fields.

    Raises:
        ConfigError: the description is not plain JSON, or too long.
        StoreError: the store failed.
    """
    now = int(clock())
    text = _text_of(Published(dict(description), now, now))
    if len(text) > DESCRIPTION_LIMIT:
        raise ConfigError(
            f"a namespace's description may have {DESCRIPTION_LIMIT} bytes, this has {len(text)}"
        )
    if _TIMES in description:
        raise ConfigError(f"a namespace's description may not have a field {_TIMES!r}")
    store = store.unencrypted()
    key = object_key(DESCRIPTIONS, digest)
    try:
        found = _read(store, digest, timeout)
        published = None if found is None else _published_of(found)
    except Unreadable:
        found = published = None
    if published is None or found is None:
        # Something else may lie there. It must go first, as a put may keep what has its length.
        store.remove([key], timeout=timeout)
    else:
        is_whole = description.keys() <= published.description.keys()
        # Clocks differ, so it may have been described later than now.
        is_new = published.last is not None and 0 <= now - published.last < RENEWED_SECONDS
        if is_whole and is_new:
            return
        kept = published.description if is_whole else dict(description)
        text = _text_of(Published(kept, published.first, now))
        # A put replaces what has another length. So readers always find one of the two.
        text += b" " * (len(text) == len(found))
        if len(text) > DESCRIPTION_LIMIT:
            # It is from a version that published no times, and has no room for them.
            return
    store.put(key, text, timeout=timeout)


def _text_of(published: Published) -> bytes:
    times = {"first": published.first, "last": published.last}
    return canonical_json({**published.description, _TIMES: times})


def read_namespace(store: Store, digest: bytes, *, timeout: float = 5.0) -> dict[str, Any] | None:
    """The description published for a namespace; None if there is none that is valid.

    Raises:
        StoreError: the store failed.
    """
    try:
        return read_description(store, digest, timeout=timeout)
    except Unreadable:
        return None


def read_description(store: Store, digest: bytes, *, timeout: float = 5.0) -> dict[str, Any] | None:
    """The description published for a namespace; None if there is none.

    Raises:
        Unreadable: something else is there.
        StoreError: the store failed.
    """
    published = read_published(store, digest, timeout=timeout)
    return None if published is None else published.description


def read_published(store: Store, digest: bytes, *, timeout: float = 5.0) -> Published | None:
    """The description published for a namespace, with its times; None if there is none.

    Raises:
        Unreadable: something else is there.
        StoreError: the store failed.
    """
    found = _read(store, digest, timeout)
    return None if found is None else _published_of(found)


def _read(store: Store, digest: bytes, timeout: float) -> bytes | None:
    text = bytearray(DESCRIPTION_LIMIT)
    try:
        key = object_key(DESCRIPTIONS, digest)
        nbytes = store.unencrypted().get(key, text, timeout=timeout)
    except Rejected as error:
        raise Unreadable(f"its value failed verification ({error.reason})") from None
    except TooSmall as error:
        raise Unreadable(f"it may have {DESCRIPTION_LIMIT} bytes, and has {error.nbytes}") from None
    return None if nbytes is None else bytes(text[:nbytes])


def _published_of(text: bytes) -> Published:
    description = description_of(text)
    times = description.pop(_TIMES, None)
    if not isinstance(times, dict):
        return Published(description)
    first, last = (_time(times.get(name)) for name in ("first", "last"))
    return Published(description, first, last)


def _time(said: Any) -> int | None:
    """A time that somebody published; None if it is none that a clock may show."""
    is_time = isinstance(said, int) and not isinstance(said, bool) and 0 < said < 1 << 40
    return said if is_time else None


def remove_namespace(
    store: Store, digest: bytes, *, timeout: float, removed: Callable[[int], None] = lambda _: None
) -> int:
    """Removes a namespace's objects, and its description last. Returns how many there were.
    `removed` is called with the number of objects of each batch. `timeout` is for each call to the
    store.

    Raises:
        StoreError: the store failed. What was removed before is gone.
    """
    found = 0
    keys = [key for key, _ in store.list(digest, timeout=timeout)]
    keys.append(object_key(DESCRIPTIONS, digest))
    for at in range(0, len(keys), _REMOVED_AT_ONCE):
        batch = keys[at : at + _REMOVED_AT_ONCE]
        found += store.remove(batch, timeout=timeout)
        removed(len(batch))
    return found


class Unreadable(PenstockError, ValueError):
    """What lies where a namespace's description should be is none."""

    kind: ClassVar[str] = "unreadable"


def description_of(text: bytes) -> dict[str, Any]:
    """A description from its JSON. Whatever it holds can be written as JSON again, and goes no
    deeper than a few levels. Nothing else is promised: whoever may write to a pool wrote it.

    >>> description_of(b'{"model": "m"}')
    {'model': 'm'}
    >>> description_of(b'{"model": NaN}')
    Traceback (most recent call last):
    penstock.pool.namespace.Unreadable: it holds a number that JSON has no form for

    Raises:
        Unreadable: it is none.
    """
    try:
        found = json.loads(text)
    # Python's reader calls itself for each level.
    except (ValueError, RecursionError):
        raise Unreadable("it is no JSON") from None
    if not isinstance(found, dict):
        raise Unreadable("it is no JSON object")
    level: list[Any] = [found]
    for _ in range(_MOST_LEVELS):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.keys()
                inner += value.values()
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, float) and not math.isfinite(value):
                raise Unreadable("it holds a number that JSON has no form for")
            elif isinstance(value, str) and not _is_text(value):
                raise Unreadable("it holds half of a character")
        level = inner
    if level:
        raise Unreadable(f"it has more than {_MOST_LEVELS} levels")
    return found


def _is_text(value: str) -> bool:
    """Whether it can be written as UTF-8: JSON can name half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def model_of(description: Mapping[str, Any]) -> str | None:
    """The model that a description names; None if it names none, or not by a text."""
    model = description.get("model")
    return model if isinstance(model, str) else None
