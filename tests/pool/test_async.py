"""The pool for asyncio: the loop goes on, operations are bounded, cancelling is safe."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

import penstock
from lab.waiting import LIMIT, eventually_async
from penstock import AsyncPool, errors
from tests.servers import Server
from tests.silent import freeze, unread


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 2 * LIMIT))


def open_pool(server: Server, **options: int) -> AsyncPool:
    return penstock.open_async(server.tcp_url, timeout=LIMIT, connect_timeout=LIMIT, **options)


def is_pinned(memory: bytearray) -> bool:
    try:
        memory.append(0)
    except BufferError:
        return True
    memory.pop()
    return False


def test_everything_the_pool_does(pool_url: str) -> None:
    async def main() -> None:
        async with penstock.open_async(pool_url) as pool:
            assert await pool.put("key", b"value") is True
            assert await pool.put_many({"a": [b"1", b"2"], "b": b""}) == [True, True]
            assert await pool.contains(["key", "absent"]) == [True, False]
            assert await pool.get("key") == b"value"
            assert await pool.get("absent", default=None) is None
            with pytest.raises(errors.NotFound):
                await pool.get("absent")
            into = np.zeros(5, np.uint8)
            assert await pool.get("key", into=into) == 5
            assert into.tobytes() == b"value"
            assert await pool.get_many(["a", "absent", "b"]) == [b"12", None, b""]
            buffers = [bytearray(2), bytearray(2)]
            assert await pool.get_many(["a", "b"], into=buffers) == [2, 0]
            assert len(await pool.list()) == 3
            assert pool.namespace in [one.digest for one in await pool.namespaces()]
            assert await pool.describe()
            assert await pool.remove(["key"]) == 1
            assert pool.stats()["puts"] >= 3
            assert pool.url in repr(pool)

    run(main())


def test_a_closed_pool_says_so() -> None:
    async def main() -> None:
        async with penstock.open_async("memory://?size=1MiB") as pool:
            pass
        with pytest.raises(errors.Closed):
            await pool.put("key", b"")

    run(main())


def test_bad_buffers_are_refused_at_once() -> None:
    async def main() -> None:
        async with penstock.open_async("memory://?size=1MiB") as pool:
            with pytest.raises(errors.ConfigError, match="contiguous"):
                await pool.put("key", memoryview(b"abcd")[::2])
            with pytest.raises(errors.ConfigError, match="writable"):
                await pool.get("key", into=b"1234")

    run(main())


def test_the_loop_goes_on_while_the_server_is_frozen(redis_server: Server) -> None:
    async def main() -> None:
        async with open_pool(redis_server) as pool:
            await pool.put("key", b"value")
            freeze(redis_server)
            gets = [pool.get("key", timeout=0.5) for _ in range(20)]
            outcomes = await asyncio.gather(*gets, return_exceptions=True)
            assert all(isinstance(outcome, errors.TimedOut) for outcome in outcomes)
            # A loop that waits with them does not turn before they are over.
            waiting = [asyncio.ensure_future(pool.get("key")) for _ in range(3)]
            await eventually_async(lambda: bool(unread(redis_server)))
            for _ in range(100):
                await asyncio.sleep(0)
            assert not any(one.done() for one in waiting)
            redis_server.thaw()
            assert await asyncio.gather(*waiting) == [b"value"] * 3

    run(main())


def test_so_many_operations_at_once_and_no_more(redis_server: Server) -> None:
    async def main() -> None:
        async with open_pool(redis_server, concurrency=3) as pool:
            await pool.put("key", b"value")
            freeze(redis_server)
            waiting = [asyncio.ensure_future(pool.get("key")) for _ in range(12)]
            # All have been called once three of them have sent something.
            await eventually_async(lambda: len(unread(redis_server)) >= 3)
            threads = [t for t in threading.enumerate() if t.name.startswith("penstock-pool")]
            assert len(threads) == 3
            redis_server.thaw()
            assert await asyncio.gather(*waiting) == [b"value"] * 12

    run(main())


def test_a_cancelled_get_ends_at_once_and_its_buffer_stays_until_the_end(
    redis_server: Server,
) -> None:
    async def main() -> None:
        async with open_pool(redis_server) as pool:
            await pool.put("key", b"value")
            freeze(redis_server)
            into = bytearray(16)
            getting = asyncio.ensure_future(pool.get("key", into=into))
            await eventually_async(lambda: bool(unread(redis_server)))
            getting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await getting
            assert is_pinned(into)
            redis_server.thaw()
            await eventually_async(lambda: not is_pinned(into))
            assert await pool.get("key") == b"value"

    run(main())


def test_a_cancelled_operation_in_the_queue_never_runs(redis_server: Server) -> None:
    async def main() -> None:
        async with open_pool(redis_server, concurrency=1) as pool:
            await pool.put("key", b"value")
            freeze(redis_server)
            first = asyncio.ensure_future(pool.get("key"))
            value = bytearray(b"not to be stored")
            second = asyncio.ensure_future(pool.put("other", value))
            # The first one is under way, so the second one waits its turn.
            await eventually_async(lambda: bool(unread(redis_server)))
            assert is_pinned(value)
            second.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await second
            redis_server.thaw()
            assert await first == b"value"
            assert await pool.contains(["other"]) == [False]
            assert not is_pinned(value)

    run(main())


def test_a_timeout_of_asyncio_cancels_safely(redis_server: Server) -> None:
    async def main() -> None:
        async with open_pool(redis_server) as pool:
            await pool.put("key", b"value")
            freeze(redis_server)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(pool.get("key"), 0.1)
            redis_server.thaw()

    run(main())


def test_concurrency_must_be_possible() -> None:
    with pytest.raises(errors.ConfigError):
        AsyncPool(penstock.open("memory://?size=1MiB"), concurrency=0)
