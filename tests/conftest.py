"""Fixtures that more than one room of tests uses: servers, and pools of every kind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from penstock import supervised
from penstock.supervised import failures
from tests.servers import Server

pytest_plugins = ["tests.order", "tests.reports"]

# A plug-in of vLLM, for one stage only. Pytest would put its folder on the path of imports.
collect_ignore = ["standin"]

# A panic that no test asked for ends its process: of a test, and of what a test starts.
os.environ.setdefault("PENSTOCK_PANICS", "abort")

# A machine may be as slow as it likes: no example of a property test has a time limit of its own,
# nor has the making of it.
# Every run draws the same, so that a change does not fail for what it did not bring. `make soak`
# draws anew, with `--hypothesis-profile soak`.
_ANY_TIME = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("penstock", derandomize=True, **_ANY_TIME)
settings.register_profile("soak", print_blob=True, **_ANY_TIME)
settings.load_profile("penstock")


@pytest.fixture(autouse=True)
def no_thread_fails(request: pytest.FixtureRequest) -> Iterator[None]:
    """A thread that goes on after a fault fails the test, unless the test is about that."""
    before = failures()
    yield
    if request.node.get_closest_marker("threads_fail") is None:
        assert failures() == before
    else:
        # Nothing of it is left to the tests that come after it.
        supervised._failures.clear()
        supervised._failures.update(before)


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
