"""`penstock pool ls` and `pool purge` of one namespace: bytes and ages, in each kind of store."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from lab.waiting import LIMIT
from penstock._native import Store
from penstock.cli import main
from penstock.pool.namespace import namespace_digest, object_key, publish_namespace
from tests.servers import ObjectServer, Server

WEIGHTS = {"old": "files:1a2b3c4d5e", "new": "version:step 40:files:1a2b3c4d5e"}
FIRST = {"old": 1_000, "new": 40_000}
LAST = {"old": 30_000, "new": 40_000}
NOW = 40_000 + 7 * 60.0
KEYS = ("penstock-tests", "hunter2-is-the-secret")


def described(which: str) -> dict[str, Any]:
    return {"model": "m", "weights": WEIGHTS[which]}


def digest(which: str) -> bytes:
    return namespace_digest(described(which))


@pytest.fixture(params=["file", "shm", "valkey", "s3"])
def url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A pool in which two namespaces were described, and one was not."""
    if request.param == "file":
        yield fill(f"file://{tmp_path}/pool?size=64MiB")
    elif request.param == "shm":
        name = f"penstock-test-{uuid4().hex[:12]}"
        yield fill(f"shm://{name}?size=64MiB")
        Path(f"/dev/shm/penstock-{name}").unlink()
    elif request.param == "valkey":
        server: Server = request.getfixturevalue("valkey_server")
        yield fill(server.unix_url)
    else:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS[0])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS[1])
        with ObjectServer(tmp_path, KEYS) as objects:
            yield fill(objects.url("ls", "&linger=1ms"))


def fill(url: str) -> str:
    store = Store.open(url)
    for which, objects in (("old", 3), ("new", 2)):
        for number in range(objects):
            store.put(object_key(digest(which), b"%d" % number), bytes(1000), timeout=LIMIT)
        for at in (FIRST[which], LAST[which]):
            publish_namespace(store, digest(which), described(which), clock=lambda at=at: at)
    store.put(object_key(b"u" * 16, b""), bytes(5000), timeout=LIMIT)
    return url


def listed(url: str, capsys: pytest.CaptureFixture[str]) -> dict[bytes, dict[str, Any]]:
    assert main(["pool", "ls", url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return {bytes.fromhex(one["namespace"]): one for one in found}


def test_ages_and_removal(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = listed(url, capsys)
    for which, objects in (("old", 3), ("new", 2)):
        one = found[digest(which)]
        assert (one["objects"], one["bytes"]) == (objects, objects * 1064)
        assert (one["first_described"], one["last_described"]) == (FIRST[which], LAST[which])
        assert one["description"] == described(which)
        # Servers and object stores do not say when a value was used.
        assert (one["last_use"] is not None) == url.startswith(("file:", "shm:"))
    unknown = found[b"u" * 16]
    assert unknown["first_described"] is unknown["last_described"] is unknown["description"] is None

    monkeypatch.setattr("penstock.cli.pool.time", SimpleNamespace(time=lambda: NOW))
    assert main(["pool", "ls", url]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    new, old = cells[1], cells[2]
    assert new[1:6] == ["model m, weights step 40 (1a2b3c4d)", "2", "2.078 KiB", "7 min", "7 min"]
    assert old[1:6] == ["model m, weights 1a2b3c4d", "3", "3.117 KiB", "10 h", "173 min"]

    purge = ["pool", "purge", url, "--namespace", digest("old").hex(), "--yes", "--json"]
    assert main(purge) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == 4
    left = listed(url, capsys)
    assert digest("old") not in left
    for one in (left, found):
        # The clock of shared memory is read anew each time.
        one[digest("new")].pop("last_use")
    assert left[digest("new")] == found[digest("new")]


def test_when_a_value_was_used_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = fill(f"file://{tmp_path}/pool?size=64MiB")
    folder = tmp_path / "pool" / digest("old").hex()
    for number, file in enumerate(path for path in folder.rglob("*") if path.is_file()):
        os.utime(file, (0, 1_700_000_000 + number))
    assert listed(url, capsys)[digest("old")]["last_use"] == 1_700_000_002
    Store.open(url).retire(digest("old"), timeout=LIMIT)
    found = listed(url, capsys)
    assert found[digest("old")]["last_use"] is None
    assert found[digest("new")]["last_use"] > 1_700_000_002
