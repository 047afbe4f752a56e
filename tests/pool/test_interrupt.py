"""Signals come through while Rust waits: Ctrl-C ends it, and other handlers run meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType

import pytest

import penstock
from penstock._native import Engine, Lookup, Store
from penstock.errors import TimedOut
from penstock.pool.namespace import object_key
from tests.engine.test_engine import BLOCK_BYTES, NAMESPACE, SPAN, Kv, blocks, chunk, register
from tests.servers import Server

LONG = 30.0
PROMPT = 10.0
"""Seconds: far more than a wait takes to notice, far less than it would take."""


class Stop(Exception):
    """What a handler raises."""


@contextmanager
def signalled(handler: Callable[[], None], after: float = 0.3) -> Iterator[None]:
    """A signal comes while the body runs."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        handler()

    before = signal.signal(signal.SIGUSR1, handle)
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def stop() -> None:
    raise Stop


def assert_stops(wait: Callable[[], object]) -> None:
    begin = time.monotonic()
    with pytest.raises(Stop), signalled(stop):
        wait()
    assert time.monotonic() - begin < PROMPT


def test_ctrl_c_ends_a_program_that_waits_for_a_silent_pool(redis_server: Server) -> None:
    program = f"""
import penstock
with penstock.open({redis_server.tcp_url!r}) as pool:
    pool.put("key", b"value")
    print("connected", flush=True)
    input()
    pool.get("key", timeout={LONG})
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "connected\n"
        redis_server.freeze()
        child.stdin.write("\n")
        child.stdin.flush()
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        begin = time.monotonic()
        said = child.communicate(timeout=LONG)[1]
        assert time.monotonic() - begin < PROMPT
        assert child.returncode == -signal.SIGINT
        assert said.endswith("KeyboardInterrupt\n")


def test_what_was_interrupted_has_let_go_of_its_buffers(redis_server: Server) -> None:
    with penstock.open(redis_server.tcp_url) as pool:
        pool.put("key", b"stored")
        redis_server.freeze()
        into = bytearray(b"before")
        assert_stops(lambda: pool.get("key", into=into, timeout=LONG))
        # A bytearray that something still writes into does not change its size.
        into += b" and after"
        redis_server.thaw()
        assert pool.get("key", timeout=LONG) == b"stored"
        assert into == b"before and after"


@pytest.mark.parametrize(
    "wait",
    [
        lambda pool: pool.put("key", b"x" * (8 << 20), timeout=LONG),
        lambda pool: pool.get_many([str(n) for n in range(100)], timeout=LONG),
        lambda pool: pool.contains(["key"], timeout=LONG),
    ],
    ids=["put", "get_many", "contains"],
)
def test_operations_are_interrupted(
    redis_server: Server, wait: Callable[[penstock.Pool], object]
) -> None:
    with penstock.open(redis_server.tcp_url) as pool:
        pool.put("key", b"stored")
        redis_server.freeze()
        assert_stops(lambda: wait(pool))


def test_a_wait_for_a_connection_that_another_thread_uses_is_interrupted(
    redis_server: Server,
) -> None:
    store = Store.open(redis_server.tcp_url, connections=1)
    store.put(object_key(NAMESPACE, chunk(1)), b"value", timeout=LONG)
    redis_server.freeze()
    with ThreadPoolExecutor(1) as others:
        first = others.submit(get, store)
        time.sleep(0.2)
        assert_stops(lambda: get(store))
        # Nobody has interrupted that one.
        assert not first.done()
        redis_server.thaw()
        assert first.result(LONG) == 5


def get(store: Store) -> int | None:
    return store.get(object_key(NAMESPACE, chunk(1)), bytearray(8), timeout=LONG)


def test_a_handler_that_does_not_raise_changes_nothing(redis_server: Server) -> None:
    moments: list[float] = []
    patience = 6.0
    with penstock.open(redis_server.tcp_url) as pool:
        pool.put("key", b"stored")
        redis_server.freeze()
        begin = time.monotonic()
        with (
            pytest.raises(TimedOut),
            signalled(lambda: moments.append(time.monotonic() - begin)),
        ):
            pool.get("key", timeout=patience)
        assert time.monotonic() - begin >= patience
    # It ran when the signal came, not when the wait was over.
    (moment,) = moments
    assert moment < patience * 0.9


def test_a_handler_may_use_what_is_waited_for(redis_server: Server) -> None:
    found: list[bytes] = []
    with penstock.open(redis_server.tcp_url) as pool:
        pool.put("key", b"stored")
        redis_server.freeze()

        def use() -> None:
            redis_server.thaw()
            found.append(bytes(pool.get("key", timeout=LONG)))

        with signalled(use):
            assert pool.get("key", timeout=LONG) == b"stored"
    assert found == [b"stored"]


def test_waits_for_look_ups_are_interrupted() -> None:
    lookup = Lookup(Store.open("memory://?size=1MiB"))
    assert_stops(lambda: lookup.wait(LONG))
    lookup.submit(1, NAMESPACE, [chunk(1)], [SPAN], LONG)
    assert lookup.wait(LONG)
    assert lookup.shutdown(LONG)


def test_waits_for_the_engine_are_interrupted(redis_server: Server) -> None:
    store = Store.open(redis_server.tcp_url)
    store.put(object_key(NAMESPACE, chunk(1)), b"value", timeout=LONG)
    engine = Engine(store, slot_bytes=BLOCK_BYTES, slots=8, keep=False)
    register(engine, Kv())
    assert_stops(lambda: engine.wait(LONG))
    redis_server.freeze()
    engine.submit_store(1, blocks((2, 1)))
    assert engine.wait(LONG)
    assert_stops(lambda: engine.drain(LONG))
    assert_stops(lambda: engine.shutdown(LONG))
    redis_server.thaw()
    # It may be called again.
    assert engine.shutdown(LONG)
