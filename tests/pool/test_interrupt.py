"""Signals come through while Rust waits: Ctrl-C ends it, and other handlers run meanwhile."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import penstock
from lab.waiting import LIMIT, eventually
from penstock._native import Engine, Lookup, Store
from penstock.errors import TimedOut
from penstock.pool.namespace import object_key
from tests.engine.test_engine import BLOCK_BYTES, NAMESPACE, SPAN, Kv, blocks, chunk, register
from tests.servers import Server
from tests.silent import freeze, signalled, unread

KEY = object_key(NAMESPACE, chunk(1))
FOREVER = 100 * LIMIT
"""Seconds: who waits until then hangs."""
PUT_TIMEOUT = 5.0
"""Seconds that the engine gives to a store (``penstock-engine/src/config.rs``)."""


class Stop(Exception):
    """What a handler raises."""


def stop() -> None:
    raise Stop


def assert_stops(wait: Callable[[], object], once: Callable[[], bool] | None = None) -> None:
    """The wait, which lasts forever by itself, ends when a signal comes.

    Without `once`, it is a call of one native function.
    """
    with pytest.raises(Stop), signalled(stop, once):
        wait()


def open_pool(server: Server) -> penstock.Pool:
    return penstock.open(server.tcp_url, timeout=FOREVER, connect_timeout=LIMIT)


def open_store(server: Server, connections: int = 8) -> Store:
    return Store.open(server.tcp_url, connect_timeout=LIMIT, connections=connections)


def test_ctrl_c_ends_a_program_that_waits_for_a_silent_pool(redis_server: Server) -> None:
    # A program that a shell starts in the background inherits that Ctrl-C is ignored.
    program = f"""
import signal
import penstock
signal.signal(signal.SIGINT, signal.default_int_handler)
with penstock.open({redis_server.tcp_url!r}, connect_timeout={LIMIT}) as pool:
    pool.put("key", b"value", timeout={LIMIT})
    print("connected", flush=True)
    input()
    pool.get("key", timeout={FOREVER})
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            assert child.stdout.readline() == "connected\n"
            freeze(redis_server)
            child.stdin.write("\n")
            child.stdin.flush()
            eventually(lambda: bool(unread(redis_server)))
            child.send_signal(signal.SIGINT)
            said = child.communicate(timeout=LIMIT)[1]
        finally:
            child.kill()
        assert child.returncode == -signal.SIGINT
        assert said.endswith("KeyboardInterrupt\n")


def test_what_was_interrupted_has_let_go_of_its_buffers(redis_server: Server) -> None:
    with open_pool(redis_server) as pool:
        pool.put("key", b"stored")
        freeze(redis_server)
        into = bytearray(b"before")
        assert_stops(lambda: pool.get("key", into=into), lambda: bool(unread(redis_server)))
        # A bytearray that something still writes into does not change its size.
        into += b" and after"
        redis_server.thaw()
        assert pool.get("key") == b"stored"
        assert into == b"before and after"


@pytest.mark.parametrize(
    "wait",
    [
        lambda pool: pool.put("key", b"x" * (8 << 20)),
        lambda pool: pool.get_many([str(n) for n in range(100)]),
        lambda pool: pool.contains(["key"]),
    ],
    ids=["put", "get_many", "contains"],
)
def test_operations_are_interrupted(
    redis_server: Server, wait: Callable[[penstock.Pool], object]
) -> None:
    with open_pool(redis_server) as pool:
        pool.put("key", b"stored")
        freeze(redis_server)
        assert_stops(lambda: wait(pool), lambda: bool(unread(redis_server)))


def test_a_wait_for_a_connection_that_another_thread_uses_is_interrupted(
    redis_server: Server,
) -> None:
    store = open_store(redis_server, connections=1)
    store.put(KEY, b"value", timeout=LIMIT)
    freeze(redis_server)
    with ThreadPoolExecutor(1) as others:
        # It outlasts the other one.
        first = others.submit(store.get, KEY, bytearray(8), timeout=2 * FOREVER)
        eventually(lambda: bool(unread(redis_server)))
        assert_stops(functools.partial(store.get, KEY, bytearray(8), timeout=FOREVER))
        # Nobody has interrupted that one.
        assert not first.done()
        redis_server.thaw()
        assert first.result(LIMIT) == 5


def test_a_handler_that_does_not_raise_changes_nothing(redis_server: Server) -> None:
    ran = threading.Event()
    with open_pool(redis_server) as pool, ThreadPoolExecutor(1) as others:
        pool.put("key", b"stored")
        freeze(redis_server)

        def thaw_then() -> None:
            # The wait cannot be over before the handler has run: nobody answers before.
            if ran.wait(LIMIT):
                redis_server.thaw()

        others.submit(thaw_then)
        with signalled(ran.set, lambda: bool(unread(redis_server))):
            assert pool.get("key") == b"stored"


def test_handlers_that_do_not_raise_leave_the_deadline_where_it_is(redis_server: Server) -> None:
    runs = 0
    is_over = threading.Event()

    def handle(*_: object) -> None:
        nonlocal runs
        runs += 1

    def send() -> None:
        while not is_over.wait(0.01):
            os.kill(os.getpid(), signal.SIGUSR1)

    patience = 1.0
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with open_pool(redis_server) as pool, ThreadPoolExecutor(1) as others:
            pool.put("key", b"stored")
            freeze(redis_server)
            others.submit(send)
            try:
                # The first ones come on the way to the wait, and the others in it.
                eventually(lambda: runs > 0)
                begin = time.monotonic()
                with pytest.raises(TimedOut):
                    pool.get("key", timeout=patience)
                assert time.monotonic() - begin >= patience
            finally:
                is_over.set()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_may_use_what_is_waited_for(redis_server: Server) -> None:
    found: list[bytes] = []
    with open_pool(redis_server) as pool:
        pool.put("key", b"stored")
        freeze(redis_server)

        def use() -> None:
            redis_server.thaw()
            found.append(bytes(pool.get("key")))

        with signalled(use, lambda: bool(unread(redis_server))):
            assert pool.get("key") == b"stored"
    assert found == [b"stored"]


def test_waits_for_look_ups_are_interrupted() -> None:
    lookup = Lookup(Store.open("memory://?size=1MiB"))
    assert_stops(functools.partial(lookup.wait, FOREVER))
    lookup.submit(1, NAMESPACE, [chunk(1)], [SPAN], LIMIT)
    assert lookup.wait(LIMIT)
    assert lookup.shutdown(LIMIT)


def test_waits_for_the_engine_are_interrupted(redis_server: Server) -> None:
    store = open_store(redis_server)
    store.put(KEY, b"value", timeout=LIMIT)
    engine = Engine(store, slot_bytes=BLOCK_BYTES, slots=8, keep=False)
    register(engine, Kv())
    assert_stops(functools.partial(engine.wait, FOREVER))
    freeze(redis_server)
    # It keeps a lane inside the store for as long as the load may take.
    engine.submit_load(1, blocks((1, 3)), FOREVER)
    eventually(lambda: bool(unread(redis_server)))
    begin = time.monotonic()
    engine.submit_store(2, blocks((2, 1)))
    assert engine.wait(LIMIT)
    try:
        assert_stops(functools.partial(engine.drain, FOREVER))
    except AssertionError:
        # The engine has given up the store before the signal came.
        assert time.monotonic() - begin >= PUT_TIMEOUT
    assert_stops(functools.partial(engine.shutdown, FOREVER))
    redis_server.thaw()
    # It may be called again.
    assert engine.shutdown(LIMIT)
