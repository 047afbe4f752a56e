"""The pool: verified values by key, in any store."""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias, TypeVar, overload

from penstock._native import Buffer, EncryptionKeys, Store
from penstock.errors import (
    Closed,
    ConfigError,
    NotFound,
    PenstockError,
    Rejected,
    StoreError,
    TooSmall,
)
from penstock.pool.namespace import (
    DESCRIPTIONS,
    DIGEST_BYTES,
    RENEWED_SECONDS,
    ROLL,
    Published,
    Unreadable,
    namespace_digest,
    object_key,
    publish_namespace,
    read_published,
)

__all__ = ["CONNECT_TIMEOUT", "POOL_VARIABLE", "Entry", "Key", "NamespaceUsage", "Pool", "open"]

POOL_VARIABLE = "PENSTOCK_POOL"
"""Environment variable with the pool's URL, for use if the settings name none. So a URL with a
password stays out of command lines."""

CONNECT_TIMEOUT = 1.0
"""Seconds that making a connection may take, unless somebody says otherwise."""

Key: TypeAlias = str | bytes
"""A key of any length; text stands for its UTF-8 bytes."""

Items: TypeAlias = (
    Mapping[str, Any] | Mapping[bytes, Any] | Mapping[Key, Any] | Iterable[tuple[Key, Any]]
)
"""Keys with their values. A mapping's type is invariant in its keys, so each kind is named."""

Namespace: TypeAlias = str | bytes | Mapping[str, Any]

T = TypeVar("T")

_FIRST_GUESS = 64 << 10
_GUESSED_BYTES_AT_ONCE = 256 << 20
_MOST_BYTES = 16 << 30
"""No value is longer, whatever a store says."""
_TRIES = 3
"""How often a value is fetched that gets longer each time."""
_DESCRIPTION_TIMEOUT = 1.0


class _Unset:
    """No default was given: a miss raises."""


_UNSET = _Unset()


class Entry(NamedTuple):
    """An object as a listing shows it. A store has no keys, only their identities."""

    identity: bytes
    """SHA-256 of the key, see :meth:`Pool.identity`."""
    nbytes: int
    """Bytes that the store holds for it, its header included."""


_OWN = {DESCRIPTIONS: "descriptions of namespaces", ROLL: "writers of wrong KV"}
"""Namespaces that describe a pool itself, and what lies there."""


class NamespaceUsage(NamedTuple):
    """The room that one namespace takes up in a pool."""

    digest: bytes
    objects: int
    nbytes: int
    """Bytes of its values, headers included."""
    description: dict[str, Any] | None
    """The description that its users published; None if there is none."""
    first_described: float | None = None
    """When its users described it first, in seconds since 1970. They do so with their first
    store. None if nobody knows."""
    last_described: float | None = None
    """When its users described it last. They do so every five to ten minutes while they store."""
    last_use: float | None = None
    """When one of its values was used last. None if the store does not know, as servers and object
    stores do not, and if it was retired and not used since."""


