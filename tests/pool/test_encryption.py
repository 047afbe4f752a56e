"""Pools with encryption keys: what lies in the store, who can read it, and what errors show."""

from __future__ import annotations

import asyncio
import base64
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from lab.waiting import LIMIT
from penstock import Pool, errors
from penstock._native import EncryptionKeys, Store
from penstock.pool.namespace import object_key
from tests.pool.test_verification import Tampered, flip
from tests.servers import Server

HEADER = 128
VALUE = bytes(range(200)) * 3
A, B = (base64.b64encode(bytes(range(start, start + 32))).decode() for start in (0, 100))

KeyFile = Callable[..., Path]


@pytest.fixture
def key_file(tmp_path: Path) -> KeyFile:
    """Writes a file of keys."""

    def write(*lines: str, mode: int = 0o600) -> Path:
        path = tmp_path / f"keys-{len(list(tmp_path.glob('keys-*')))}"
        path.write_text("\n".join(lines))
        path.chmod(mode)
        return path

    return write


@pytest.fixture
def tampered(redis_server: Server, key_file: KeyFile) -> Iterator[Tampered]:
    tampered = Tampered(redis_server)
    tampered.pool.close()
    tampered.pool = penstock.open(redis_server.unix_url, encryption_key_file=key_file(f"a:{A}"))
    yield tampered
    tampered.pool.close()


@pytest.mark.parametrize("kind", ["redis", "file"])
def test_values_come_back_and_the_store_does_not_see_them(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, key_file: KeyFile
) -> None:
    if kind == "redis":
        url = request.getfixturevalue("redis_server").unix_url
    else:
        url = f"file://{tmp_path}/pool?size=64MiB"
    file = key_file(f"a:{A}")
    values = {str(i): os.urandom(i) for i in (0, 1, 63, 64, 1000, 100_000)}
    with penstock.open(url, encryption_key_file=file) as pool:
        assert pool.put_many(values) == [True] * len(values)
        assert pool.get_many(list(values)) == list(values.values())
        for key, value in values.items():
            into = bytearray(b"~" * (len(value) + 9))
            assert pool.get(key, into=into) == len(value)
            assert into == value + b"~" * 9
            pieces = [bytearray(7), bytearray(len(value)), bytearray(100)]
            assert pool.get_many([key], into=[pieces]) == [len(value)]
            assert b"".join(pieces)[: len(value)] == value
        with pytest.raises(errors.TooSmall) as caught:
            pool.get("1000", into=bytearray(999))
        assert caught.value.nbytes == 1000
        assert {entry.nbytes for entry in pool.list()} == {HEADER + n for n in map(int, values)}
        assert pool.stats()["rejected"] == 0
    if kind == "file":
        stored = b"".join(p.read_bytes() for p in (tmp_path / "pool").rglob("*") if p.is_file())
        assert values["1000"][:16] not in stored
        assert values["100000"][500:516] not in stored


def test_the_async_pool_encrypts_too(tmp_path: Path, key_file: KeyFile) -> None:
    url = f"file://{tmp_path}/pool?size=16MiB"
    file = key_file(f"a:{A}")

    async def use() -> bytes:
        async with penstock.open_async(url, encryption_key_file=file) as pool:
            await pool.put("key", VALUE)
            return bytes(await pool.get("key"))

    assert asyncio.run(use()) == VALUE
    with penstock.open(url) as pool:
        assert pool.get("key", default=None) is None


