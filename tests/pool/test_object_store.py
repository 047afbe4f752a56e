"""Pools in an object store: credentials of the environment, commands, an engine's own settings."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import penstock
from penstock.cli import main
from penstock.errors import ConfigError, Denied
from tests.objects import ObjectServer

KEYS = ("penstock-tests", "hunter2-is-the-secret")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with ObjectServer(tmp_path_factory.mktemp("objects"), KEYS) as server:
        yield server


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS[1])
    return monkeypatch


def test_credentials_come_from_the_environment_and_are_not_shown(
    server: ObjectServer, keys: pytest.MonkeyPatch
) -> None:
    url = server.url("signed")
    with penstock.open(url, namespace="a", timeout=30) as pool:
        pool.put("key", b"value")
        assert KEYS[1] not in repr(pool) + pool.url
    with penstock.open(url, namespace="a", timeout=30) as pool:
        assert bytes(pool.get("key")) == b"value"
    keys.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-is-wrong")
    with penstock.open(url, namespace="a") as pool, pytest.raises(Denied) as caught:
        pool.get("key")
    assert "hunter2" not in str(caught.value)
    assert "SignatureDoesNotMatch" in str(caught.value)
    with pytest.raises(ConfigError) as refused:
        penstock.open(url.replace("s3://", f"s3://{KEYS[0]}:{KEYS[1]}@"))
    assert KEYS[1] not in str(refused.value)


def test_commands_look_into_the_pool_and_empty_it(
    server: ObjectServer, keys: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.url("commands", "&linger=1ms")
    with penstock.open(url, namespace="a", timeout=30) as pool:
        pool.put_many({str(n): b"x" * 1000 for n in range(50)})
    assert main(["doctor", url, "--json"]) == 0
    told = {each["check"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert told["expiry"]["level"] == "warn"
    assert "lifecycle" in told["expiry"]["advice"]
    assert {"put", "get", "remove"} & {
        name for name in told if told[name]["level"] == "fail"
    } == set()
    assert main(["pool", "stats", url, "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    # What describes the namespace is an object, too.
    assert (stats["namespaces"], stats["objects"]) == (2, 51)
    assert stats["store"]["expire_days"] == "never"
    assert main(["pool", "verify", url, "--json"]) == 0
    capsys.readouterr()
    assert main(["pool", "purge", url, "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == 51
    with penstock.open(url, namespace="a", timeout=30) as pool:
        assert pool.contains(["1", "49"]) == [False, False]


def test_a_bench_measures_it(
    server: ObjectServer, keys: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.url("bench", "&linger=1ms&pack=1MiB")
    options = ["--size", "64KiB", "--total", "2MiB", "--passes", "1", "--json"]
    assert main(["bench", "pool", url, *options]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["misses"] == 0
    assert row["put_mib_s"] > 0 < row["get_mib_s"]