class Pool:
    """Values by key in a store shared by many machines; open one with :func:`penstock.open`.

    A key stands for one content. If a key already has a value of the same length, a put may keep
    the old value. To change a value, remove it first.

    A buffer is anything with the buffer protocol (``bytes``, ``bytearray``, ``memoryview``,
    numpy arrays) or DLPack in host memory (torch tensors, ``bfloat16`` included). A list or tuple
    of buffers stands for their concatenation. A buffer that is not contiguous or not in host memory
    is refused before anything is touched, and so is a destination that is not writable. Bytes go
    from and to these buffers without a copy on the way. Each buffer stays in place until the
    operation ends.

    A get yields only bytes that were verified against the checksum, key and namespace that they
    were stored with. A value that fails is removed from the pool and is a miss; ``stats()``
    counts it as ``rejected``. If a get raises, or finds a value that fails, its destination may
    hold other bytes than before. Every other miss leaves the destination as it was.

    With encryption keys, a get yields only values that were encrypted with one of these keys. A
    value encrypted with another key is a miss too, but it stays in the pool. Encryption makes a
    copy of the value.

    All methods but :meth:`close`, :meth:`identity` and :meth:`stats` talk to the store. They take a
    ``timeout`` in seconds for the whole call (the pool's own if None). They raise a
    :class:`~penstock.errors.StoreError` if the store fails (:class:`~penstock.errors.TimedOut` at
    the timeout), or :class:`~penstock.errors.Closed` after :meth:`close`. Any number of threads
    may call all methods; native code runs without the GIL.

    >>> import penstock
    >>> pool = penstock.open("memory://?size=64MiB")
    >>> pool.put("prompt", b"its KV")
    True
    >>> "prompt" in pool, pool.contains(["prompt", "another"])
    (True, [True, False])
    >>> into = bytearray(6)
    >>> pool.get("prompt", into=into), bytes(into)
    (6, b'its KV')
    >>> pool.get("another", default=None) is None
    True
    >>> pool.close()
    """

    def __init__(self, store: Store, namespace: Namespace, *, timeout: float = 10.0) -> None:
        self._store: Store | None = store
        self._timeout = timeout
        self._guess = _FIRST_GUESS
        self._description: Mapping[str, Any] | None = None
        self._described_next = -math.inf
        """When the namespace is described again, by the monotonic clock."""
        if isinstance(namespace, bytes):
            if len(namespace) != DIGEST_BYTES:
                raise ConfigError(
                    f"a namespace given as bytes is a digest of {DIGEST_BYTES}, "
                    f"not {len(namespace)}"
                )
            self.namespace = namespace
            """Digest of the namespace, 16 bytes."""
        else:
            if isinstance(namespace, str):
                namespace = {"kind": "pool", "name": namespace}
            self._description = namespace
            self.namespace = namespace_digest(namespace)

    @property
    def url(self) -> str:
        """The store's URL, without credentials."""
        return self._open_store().url

    def __repr__(self) -> str:
        where = "closed" if self._store is None else repr(self._store.url)
        return f"Pool({where}, namespace={self.namespace.hex()!r})"

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the store. Operations under way in other threads go on to their end."""
        self._store = None

    @staticmethod
    def identity(key: Key) -> bytes:
        """The name of a key in the store: SHA-256 of the key's bytes.

        >>> Pool.identity("a") == Pool.identity(b"a")
        True
        """
        return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()

    def contains(self, keys: Iterable[Key], *, timeout: float | None = None) -> builtins.list[bool]:
        """For each key, whether the store has a value. The value is not verified. ``key in pool``
        asks for one key."""
        deadline = self._deadline(timeout)
        return self._open_store().contains(self._object_keys(keys), timeout=deadline.left())

    def __contains__(self, key: Key) -> bool:
        return self.contains([key])[0]

    def put(self, key: Key, value: Any, *, timeout: float | None = None) -> bool:
        """Stores a value. Returns False if the store kept a value of the same length that was
        already there.

        Raises:
            ConfigError: the value is not a buffer that can be read, or is larger than the store
                takes.
        """
        deadline = self._deadline(timeout)
        store = self._open_store()
        stored = store.put(self._object_key(key), value, timeout=deadline.left())
        self._describe_namespace(store, deadline)
        return stored

    def put_many(
        self,
        items: Items,
        *,
        timeout: float | None = None,
    ) -> builtins.list[bool]:
        """Stores several values, pipelined. Returns for each what :meth:`put` returns.

        Raises:
            StoreError: the error of the first value that failed. Later values may have been stored.
        """
        deadline = self._deadline(timeout)
        store = self._open_store()
        pairs = items.items() if isinstance(items, Mapping) else items
        batch = [(self._object_key(key), value) for key, value in pairs]
        outcomes = store.put_many(batch, timeout=deadline.left())
        self._describe_namespace(store, deadline)
        return [_or_raise(outcome) for outcome in outcomes]

    @overload
    def get(self, key: Key, *, timeout: float | None = None) -> bytearray: ...
    @overload
    def get(self, key: Key, *, into: Any, timeout: float | None = None) -> int: ...
    @overload
    def get(self, key: Key, *, default: T, timeout: float | None = None) -> bytearray | T: ...
    @overload
    def get(self, key: Key, *, into: Any, default: T, timeout: float | None = None) -> int | T: ...

    def get(
        self,
        key: Key,
        *,
        into: Any = None,
        default: Any = _UNSET,
        timeout: float | None = None,
    ) -> Any:
        """Fetches a value.

        With ``into``, the value is written to the start of this buffer, and the result is the
        number of its bytes. Without ``into``, the result is a new ``bytearray``.

        Giving ``into`` spares the memory and, for values of varying sizes, a second round trip.

        Raises:
            NotFound: no value under the key passes verification, and there is no ``default``. It
                is a :class:`KeyError`.
            TooSmall: the value does not fit ``into``; its size is ``.nbytes``.
            ConfigError: ``into`` is not a writable contiguous buffer in host memory.
        """
        [outcome] = self._get_many([key], None if into is None else [into], timeout)
        if outcome is not None:
            return outcome
        if isinstance(default, _Unset):
            raise NotFound(f"no verified value under {key!r}")
        return default

    @overload
    def get_many(
        self, keys: Iterable[Key], *, timeout: float | None = None
    ) -> builtins.list[bytearray | None]: ...
    @overload
    def get_many(
        self, keys: Iterable[Key], *, into: Sequence[Any], timeout: float | None = None
    ) -> builtins.list[int | None]: ...

    def get_many(
        self,
        keys: Iterable[Key],
        *,
        into: Sequence[Any] | None = None,
        timeout: float | None = None,
    ) -> builtins.list[Any]:
        """Fetches several values, pipelined. Returns for each what :meth:`get` returns, or None for
        a miss. ``into`` has one destination for each key; no two may overlap.

        Raises:
            StoreError: the error of the first value that failed.
            TooSmall: a value does not fit its destination.
            ConfigError: a destination cannot be used; nothing was fetched.
        """
        return self._get_many(_several(keys), into, timeout)

    def remove(self, keys: Iterable[Key], *, timeout: float | None = None) -> int:
        """Removes the keys that exist; returns how many did."""
        deadline = self._deadline(timeout)
        return self._open_store().remove(self._object_keys(keys), timeout=deadline.left())

    def retire(self, *, timeout: float | None = None) -> None:
        """Counts all values of this namespace as used before everything else in the store, so that
        they go first when room is short. What is used afterwards counts as used then.

        Servers, object stores and stores in Python evict by rules of their own, and do nothing."""
        deadline = self._deadline(timeout)
        self._open_store().retire(self.namespace, timeout=deadline.left())

    def list(self, *, timeout: float | None = None) -> builtins.list[Entry]:
        """Every object of this namespace, in no particular order."""
        deadline = self._deadline(timeout)
        listed = self._open_store().list(self.namespace, timeout=deadline.left())
        return [Entry(key[DIGEST_BYTES:][:32], nbytes) for key, nbytes in listed]

    def namespaces(self, *, timeout: float | None = None) -> builtins.list[NamespaceUsage]:
        """The room that each namespace takes up in the whole store, this pool's namespace
        included."""
        deadline = self._deadline(timeout)
        store = self._open_store()
        found = []
        for digest, objects, nbytes, last_use in store.usage(timeout=deadline.left()):
            published: Published | None = None
            if digest in _OWN:
                published = Published({"kind": _OWN[digest]})
            else:
                with contextlib.suppress(Unreadable):
                    published = read_published(store, digest, timeout=deadline.left())
            description, first, last = published or (None, None, None)
            found.append(
                NamespaceUsage(digest, objects, nbytes, description, first, last, last_use)
            )
        return found

    def describe(self, *, timeout: float | None = None) -> dict[str, str]:
        """The store's own report of its settings and state."""
        return self._open_store().describe(timeout=self._deadline(timeout).left())

    def stats(self) -> dict[str, int]:
        """Counters of this pool since it was opened.

        >>> import penstock
        >>> with penstock.open("memory://?size=1MiB") as pool:
        ...     _ = pool.get("nothing", default=None)
        ...     pool.stats()["misses"]
        1
        """
        return self._open_store().stats()

    def _open_store(self) -> Store:
        if self._store is None:
            raise Closed("the pool is closed")
        return self._store

    def _deadline(self, timeout: float | None) -> _Deadline:
        return _Deadline(self._timeout if timeout is None else timeout)

    def _object_key(self, key: Key) -> bytes:
        return object_key(self.namespace, self.identity(key))

    def _object_keys(self, keys: Iterable[Key]) -> builtins.list[bytes]:
        return [self._object_key(key) for key in _several(keys)]

    def _describe_namespace(self, store: Store, deadline: _Deadline) -> None:
        """Publishes this namespace's description for people, and renews it while values are put. If
        that fails, values are stored all the same."""
        now = time.monotonic()
        if now < self._described_next:
            return
        # No other thread describes it meanwhile, nor anybody again what cannot be published.
        description, self._description = self._description, None
        if description is None:
            return
        self._described_next = now + RENEWED_SECONDS
        with contextlib.suppress(StoreError):
            timeout = min(_DESCRIPTION_TIMEOUT, deadline.left())
            publish_namespace(store, self.namespace, description, timeout=timeout)
        self._description = description

    def _get_many(
        self, keys: Iterable[Key], into: Sequence[Any] | None, timeout: float | None
    ) -> builtins.list[Any]:
        deadline = self._deadline(timeout)
        store = self._open_store()
        names = [self._object_key(key) for key in keys]
        if into is None:
            return self._get_new(store, names, deadline)
        if len(into) != len(names):
            raise ConfigError(f"{len(names)} keys, but {len(into)} destinations")
        outcomes = store.get_many(list(zip(names, into, strict=True)), timeout=deadline.left())
        found: builtins.list[Any] = []
        for name, outcome in zip(names, outcomes, strict=True):
            if isinstance(outcome, TooSmall) and outcome.nbytes > _most_bytes(store):
                _remove_wrong(store, name, outcome.nbytes, deadline)
                found.append(None)
            else:
                found.append(None if isinstance(outcome, Rejected) else _or_raise(outcome))
        return found

    def _get_new(
        self, store: Store, names: builtins.list[bytes], deadline: _Deadline
    ) -> builtins.list[bytearray | None]:
        values: builtins.list[bytearray | None] = []
        while len(values) < len(names):
            # The values of a pool tend to have one size. So the size of the last one is the guess.
            at_once = max(1, _GUESSED_BYTES_AT_ONCE // max(1, self._guess))
            some = names[len(values) :][:at_once]
            values += self._get_sized(store, some, self._guess, deadline)
        return values

    def _get_sized(
        self, store: Store, names: builtins.list[bytes], size: int, deadline: _Deadline
    ) -> builtins.list[bytearray | None]:
        """Values of about this size. A longer one is fetched again, by itself.

        How long a value is, the store says before anything is verified. So only verified values
        make the guess, and no more memory is taken than a value of this store may need.
        """
        values: builtins.list[bytearray | None] = [bytearray(size) for _ in names]
        outcomes = store.get_many(list(zip(names, values, strict=True)), timeout=deadline.left())
        for i, outcome in enumerate(outcomes):
            if isinstance(outcome, TooSmall):
                values[i] = self._get_longer(store, names[i], outcome.nbytes, deadline)
            elif outcome is None or isinstance(outcome, Rejected):
                values[i] = None
            else:
                values[i] = self._cut(values[i], _or_raise(outcome))
        return values

    def _get_longer(
        self, store: Store, name: bytes, nbytes: int, deadline: _Deadline
    ) -> bytearray | None:
        """A value that the store says is so long. None if it is not there, or cannot be so long."""
        for _ in range(_TRIES):
            if nbytes > _most_bytes(store):
                _remove_wrong(store, name, nbytes, deadline)
                return None
            try:
                value = bytearray(nbytes)
            except MemoryError:
                # Too long for this process. Whether it is a value at all, nobody knows.
                return None
            (outcome,) = store.get_many([(name, value)], timeout=deadline.left())
            if not isinstance(outcome, TooSmall):
                is_miss = outcome is None or isinstance(outcome, Rejected)
                return None if is_miss else self._cut(value, _or_raise(outcome))
            # It was replaced by a longer one meanwhile.
            nbytes = outcome.nbytes
        return None

    def _cut(self, value: bytearray | None, nbytes: int | None) -> bytearray:
        """A verified value, of as many bytes as it has."""
        assert value is not None
        assert nbytes is not None
        self._guess = nbytes
        del value[nbytes:]
        return value


def _most_bytes(store: Store) -> int:
    """The most bytes that a value of this store can have."""
    return min(int(store.capabilities()["max_value_bytes"]), _MOST_BYTES)


def _remove_wrong(store: Store, name: bytes, nbytes: int, deadline: _Deadline) -> None:
    """Removes a value whose length is wrong: it would be found again by everybody. Not if another
    one has taken its place by now."""
    damaged = (name, nbytes + store.header_bytes)
    with contextlib.suppress(StoreError):
        store.remove_damaged([damaged], timeout=deadline.left())


class _Deadline:
    """A timeout that several operations share."""

    _LEAST = 0.001

    def __init__(self, timeout: float) -> None:
        if not timeout > 0:
            raise ConfigError(f"a timeout must be over 0 seconds, not {timeout}")
        self._at = time.monotonic() + timeout

    def left(self) -> float:
        """Seconds left, never zero: after the deadline the store itself reports the timeout."""
        return max(self._LEAST, self._at - time.monotonic())


def _several(keys: Iterable[Key]) -> Iterable[Key]:
    if isinstance(keys, (str, bytes)):
        raise ConfigError(f"a list of keys is wanted here, not one key: write [{keys!r}]")
    return keys


def _or_raise(outcome: T | PenstockError) -> T:
    if isinstance(outcome, PenstockError):
        raise outcome
    return outcome


def pin(buffers: Any, *, writable: bool) -> Any:
    """Checks buffers, and returns them kept in place.

    Raises:
        ConfigError: one of them cannot be used.
    """
    if isinstance(buffers, (list, tuple)):
        return [pin(buffer, writable=writable) for buffer in buffers]
    if isinstance(buffers, Buffer) and not (writable and buffers.readonly):
        return buffers
    return Buffer(buffers, writable=writable)


def open(
    url: str,
    *,
    namespace: Namespace = "default",
    timeout: float = 10.0,
    connect_timeout: float = CONNECT_TIMEOUT,
    connections: int = 8,
    client_name: str = "penstock",
    encryption_key_file: str | os.PathLike[str] | None = None,
) -> Pool:
    """Opens a pool.

    Args:
        url: where the values lie: ``memory://?size=1GiB`` (this process),
            ``file:///absolute/path?size=10GiB`` or ``shm://NAME?size=10GiB`` (processes of
            this machine, on disk or in shared memory),
            ``valkey://[user[:password]@]host[:port][/db]`` or ``redis://…`` (a server; with
            TLS ``valkeys://``, under Sentinel ``valkey+sentinel://host[,…]/master``, a cluster
            ``valkey+cluster://host[,…]``), ``unix:///path.sock[?db=N]``, ``s3://bucket[/prefix]``
            (an object store; ``?endpoint=URL`` names one that is not AWS; also ``gs://`` and
            ``az://``); or several of these as tiers, the nearest first, with spaces between. A
            password may come from the environment variable ``PENSTOCK_POOL_PASSWORD`` instead.
            Pools of this machine keep quotas: ``&quota=tenant/NAME:10GiB``,
            ``&quota=tenant/*:1GiB`` (each other tenant), ``&quota=namespace/HEX:10GiB``, as often
            as needed.
        namespace: a name; or a mapping of everything that must agree between users; or the digest
            of a namespace, 16 bytes. Only users of one namespace see each other's values.
        timeout: seconds that an operation may take if the call gives no timeout of its own.
        connect_timeout: seconds that making a connection may take.
        connections: the most connections held to one server.
        client_name: the name of this client in a server's list of clients.
        encryption_key_file: file of the encryption keys, with lines ``ID:KEY``. KEY is the base64
            text of 32 bytes. The first key encrypts, and all keys decrypt. The text may come from
            the environment variable ``PENSTOCK_ENCRYPTION_KEYS`` instead. Without either, values
            are not encrypted.

    Opening does not wait for a server. The server may come up later; until then operations fail.

    >>> import penstock
    >>> with penstock.open("memory://?size=1MiB", namespace="docs") as pool:
    ...     pool.put_many({"a": b"1", "b": [b"2", b"3"]})
    ...     [bytes(value) for value in pool.get_many(["a", "b"])]
    [True, True]
    [b'1', b'23']

    Raises:
        ConfigError: the URL, an argument or a key is wrong.
        StoreError: the directory cannot be used, or the file of keys cannot be read.
    """
    keys = EncryptionKeys.load(encryption_key_file)
    store = Store.open(
        url, client_name=client_name, connect_timeout=connect_timeout, connections=connections
    )
    if keys is not None:
        store = store.encrypted(keys)
    return Pool(store, namespace, timeout=timeout)
