"""The pool for asyncio."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar, overload

from penstock.errors import Closed, ConfigError
from penstock.pool.pool import Entry, Items, Key, NamespaceUsage, Pool, open, pin

__all__ = ["AsyncPool", "open_async"]

T = TypeVar("T")


class AsyncPool:
    """A :class:`~penstock.Pool` whose methods are awaited; open one with
    :func:`penstock.open_async`.

    Operations run on the pool's own threads, at most ``concurrency`` at once, so the event loop
    goes on. Further operations wait their turn. An operation's timeout does not count this wait.

    Buffers are checked and pinned when a method is called. A cancelled operation ends for its
    awaiter at once. If the operation was waiting its turn, it never runs. If it was under way, it
    goes on to its end, at its timeout at the latest. Until then its buffers stay in place, and the
    content of a destination is undefined. Leaving the ``async with`` block waits for such
    operations.

    >>> import asyncio, penstock
    >>> async def main():
    ...     async with penstock.open_async("memory://?size=64MiB") as pool:
    ...         await pool.put("prompt", b"its KV")
    ...         return bytes(await pool.get("prompt"))
    >>> asyncio.run(main())
    b'its KV'
    """

    def __init__(self, pool: Pool, *, concurrency: int = 8) -> None:
        if concurrency < 1:
            raise ConfigError(f"at least one operation must run at once, not {concurrency}")
        self._pool = pool
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="penstock-pool")

    @property
    def namespace(self) -> bytes:
        """Digest of the namespace, 16 bytes."""
        return self._pool.namespace

    @property
    def url(self) -> str:
        """The store's URL, without credentials."""
        return self._pool.url

    def __repr__(self) -> str:
        return f"Async{self._pool!r}"

    async def __aenter__(self) -> AsyncPool:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Waits for operations under way, drops those that wait their turn, and lets go of the
        store."""
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)
        self._pool.close()

    async def contains(
        self, keys: Iterable[Key], *, timeout: float | None = None
    ) -> builtins.list[bool]:
        """For each key, whether the store has a value, see :meth:`Pool.contains`."""
        return await self._submit(self._pool.contains, keys, timeout=timeout)

    async def put(self, key: Key, value: Any, *, timeout: float | None = None) -> bool:
        """Stores a value, see :meth:`Pool.put`."""
        return await self._submit(self._pool.put, key, pin(value, writable=False), timeout=timeout)

    async def put_many(
        self,
        items: Items,
        *,
        timeout: float | None = None,
    ) -> builtins.list[bool]:
        """Stores several values, see :meth:`Pool.put_many`."""
        pairs = items.items() if isinstance(items, Mapping) else items
        return await self._submit(
            self._pool.put_many,
            [(key, pin(value, writable=False)) for key, value in pairs],
            timeout=timeout,
        )

    @overload
    async def get(self, key: Key, *, timeout: float | None = None) -> bytearray: ...
    @overload
    async def get(self, key: Key, *, into: Any, timeout: float | None = None) -> int: ...
    @overload
    async def get(self, key: Key, *, default: T, timeout: float | None = None) -> bytearray | T: ...
    @overload
    async def get(
        self, key: Key, *, into: Any, default: T, timeout: float | None = None
    ) -> int | T: ...

    async def get(self, key: Key, *, into: Any = None, **options: Any) -> Any:
        """Fetches a value, see :meth:`Pool.get`."""
        return await self._submit(
            self._pool.get,
            key,
            into=None if into is None else pin(into, writable=True),
            **options,
        )

    @overload
    async def get_many(
        self, keys: Iterable[Key], *, timeout: float | None = None
    ) -> builtins.list[bytearray | None]: ...
    @overload
    async def get_many(
        self, keys: Iterable[Key], *, into: Sequence[Any], timeout: float | None = None
    ) -> builtins.list[int | None]: ...

    async def get_many(
        self,
        keys: Iterable[Key],
        *,
        into: Sequence[Any] | None = None,
        timeout: float | None = None,
    ) -> builtins.list[Any]:
        """Fetches several values, see :meth:`Pool.get_many`."""
        return await self._submit(
            self._pool.get_many,
            keys,
            into=None if into is None else [pin(one, writable=True) for one in into],
            timeout=timeout,
        )

    async def remove(self, keys: Iterable[Key], *, timeout: float | None = None) -> int:
        """Removes the keys that exist, see :meth:`Pool.remove`."""
        return await self._submit(self._pool.remove, keys, timeout=timeout)

    async def retire(self, *, timeout: float | None = None) -> None:
        """Has this namespace's values go first, see :meth:`Pool.retire`."""
        await self._submit(self._pool.retire, timeout=timeout)

    async def list(self, *, timeout: float | None = None) -> builtins.list[Entry]:
        """Every object of this namespace, see :meth:`Pool.list`."""
        return await self._submit(self._pool.list, timeout=timeout)

    async def namespaces(self, *, timeout: float | None = None) -> builtins.list[NamespaceUsage]:
        """The room that each namespace takes up, see :meth:`Pool.namespaces`."""
        return await self._submit(self._pool.namespaces, timeout=timeout)

    async def describe(self, *, timeout: float | None = None) -> dict[str, str]:
        """The store's own report of its settings and state, see :meth:`Pool.describe`."""
        return await self._submit(self._pool.describe, timeout=timeout)

    def stats(self) -> dict[str, int]:
        """Counters of this pool, see :meth:`Pool.stats`. Not awaited, because it does not talk to
        the store."""
        return self._pool.stats()

    def _submit(self, operation: Callable[..., T], *args: Any, **options: Any) -> asyncio.Future[T]:
        # Not a coroutine: the traceback of a cancelled coroutine would keep its frame, and the
        # frame would keep the pinned buffers, for as long as somebody keeps the exception.
        try:
            running = self._threads.submit(operation, *args, **options)
        except RuntimeError as error:
            raise Closed("the pool is closed") from error
        return asyncio.wrap_future(running)


def open_async(url: str, *, concurrency: int = 8, **options: Any) -> AsyncPool:
    """Opens a pool for asyncio, to be used as ``async with``.

    Args:
        url: as for :func:`penstock.open`.
        concurrency: the most operations that run at once.
        options: as for :func:`penstock.open`.

    Raises:
        ConfigError: the URL or an argument is wrong.
        StoreError: the directory cannot be used.
    """
    return AsyncPool(open(url, **options), concurrency=concurrency)
