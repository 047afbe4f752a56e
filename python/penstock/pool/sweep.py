"""Reads what lies in a pool, value by value, and says of each whether it is sound.

Few values are in memory at once. The list of a namespace's keys is there in whole, with some 200
bytes for each object.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeVar

from penstock._native import Store
from penstock.errors import IoError, PenstockError
from penstock.pool.namespace import DESCRIPTIONS
from penstock.pool.pace import Pace

__all__ = ["Finding", "Look", "Scrubbed", "batches", "scrub", "sweep"]

IN_FLIGHT_BYTES = 16 << 20
"""Bytes of values that are in memory at once. A single value may have more."""

AT_ONCE = 256
"""The most values that are in memory at once."""

AUTHENTICATION = "authentication"
"""Why a value is unreadable that was encrypted with a tenant's cache salt. A damaged one looks the
same without the salt."""

T = TypeVar("T")


class Finding(Enum):
    """What a look at an object shows."""

    SOUND = "sound"
    """The value is what was stored under its key."""
    UNREADABLE = "unreadable"
    """Others may be able to use it. It is encrypted with a key or a cache salt that is not known
    here; or it is not encrypted, and there are keys; or another version of Penstock wrote it. Or
    the file system could not read it."""
    DAMAGED = "damaged"
    """No reader can use it."""
    GONE = "gone"
    """The object was evicted or removed after it was listed."""


class Look(NamedTuple):
    """An object that was looked at."""

    key: bytes
    finding: Finding
    reason: str
    """Why the object is not sound, as a stable lower-case name. Else empty."""
    value: bytes
    """The value as it lies in the store, header in front. Empty if it could not be read."""


@dataclass
class Scrubbed:
    """What a scrub found in one namespace."""

    digest: bytes
    objects: int
    """Objects that the namespace has, also those that were not looked at."""
    nbytes: int = 0
    """Bytes that were read."""
    found: Counter[Finding] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    """Why objects were not sound, and how many for each reason."""
    removed: int = 0

    @property
    def left_damaged(self) -> int:
        """Damaged objects that are still in the pool."""
        return self.found[Finding.DAMAGED] - self.removed


def batches(items: Iterable[T], nbytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Cuts items into batches that may be in memory at once."""
    batch: list[T] = []
    total = 0
    for item in items:
        size = nbytes(item)
        if batch and (total + size > IN_FLIGHT_BYTES or len(batch) == AT_ONCE):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


def sweep(
    store: Store, listed: Sequence[tuple[bytes, int]], *, timeout: float, pace: Pace
) -> Iterator[list[Look]]:
    """Looks at objects of one namespace, which `Store.list` listed, batch by batch.

    `timeout` is for each batch, in seconds. Valkey, Redis and memory count this as a use of the
    values; a directory and shared memory do not.

    Raises:
        StoreError: the store failed.
    """
    for batch in batches(listed, lambda one: one[1]):
        # Descriptions are for people without keys.
        reader = store.unencrypted() if batch[0][0].startswith(DESCRIPTIONS) else store
        outcomes = store.get_whole(batch, timeout=timeout)
        looks = []
        there = []
        for (key, _), outcome in zip(batch, outcomes, strict=True):
            if outcome is None:
                looks.append(Look(key, Finding.GONE, "", b""))
            elif isinstance(outcome, IoError):
                looks.append(Look(key, Finding.UNREADABLE, outcome.kind, b""))
            elif isinstance(outcome, PenstockError):
                raise outcome
            else:
                there.append((key, outcome))
        findings = reader.examine(there)
        for (key, value), (finding, reason) in zip(there, findings, strict=True):
            looks.append(Look(key, Finding(finding), reason, value))
        yield looks
        pace.spend(sum(len(value) for _, value in there))


def scrub(
    store: Store,
    digest: bytes,
    *,
    timeout: float,
    pace: Pace,
    share: float = 1.0,
    remove: bool = False,
    has_cache_salts: bool = True,
    advance: Callable[[int], None] = lambda objects: None,
) -> Scrubbed:
    """Looks at the objects of a namespace, and counts what it finds.

    Args:
        store: the pool, with the encryption keys of its engines, if they have any.
        digest: the namespace.
        timeout: seconds for the listing, and for each batch.
        pace: bound on the bytes read.
        share: looks at this share of the objects, chosen at random.
        remove: removes what is damaged.
        has_cache_salts: whether tenants may have stored values with cache salts. If not, an
            encrypted value that does not authenticate is damaged.
        advance: is called with the number of objects that were looked at since the last call.

    Raises:
        StoreError: the store failed. What was removed until then stays removed.
    """
    listed = store.list(digest, timeout=timeout)
    scrubbed = Scrubbed(digest, objects=len(listed))
    if share < 1.0:
        listed = random.sample(listed, math.ceil(len(listed) * share))
    for looks in sweep(store, listed, timeout=timeout, pace=pace):
        damaged = []
        for look in looks:
            finding = look.finding
            if look.reason == AUTHENTICATION and not has_cache_salts:
                finding = Finding.DAMAGED
            if finding is Finding.DAMAGED:
                damaged.append((look.key, len(look.value)))
            scrubbed.found[finding] += 1
            scrubbed.nbytes += len(look.value)
            if look.reason:
                scrubbed.reasons[look.reason] += 1
        if remove and damaged:
            store.remove_damaged(damaged, timeout=timeout)
            # Also those that somebody else removed in the meantime.
            scrubbed.removed += len(damaged)
        advance(len(looks))
    return scrubbed