def test_the_environment_may_hold_the_keys(
    tmp_path: Path, key_file: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/pool?size=16MiB"
    with penstock.open(url, encryption_key_file=key_file(f"a:{A}")) as pool:
        pool.put("key", VALUE)
    monkeypatch.setenv("PENSTOCK_ENCRYPTION_KEYS", f"other:{B}\na:{A}")
    with penstock.open(url) as pool:
        assert pool.get("key") == VALUE
    # A file that is named comes first.
    with penstock.open(url, encryption_key_file=key_file(f"b:{B}")) as pool:
        assert pool.get("key", default=None) is None


def test_keys_are_rotated(tmp_path: Path, key_file: KeyFile) -> None:
    url = f"file://{tmp_path}/pool?size=16MiB"

    def pool(*lines: str) -> Pool:
        return penstock.open(url, encryption_key_file=key_file(*lines))

    with pool(f"a:{A}") as old:
        old.put("before", VALUE)
    with pool(f"b:{B}", f"a:{A}") as rotated:
        assert rotated.get("before") == VALUE
        rotated.put("after", VALUE)
    with pool(f"a:{A}", f"b:{B}") as prepared:
        assert prepared.get_many(["before", "after"]) == [VALUE, VALUE]
    with pool(f"renamed:{B}") as retired:
        assert retired.get_many(["before", "after"]) == [None, VALUE]
        assert retired.stats()["rejected"] == 1
        assert "before" in retired, "what others may read stays"


def test_values_of_others_are_misses_that_stay(tampered: Tampered, key_file: KeyFile) -> None:
    url = tampered.server.unix_url
    tampered.pool.put("key", VALUE)
    raw = tampered.read("key")
    for file in (None, key_file(f"b:{B}")):
        with penstock.open(url, encryption_key_file=file) as other:
            assert other.get("key", default=None) is None
            assert other.get_many(["key"], into=[bytearray(len(VALUE))]) == [None]
            with pytest.raises(errors.NotFound):
                other.get("key", into=bytearray(5000))
            assert other.stats()["rejected"] == 3
    assert tampered.read("key") == raw
    assert tampered.pool.get("key") == VALUE


def test_values_that_are_not_encrypted_are_refused_and_replaced(tampered: Tampered) -> None:
    with penstock.open(tampered.server.unix_url) as plain:
        plain.put("key", VALUE)
    into = bytearray(len(VALUE))
    assert tampered.pool.get("key", into=into, default=None) is None
    assert not tampered.exists("key")
    assert tampered.pool.put("key", VALUE)
    assert tampered.pool.get("key") == VALUE


@given(at=st.integers(0, HEADER + len(VALUE) - 1), bit=st.integers(0, 7))
@settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_flipped_bit_is_a_miss(tampered: Tampered, at: int, bit: int) -> None:
    pool = tampered.pool
    pool.put("key", VALUE)
    raw = tampered.read("key")
    assert len(raw) == HEADER + len(VALUE)
    tampered.write("key", flip(raw, at, bit))
    for into in (bytearray(len(VALUE)), [bytearray(100), bytearray(len(VALUE))]):
        tampered.write("key", flip(raw, at, bit))
        assert pool.get_many(["key"], into=[into]) == [None]
    assert not tampered.exists("key")


def test_the_native_store_says_why(tampered: Tampered, key_file: KeyFile) -> None:
    keys = EncryptionKeys.load(key_file(f"a:{A}"))
    assert keys is not None
    store = Store.open(tampered.server.unix_url)
    key = object_key(tampered.pool.namespace, Pool.identity("key"))
    tampered.pool.put("key", VALUE)

    def reason(store: Store) -> tuple[str, bool]:
        with pytest.raises(errors.Rejected) as caught:
            store.get(key, bytearray(len(VALUE)), timeout=LIMIT)
        return caught.value.reason, caught.value.is_foreign

    assert reason(store) == ("encrypted", True)
    other = EncryptionKeys.load(key_file(f"b:{B}"))
    assert other is not None
    assert reason(store.encrypted(other)) == ("unknown_key", True)
    tampered.write("key", flip(tampered.read("key"), HEADER))
    assert reason(store.encrypted(keys)) == ("authentication", False)
    store.put(key, VALUE + b"longer", timeout=LIMIT)
    assert store.encrypted(keys).unencrypted().get(key, bytearray(9999), timeout=LIMIT) == 606
    assert reason(store.encrypted(keys)) == ("unencrypted", False)
    assert not tampered.exists("key")


def test_descriptions_of_namespaces_are_for_everybody(tmp_path: Path, key_file: KeyFile) -> None:
    url = f"file://{tmp_path}/pool?size=16MiB"
    with penstock.open(url, namespace="docs", encryption_key_file=key_file(f"a:{A}")) as pool:
        pool.put("key", VALUE)
        [own] = [usage for usage in pool.namespaces() if usage.digest == pool.namespace]
    with penstock.open(url) as plain:
        [seen] = [usage for usage in plain.namespaces() if usage.digest == own.digest]
    assert own.description == seen.description == {"kind": "pool", "name": "docs"}


def test_buffers_that_are_put_stay_as_they_are(key_file: KeyFile) -> None:
    with penstock.open("memory://?size=1MiB", encryption_key_file=key_file(f"a:{A}")) as pool:
        buffer = bytearray(VALUE)
        pool.put("key", [buffer, b"tail", buffer])
        assert buffer == VALUE
        assert pool.get("key") == VALUE + b"tail" + VALUE


@pytest.mark.parametrize(
    ("lines", "mode", "expected"),
    [
        ((f"a:{A}",), 0o644, "others may read or write the keys .mode 644.: chmod 600"),
        ((A,), 0o600, "line 1 of the keys: it has no ':'"),
        ((f"a:{A[:-4]}",), 0o600, "'a'|\"a\" is the text of 30 bytes"),
        ((f"a:{A[:-2]}",), 0o600, "malformed"),
        ((f"a:{A}", f"a:{B}"), 0o600, "line 2 of the keys"),
        ((f"{A}:a",), 0o600, "an id is 1 to 32"),
        ((), 0o600, "no encryption key"),
    ],
)
def test_what_is_wrong_with_keys_is_said_and_no_key_is_shown(
    lines: tuple[str, ...], mode: int, expected: str, key_file: KeyFile
) -> None:
    file = key_file(*lines, mode=mode)
    with pytest.raises(errors.ConfigError, match=expected) as caught:
        penstock.open("memory://?size=1MiB", encryption_key_file=file)
    told = "".join(traceback.format_exception(caught.value))
    assert str(file) in str(caught.value)
    assert not any(secret[at : at + 8] in told for secret in (A, B) for at in range(30))


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(errors.IoError, match=r"cannot read the keys.*no-such-file"):
        penstock.open("memory://?size=1MiB", encryption_key_file=tmp_path / "no-such-file")


def test_nothing_shows_a_key(key_file: KeyFile, tmp_path: Path) -> None:
    file = key_file(f"a:{A}", f"b:{B}")
    keys = EncryptionKeys.load(file)
    assert keys is not None
    assert [name for name, _ in keys.fingerprints] == ["a", "b"]
    with penstock.open("memory://?size=1MiB", encryption_key_file=file) as pool:
        shown: list[Any] = [keys, pool, pool.describe(), pool.stats(), keys.fingerprints]
    told = " ".join(map(repr, shown))
    for secret in (A, B):
        raw = base64.b64decode(secret)
        assert secret[:8] not in told
        assert raw.hex()[:16] not in told
    assert repr(keys) == 'EncryptionKeys(["a", "b"])'
