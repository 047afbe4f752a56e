"""A pool as SGLang's threads use it: every call returns in bounded time, and none raises."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from penstock._native import EncryptionKeys, Store
from penstock.errors import PenstockError, Rejected, StoreError, TooSmall
from penstock.pool import CONNECT_TIMEOUT
from penstock.pool.namespace import RENEWED_SECONDS, object_key, publish_namespace
from penstock.sglang.counters import Counters, Troubles
from penstock.sglang.pages import Loan
from penstock.sglang.settings import Settings

_PIECE_BYTES = 64 << 20
"""Bytes that are moved with one deadline. A pool that stops answering costs no more than one."""

LOOKUP_OBJECTS = 64
"""Objects that are looked up at a time, at first. A store may look for them one by one."""

_DESCRIPTION_TIMEOUT = 1.0
_CLEAR_TIMEOUT = 30.0


class Object(NamedTuple):
    """An object's name in the store, and its bytes in SGLang's memory."""

    name: bytes
    loan: Loan


def object_name(namespace: bytes, key: str, share: int | None = None) -> bytes:
    """The name of a page that SGLang calls `key`; or, if pages are cut by heads, of its share."""
    text = key if share is None else f"{key}#{share}"
    return object_key(namespace, hashlib.sha256(text.encode()).digest())


class PageStore:
    """Objects in a pool. Failures are counted and logged, and count as misses."""

    def __init__(self, settings: Settings, counters: Counters) -> None:
        """Opens the pool. Does not wait for a server.

        Raises:
            ConfigError: the URL or a key is wrong.
            StoreError: the directory cannot be used, or the file of keys cannot be read.
        """
        self._settings = settings
        self._counters = counters
        patience = max(CONNECT_TIMEOUT, settings.lookup_timeout)
        store = Store.open(settings.pool, client_name="penstock-sglang", connect_timeout=patience)
        keys = EncryptionKeys.load(settings.encryption_key_file or None)
        store = store.guarded()
        self._store = store if keys is None else store.encrypted(keys)
        self.url = self._store.url
        """The pool's URL, without credentials."""
        self.troubles = Troubles(counters, self.url)
        """Where failures are told."""
        self._descriptions: dict[bytes, Mapping[str, Any]] = {}
        self._described_next = -math.inf
        """When all of them are published again, by the monotonic clock."""

    def describe(self, namespace: bytes, description: Mapping[str, Any]) -> None:
        """Has a namespace's description published for people, with the next object stored, and
        renewed while objects are stored."""
        self._descriptions[namespace] = description
        self._described_next = -math.inf

    @property
    def lookup_timeout(self) -> float:
        """Seconds that a look-up may take."""
        return self._settings.lookup_timeout

    def contains(self, names: Sequence[bytes], timeout: float) -> list[bool] | None:
        """For each name, whether the pool has it. None if the pool does not answer in time."""
        try:
            return self._store.contains(names, timeout=max(0.001, timeout))
        except PenstockError as error:
            self.troubles.report("a look-up", error)
            return None

    def put(self, objects: Sequence[Object]) -> tuple[list[bool], int]:
        """Stores the objects that the pool does not have. After a look-up that failed, the objects
        behind it are given up; after a store that failed, the rest. For each, returns whether the
        pool has it now; then the bytes that were stored."""
        known = self._present([each.name for each in objects])
        missing = [place for place, is_there in enumerate(known) if not is_there]
        done = known + [False] * (len(objects) - len(known))
        for piece in _pieces(missing, objects):
            outcomes = self._move(
                "a store",
                self._store.put_many,
                [objects[place] for place in piece],
                self._settings.store_deadline,
            )
            for place, outcome in zip(piece, outcomes, strict=True):
                done[place] = isinstance(outcome, bool)
            if not all(done[place] for place in piece):
                break
        stored = sum(objects[place].loan.nbytes for place in missing if done[place])
        if stored:
            self._publish()
        return done, stored

    def _present(self, names: Sequence[bytes]) -> list[bool]:
        """Whether the pool has each of the leading names that it answers for. Each piece has the
        time of a look-up: no request waits for a store."""
        known: list[bool] = []
        while len(known) < len(names):
            piece = names[len(known) : len(known) + LOOKUP_OBJECTS]
            there = self.contains(piece, self.lookup_timeout)
            if there is None:
                break
            known += there
        return known

    def get(self, objects: Sequence[Object]) -> list[bool]:
        """Fetches objects, in order. For each, whether its memory now holds the verified object;
        other memory may hold anything. After a piece with a miss, the rest is given up: SGLang uses
        no page behind a missing one."""
        done = [False] * len(objects)
        for piece in _pieces(range(len(objects)), objects):
            outcomes = self._move(
                "a load",
                self._store.get_many,
                [objects[place] for place in piece],
                self._settings.load_deadline,
            )
            for place, outcome in zip(piece, outcomes, strict=True):
                done[place] = outcome == objects[place].loan.nbytes
            if not all(done[place] for place in piece):
                break
        return done

    def _move(
        self,
        what: str,
        move: Callable[..., list[Any]],
        piece: Sequence[Object],
        deadline: Callable[[int], float],
    ) -> list[Any]:
        """Moves a piece. For each object, the store's answer, or None in the place of a failure."""
        items = [(each.name, each.loan.parts) for each in piece]
        nbytes = sum(each.loan.nbytes for each in piece)
        try:
            outcomes = move(items, timeout=deadline(nbytes))
        except PenstockError as error:
            self.troubles.report(what, error)
            return [None] * len(items)
        failed = [each for each in outcomes if isinstance(each, StoreError)]
        if failed:
            self.troubles.report(what, failed[0])
        spoilt = sum(isinstance(each, (Rejected, TooSmall)) for each in outcomes)
        self._counters.count("rejected_objects", spoilt)
        return [None if isinstance(each, PenstockError) else each for each in outcomes]

    def _publish(self) -> None:
        now = time.monotonic()
        if now < self._described_next:
            return
        self._described_next = now + RENEWED_SECONDS
        for namespace, description in list(self._descriptions.items()):
            with contextlib.suppress(PenstockError):
                publish_namespace(self._store, namespace, description, timeout=_DESCRIPTION_TIMEOUT)

    def clear(self, namespaces: Sequence[bytes]) -> bool:
        """Removes all objects of these namespaces. False if the pool failed meanwhile."""
        end = time.monotonic() + _CLEAR_TIMEOUT
        try:
            for namespace in namespaces:
                listed = self._store.list(namespace, timeout=max(0.001, end - time.monotonic()))
                names = [name for name, _ in listed]
                self._store.remove(names, timeout=max(0.001, end - time.monotonic()))
        except PenstockError as error:
            self.troubles.report("clearing", error)
            return False
        return True


def _pieces(places: Sequence[int], objects: Sequence[Object]) -> Iterator[list[int]]:
    """Cuts places of objects into pieces of :data:`_PIECE_BYTES`, or of one object."""
    piece: list[int] = []
    nbytes = 0
    for place in places:
        size = objects[place].loan.nbytes
        if piece and nbytes + size > _PIECE_BYTES:
            yield piece
            piece, nbytes = [], 0
        piece.append(place)
        nbytes += size
    if piece:
        yield piece
