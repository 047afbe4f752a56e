"""Servers on loopback: what becomes of a port that is taken, and of a server that cannot start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from lab import servers
from lab.processes import ServerFailed, free_port
from tests.servers import Server


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ports that a server is given, in turn; at last free ones."""
    given: list[int] = []
    monkeypatch.setattr(servers, "free_port", lambda: given.pop(0) if given else free_port())
    return given


def test_another_port_is_taken_if_somebody_has_it(tmp_path: Path, ports: list[int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        taken = somebody.getsockname()[1]
        ports += [taken, free_port()]
        with Server("valkey", tmp_path) as server:
            assert server.port != taken
            assert server.command("PING").startswith(b"+PONG")


def test_a_server_comes_back_where_it_was(tmp_path: Path) -> None:
    with Server("valkey", tmp_path) as server:
        port = server.port
        server.command("SET", "key", "value")
        server.kill()
        with socket.create_server(("127.0.0.1", port)), pytest.raises(ServerFailed):
            server.start()
        server.start()
        assert server.port == port
        assert server.command("GET", "key").startswith(b"$-1")


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="no-such-option"):
        Server("valkey", tmp_path, "--no-such-option", "yes").start()


def test_a_server_that_does_not_run_cannot_be_frozen(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="valkey-server does not run"):
        Server("valkey", tmp_path).freeze()
