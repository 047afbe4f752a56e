"""Namespaces: which users of a pool may share objects, and the descriptions that people read.

A namespace is a digest over a description of everything that must agree before two users of
a pool share objects. The digest alone says nothing to people. So a description can be published
in the pool, under a well-known key, and ``penstock pool ls`` shows it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

from penstock._native import Store
from penstock.errors import ConfigError, Rejected, TooSmall

__all__ = [
    "DESCRIPTIONS",
    "DIGEST_BYTES",
    "namespace_digest",
    "object_key",
    "publish_namespace",
    "read_namespace",
]

DIGEST_BYTES = 16
"""Bytes of a namespace's digest."""

DESCRIPTION_LIMIT = 64 << 10
"""The most bytes that a description's JSON may have."""

# The number is the format version of values. Versions of Penstock with different formats then use
# different namespaces, so a rolling upgrade makes neither remove what it cannot read.
_DIGEST_DOMAIN = b"penstock namespace 1\n"
WHOLE = (0, 1, 0, 1)
"""The span of an object that is not cut by layers or heads."""
_WHOLE = struct.pack("<4H", *WHOLE)

DESCRIPTIONS = hashlib.sha256(b"penstock namespace descriptions").digest()[:DIGEST_BYTES]
"""The namespace in which descriptions of namespaces lie."""


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


def publish_namespace(
    store: Store, digest: bytes, description: Mapping[str, Any], *, timeout: float = 5.0
) -> None:
    """Publishes a namespace's description, unencrypted, so that people without keys can read it.

    If a readable description with all these fields is already published, that one stays. An older
    version of Penstock may have published one with fewer fields.

    Raises:
        ConfigError: the description is not plain JSON, or too long.
        StoreError: the store failed.
    """
    text = canonical_json(description)
    if len(text) > DESCRIPTION_LIMIT:
        raise ConfigError(
            f"a namespace's description may have {DESCRIPTION_LIMIT} bytes, this has {len(text)}"
        )
    store = store.unencrypted()
    published = read_namespace(store, digest, timeout=timeout)
    if published is None or not description.keys() <= published.keys():
        key = object_key(DESCRIPTIONS, digest)
        # A damaged value may lie there. It must go first, because a put may keep an old value.
        store.remove([key], timeout=timeout)
        store.put(key, text, timeout=timeout)


def read_namespace(store: Store, digest: bytes, *, timeout: float = 5.0) -> dict[str, Any] | None:
    """The description published for a namespace; None if there is none that is valid.

    Raises:
        StoreError: the store failed.
    """
    text = bytearray(DESCRIPTION_LIMIT)
    try:
        key = object_key(DESCRIPTIONS, digest)
        nbytes = store.unencrypted().get(key, text, timeout=timeout)
    except (Rejected, TooSmall):
        return None
    if nbytes is None:
        return None
    try:
        description = json.loads(bytes(text[:nbytes]))
    except ValueError:
        return None
    return description if isinstance(description, dict) else None
