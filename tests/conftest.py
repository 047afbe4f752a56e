"""Fixtures that more than one room of tests uses: servers, and pools of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.servers import Server

# How long an example takes depends on what else the machine does.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[Server]:
    """An empty Redis, on loopback and a unix socket."""
    with Server("redis", tmp_path) as server:
        yield server


@pytest.fixture
def valkey_server(tmp_path: Path) -> Iterator[Server]:
    """An empty Valkey, on loopback and a unix socket."""
    with Server("valkey", tmp_path) as server:
        yield server


@pytest.fixture(params=["memory", "file", "redis", "valkey"])
def pool_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty pool, of each kind in turn."""
    if request.param == "memory":
        return "memory://?size=256MiB"
    if request.param == "file":
        return f"file://{tmp_path}/pool?size=256MiB"
    server: Server = request.getfixturevalue(f"{request.param}_server")
    return server.unix_url
