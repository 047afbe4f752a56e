"""A store that is absent, frozen, killed or refusing: in time, by name, without secrets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import penstock
from lab.waiting import LIMIT, eventually
from penstock import Pool, errors
from tests.servers import Server
from tests.silent import freeze, unread

OPERATIONS: dict[str, Callable[[Pool, float], Any]] = {
    "contains": lambda pool, s: pool.contains(["key"], timeout=s),
    "put": lambda pool, s: pool.put("other", bytes(1000), timeout=s),
    "put_many": lambda pool, s: pool.put_many({"other": b"1", "third": b"2"}, timeout=s),
    "get": lambda pool, s: pool.get("key", timeout=s),
    "get into": lambda pool, s: pool.get("key", into=bytearray(100), timeout=s),
    "get_many": lambda pool, s: pool.get_many(["key", "key"], timeout=s),
    "remove": lambda pool, s: pool.remove(["key"], timeout=s),
    "list": lambda pool, s: pool.list(timeout=s),
    "namespaces": lambda pool, s: pool.namespaces(timeout=s),
    "describe": lambda pool, s: pool.describe(timeout=s),
}


@pytest.fixture
def pool(redis_server: Server) -> Iterator[Pool]:
    with penstock.open(redis_server.unix_url) as pool:
        pool.put("key", b"value")
        yield pool


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_frozen_server_is_given_up(redis_server: Server, pool: Pool, operation: str) -> None:
    redis_server.freeze()
    with pytest.raises(errors.TimedOut) as caught:
        OPERATIONS[operation](pool, 0.3)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.kind == "timed_out"
    redis_server.thaw()
    # What was given up may still have been done: the server had the request.
    pool.put("key", b"value")
    assert pool.get("key") == b"value"
    assert pool.stats()["errors"] >= 1


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_absent_server_is_unreachable_until_it_is_back(
    redis_server: Server, pool: Pool, operation: str
) -> None:
    redis_server.kill()
    with pytest.raises(errors.Unreachable) as caught:
        OPERATIONS[operation](pool, LIMIT)
    assert isinstance(caught.value, ConnectionError)
    redis_server.start()
    pool.put("key", b"again")
    assert pool.get("key") == b"again"


def test_a_server_may_come_up_later(redis_server: Server) -> None:
    redis_server.kill()
    with penstock.open(redis_server.unix_url) as pool:
        with pytest.raises(errors.Unreachable):
            pool.get("key")
        redis_server.start()
        assert pool.get("key", default=None) is None


@pytest.mark.parametrize("operation", ["get into", "put"])
def test_other_python_threads_go_on_while_one_waits(redis_server: Server, operation: str) -> None:
    def thaw() -> None:
        # The other thread has asked by then, and waits.
        eventually(lambda: bool(unread(redis_server)))
        redis_server.thaw()

    with penstock.open(redis_server.tcp_url, timeout=LIMIT) as pool:
        pool.put("key", b"value")
        freeze(redis_server)
        thawing = threading.Thread(target=thaw)
        thawing.start()
        # Nobody but that thread has it answered.
        OPERATIONS[operation](pool, LIMIT)
        thawing.join()


def test_a_buffer_stays_in_place_while_an_operation_is_under_way(
    redis_server: Server, pool: Pool
) -> None:
    redis_server.freeze()
    into = bytearray(100)
    waiting = threading.Thread(
        target=lambda: pool.get("key", into=into, default=None, timeout=LIMIT)
    )
    waiting.start()

    def is_held() -> bool:
        assert waiting.is_alive()
        try:
            into.append(0)
        except BufferError:
            return True
        return False

    eventually(is_held)
    redis_server.thaw()
    waiting.join()
    assert into.startswith(b"value")
    into.clear()


def test_a_full_server_says_so(redis_server: Server, pool: Pool) -> None:
    redis_server.command("CONFIG", "SET", "maxmemory", "4mb")
    with pytest.raises(errors.Full):
        pool.put_many({f"key {i}": bytes(1 << 20) for i in range(16)})
    assert pool.get("key") == b"value"


class TestSecrets:
    PASSWORD = "correct-horse-battery"

    @pytest.fixture
    def server(self, redis_server: Server) -> Server:
        redis_server.command(
            "ACL", "SETUSER", "engine", "on", f">{self.PASSWORD}", "~penstock:*", "+@all"
        )
        redis_server.command("CONFIG", "SET", "requirepass", "nobody knows")
        return redis_server

    def url(self, server: Server, password: str) -> str:
        return server.tcp_url.replace("://", f"://engine:{password}@")

    def test_credentials_open_and_are_not_shown(self, server: Server) -> None:
        with penstock.open(self.url(server, self.PASSWORD)) as pool:
            pool.put("key", b"value")
            assert pool.get("key") == b"value"
            shown = f"{pool!r} {pool.url} {pool.describe()} {pool._open_store()!r}"
            assert self.PASSWORD not in shown
            assert str(server.port) in pool.url

    def test_wrong_credentials_are_denied_and_not_shown(self, server: Server) -> None:
        for url in (server.tcp_url, self.url(server, "wrong-" + self.PASSWORD)):
            with penstock.open(url) as pool, pytest.raises(errors.Denied) as caught:
                pool.get("key")
            assert isinstance(caught.value, PermissionError)
            assert self.PASSWORD not in str(caught.value)

    def test_errors_do_not_show_them(self, server: Server) -> None:
        with penstock.open(self.url(server, self.PASSWORD)) as pool:
            server.kill()
            with pytest.raises(errors.Unreachable) as caught:
                pool.get("key")
            assert self.PASSWORD not in str(caught.value)

    @pytest.mark.parametrize(
        "url",
        [
            "valkey://engine:{}@",
            "valkey://engine:{}@host:port",
            "valkey://engine:{}@host/database",
            "mysql://engine:{}@host",
            "unix:///socket?password={}&nonsense=1",
            "file:///directory?password={}",
        ],
    )
    def test_nor_do_errors_about_the_url(self, url: str) -> None:
        with pytest.raises(errors.ConfigError) as caught:
            penstock.open(url.format(self.PASSWORD))
        assert self.PASSWORD not in str(caught.value)


def test_an_unusable_directory_is_named() -> None:
    with pytest.raises(errors.StoreError, match="/proc/penstock"):
        penstock.open("file:///proc/penstock?size=1MiB")
