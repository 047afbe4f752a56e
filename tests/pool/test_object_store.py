"""Pools in an object store: credentials of the environment, commands, an engine's own settings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from lab.objects import BUCKET
from lab.processes import free_port
from lab.waiting import LIMIT
from penstock.cli import main
from penstock.errors import ConfigError, Denied, Unavailable
from tests.servers import ObjectServer, PolicyServer

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
    with penstock.open(url, namespace="a", timeout=LIMIT) as pool:
        pool.put("key", b"value")
        assert KEYS[1] not in repr(pool) + pool.url
    with penstock.open(url, namespace="a", timeout=LIMIT) as pool:
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
    with penstock.open(url, namespace="a", timeout=LIMIT) as pool:
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
    with penstock.open(url, namespace="a", timeout=LIMIT) as pool:
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


READER, WRITER = "reader", "writer"
LOOK = ["s3:GetObject", "s3:ListBucket"]


def test_users_are_held_to_their_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boto3 = pytest.importorskip("boto3")
    with PolicyServer(tmp_path) as server:

        def client(service: str, **keys: str) -> Any:
            first = {"aws_access_key_id": "first", "aws_secret_access_key": "first"}
            where = {"endpoint_url": server.endpoint, "region_name": "us-east-1"}
            return boto3.client(service, **where, **(first | keys))

        client("s3").create_bucket(Bucket=BUCKET)
        users = {}
        for name, actions in {READER: LOOK, WRITER: ["*"]}.items():
            statement = {"Effect": "Allow", "Action": actions, "Resource": "*"}
            policy = {"Version": "2012-10-17", "Statement": [statement]}
            iam = client("iam")
            iam.create_user(UserName=name)
            iam.put_user_policy(UserName=name, PolicyName=name, PolicyDocument=json.dumps(policy))
            made = iam.create_access_key(UserName=name)["AccessKey"]
            users[name] = (made["AccessKeyId"], made["SecretAccessKey"])
        server.hold_users_to_their_policies()

        def pool_of(name: str) -> penstock.Pool:
            key, secret = users[name]
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
            return penstock.open(server.url("p"), namespace="a", timeout=LIMIT)

        values = {str(number): bytes([number]) * 100_000 for number in range(60)}
        with pool_of(WRITER) as writer:
            writer.put_many(values)
            assert writer.get_many(list(values)) == list(values.values())
        with pool_of(READER) as reader:
            assert reader.get_many(list(values)) == list(values.values())
            with pytest.raises(Denied, match="AccessDenied"):
                reader.put("one more", b"value")
        with pool_of(WRITER) as writer:
            writer.remove(list(values)[:10])
            assert sum(writer.contains(list(values))) == 50
            key, secret = users[WRITER]
            keys = {"aws_access_key_id": key, "aws_secret_access_key": secret}
            s3 = client("s3", **keys)
            for each in s3.list_objects_v2(Bucket=BUCKET)["Contents"]:
                s3.delete_object(Bucket=BUCKET, Key=each["Key"])
            assert writer.get("59", default=None) is None
            s3.delete_bucket(Bucket=BUCKET)
            with pytest.raises(Unavailable, match="no such bucket"):
                writer.put("one more", b"value")
            # From here on, nobody knows the key.
            client("iam", **keys).delete_access_key(UserName=WRITER, AccessKeyId=key)
            with pytest.raises(Denied, match="InvalidAccessKeyId"):
                writer.put("one more", b"value")


def test_a_fork_is_told_to_open_it_anew() -> None:
    pool = penstock.open(f"s3://bucket?endpoint=http://127.0.0.1:{free_port()}&unsigned=true")
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(Unavailable, match="open it anew"):
                pool.get("key", timeout=LIMIT)
            pool.close()
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.close()
