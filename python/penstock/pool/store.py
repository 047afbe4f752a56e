"""What the author of a store in Python writes: a class like :class:`PythonStore`."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.errors import PenstockError, StoreError

__all__ = ["Get", "Listed", "Put", "PythonStore"]


class Put(NamedTuple):
    """A value to put."""

    key: bytes
    """The object's name: 56 bytes, of which the first 16 are its namespace."""
    value: memoryview
    """The value. It is there only until the call returns."""
    position: int
    """Tokens before this value in its prompt, 0 if nobody knows. A store that evicts the least
    recently used value may count values further on in a prompt as used earlier."""


class Get(NamedTuple):
    """A value to get."""

    key: bytes
    """The object's name, as in :class:`Put`."""
    room: int
    """Bytes that the value's destination has. A longer value is of no use to the caller."""
    position: int
    """Tokens before the value in its prompt, as in :class:`Put`. 2**64 - 1 for a get that is no use
    of the value."""


class Listed(NamedTuple):
    """An object of a listing."""

    key: bytes
    nbytes: int
    """Bytes of its value."""
    last_use: int = 0
    """When the object was used last, in a unit of the store's own; 0 if the store does not know."""


class PythonStore(abc.ABC):
    """A store in Python. It runs in a program of its own beside the engine, so it may use whatever
    it likes. If it is slow, raises, hangs, leaks or dies, that costs hits and nothing else.

    Values are opaque bytes. Penstock seals them before they get here and verifies them when they
    come back. A put is whole or not at all. A put under a key that exists replaces the value. If
    the two have the same length, the store may keep the old one.

    Every method may raise a :class:`~penstock.errors.StoreError`. Any other exception counts as
    :class:`~penstock.errors.Unavailable`. `timeout` is the number of seconds that somebody still
    waits for the answer. A store that is later than that by more than two seconds is ended with its
    program, and started again after a pause.

    The URL's password, and values of its parameters whose names say password, secret, token, key or
    credential, are taken out of all messages, whether they are repeated as they stand in the URL,
    decoded, or encoded anew.

    Everything is called from one thread, one call after the other, unless `concurrency` is more.
    """

    shared: bool = True
    """Whether other processes see what this one puts."""
    persistent: bool = True
    """Whether values outlive the process."""
    bounded: bool = False
    """Whether the store itself keeps within a bound and evicts to do so."""
    pipelined: bool = False
    """Whether a batch takes less time than its requests one by one."""
    max_value_bytes: int = 1 << 30
    """The largest value that is accepted, in bytes. Longer ones never get here."""
    concurrency: int = 1
    """How many calls, at most 64, may run at a time, each in a thread of its own."""
    shown_url: str = ""
    """The URL for people, without credentials. If it is empty, the URL is shown without user,
    password and parameters."""

    @abc.abstractmethod
    def __init__(self, url: str) -> None:
        """Opens the store that a URL names. This checks the URL. It should not wait for a server.

        Raises:
            ConfigError: the URL is wrong.
        """

    @abc.abstractmethod
    def contains(self, keys: Sequence[bytes], timeout: float) -> Sequence[bool]:
        """For each key, in order, whether the store has it."""

    @abc.abstractmethod
    def put_many(self, batch: Sequence[Put], timeout: float) -> Sequence[bool | StoreError]:
        """Puts values. For each: True if it is stored, False if the store kept a value of the same
        length, or the exception that concerns this value only."""

    @abc.abstractmethod
    def get_many(
        self, batch: Sequence[Get], timeout: float
    ) -> Sequence[bytes | bytearray | memoryview | PenstockError | None]:
        """Gets values. For each: the value, None if there is none, or the exception that concerns
        this value only. If that is :class:`~penstock.errors.TooSmall`, the value is longer than its
        destination. The values are read before the next call."""

    @abc.abstractmethod
    def remove(self, keys: Sequence[bytes], timeout: float) -> int:
        """Removes the keys that exist; returns how many did."""

    @abc.abstractmethod
    def list_objects(self, namespace: bytes | None, timeout: float) -> Iterable[Listed]:
        """Every object, of one namespace if one is given, in no particular order."""

    def touch(self, batch: Sequence[tuple[bytes, int]], timeout: float) -> Sequence[bool]:
        """Counts values, given by key and position, as used now. For each, whether the store has
        it. A store that does not evict by use has nothing to do."""
        return self.contains([key for key, _ in batch], timeout)

    def describe(self, timeout: float) -> Mapping[str, object]:
        """Facts about the store's settings and state, by name."""
        return {"store": type(self).__qualname__}

    def close(self) -> None:  # noqa: B027 (most stores have nothing to let go of)
        """Lets go of everything. Nothing is called after this. It may not come to it."""
