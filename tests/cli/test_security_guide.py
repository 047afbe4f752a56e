"""The rights that the security guide gives are those that are needed, and no more."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock
from penstock import Pool
from penstock.cli import main
from penstock.errors import Denied
from tests.servers import Server

GUIDE = Path(__file__).parents[2] / "docs/guides/security.md"
PASSWORD = "hush"

Url = Callable[[str], str]


@pytest.fixture(params=["redis", "valkey"])
def server(request: pytest.FixtureRequest) -> Server:
    server: Server = request.getfixturevalue(f"{request.param}_server")
    return server


@pytest.fixture
def url(server: Server) -> Url:
    """The URL of each user of the guide; the guide's lines have been run."""
    lines = [line for line in GUIDE.read_text().splitlines() if line.startswith("ACL SETUSER")]
    assert [shlex.split(line)[2] for line in lines] == ["engine", "watcher", "purger", "scrubber"]
    for line in lines:
        reply = server.command(*line.replace("PASSWORD", PASSWORD).split())
        assert reply == b"+OK\r\n", (line, reply)
    scheme, _, address = server.tcp_url.partition("://")
    return lambda user: f"{scheme}://{user}:{PASSWORD}@{address}"


@pytest.fixture
def stored(url: Url) -> Iterator[Pool]:
    with penstock.open(url("engine"), namespace="docs") as pool:
        pool.put_many({"a": b"KV", "b": b"more KV"})
        yield pool


def test_an_engine_puts_gets_and_removes_what_is_damaged(
    server: Server, url: Url, stored: Pool
) -> None:
    assert stored.get_many(["a", "b", "c"]) == [b"KV", b"more KV", None]
    name = f"penstock:{stored.namespace.hex()}:{Pool.identity('a').hex()}:l0-1.h0-1"
    assert server.command("SET", name, b"damaged") == b"+OK\r\n"
    assert stored.get("a", default=None) is None
    assert "a" not in stored
    assert stored.stats()["errors"] == 0
    for asks_for_more in (stored.list, stored.describe):
        with pytest.raises(Denied):
            asks_for_more()
    with penstock.open(url("engine") + "/1") as other:
        assert other.put("a", b"KV")


@pytest.mark.parametrize("user", ["watcher", "purger"])
def test_who_watches_sees_names_and_sizes_and_no_value(
    user: str, url: Url, stored: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pool", "ls", url(user), "--json"]) == 0
    assert '"docs"' in capsys.readouterr().out
    assert main(["pool", "stats", url(user), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    with penstock.open(url(user), namespace="docs") as pool:
        assert "a" in pool
        for forbidden in (lambda: pool.get("a"), lambda: pool.put("z", b"KV")):
            with pytest.raises(Denied):
                forbidden()
    assert stored.get("a") == b"KV"


def test_only_who_purges_removes(
    url: Url, stored: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pool", "purge", url("watcher"), "--yes"]) != 0
    assert "a" in stored
    assert main(["pool", "purge", url("purger"), "--yes"]) == 0
    assert stored.contains(["a", "b"]) == [False, False]


def test_who_scrubs_verifies_and_carries(
    server: Server, url: Url, stored: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pool", "verify", url("watcher")]) == 1
    archive = str(tmp_path / "archive")
    assert main(["pool", "export", url("scrubber"), archive]) == 0
    name = f"penstock:{stored.namespace.hex()}:{Pool.identity('a').hex()}:l0-1.h0-1"
    assert server.command("SET", name, b"damaged") == b"+OK\r\n"
    assert main(["pool", "verify", url("scrubber"), "--remove"]) == 0
    assert "a" not in stored
    assert main(["pool", "import", archive, url("scrubber")]) == 0
    assert stored.get_many(["a", "b"]) == [b"KV", b"more KV"]
