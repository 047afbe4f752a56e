"""Values damaged behind the pool's back: never returned, counted, removed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from lab.waiting import LIMIT
from penstock import Pool, errors
from penstock._native import Store
from penstock.pool.namespace import DIGEST_BYTES, namespace_digest, object_key
from tests.servers import Server

HEADER = 64
VALUE = bytes(range(200)) * 3
OTHER = bytes(reversed(VALUE))


def text_key(pool: Pool, key: str) -> str:
    return f"penstock:{pool.namespace.hex()}:{Pool.identity(key).hex()}:l0-1.h0-1"


class Tampered:
    """A Redis pool, and a hand on the raw values in it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.pool = penstock.open(server.unix_url)

    def read(self, key: str) -> bytes:
        reply = self.server.command("GET", text_key(self.pool, key))
        return reply.partition(b"\r\n")[2][:-2]

    def write(self, key: str, raw: bytes) -> None:
        assert self.server.command("SET", text_key(self.pool, key), raw) == b"+OK\r\n"

    def exists(self, key: str) -> bool:
        return self.server.command("EXISTS", text_key(self.pool, key)) == b":1\r\n"


@pytest.fixture
def tampered(redis_server: Server) -> Iterator[Tampered]:
    tampered = Tampered(redis_server)
    yield tampered
    tampered.pool.close()


def test_another_format_of_values_is_another_namespace(tampered: Tampered) -> None:
    tampered.pool.put("key", VALUE)
    raw = tampered.read("key")
    assert raw[:4] == b"PNSK"
    version = int.from_bytes(raw[4:6], "little")
    # Else an engine of one version would remove what one of another version stored.
    text = b"penstock namespace %d\n{}" % version
    assert namespace_digest({}) == hashlib.sha256(text).digest()[:DIGEST_BYTES]


def flip(raw: bytes, at: int, bit: int = 0) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "nothing left": lambda raw: b"",
    "half a header": lambda raw: raw[:40],
    "only a header": lambda raw: raw[:HEADER],
    "cut short": lambda raw: raw[:-1],
    "one byte more": lambda raw: raw + b"x",
    "magic": lambda raw: flip(raw, 0),
    "version": lambda raw: flip(raw, 4, 3),
    "flags": lambda raw: flip(raw, 6),
    "namespace": lambda raw: flip(raw, 20),
    "checksum": lambda raw: flip(raw, 50),
    "first byte of the payload": lambda raw: flip(raw, HEADER),
    "last byte of the payload": lambda raw: flip(raw, len(raw) - 1, 7),
    "not ours": lambda raw: b"hello" * 100,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_value_is_a_miss_and_is_removed(tampered: Tampered, damage: str) -> None:
    pool = tampered.pool
    pool.put("key", VALUE)
    tampered.write("key", DAMAGES[damage](tampered.read("key")))
    assert pool.get("key", default=None) is None
    assert not tampered.exists("key")
    assert pool.stats()["rejected"] == 1
    assert pool.put("key", VALUE) is True
    assert pool.get("key") == VALUE


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_value_in_a_near_pool_comes_from_the_far_one(
    redis_server: Server, tmp_path: Path, damage: str
) -> None:
    near, far = redis_server.unix_url, f"file://{tmp_path}/far?size=64MiB"
    with penstock.open(f"{near} {far}") as pool, penstock.open(far) as beyond:
        pool.put("key", VALUE)
        name = text_key(pool, "key")
        raw = redis_server.command("GET", name).partition(b"\r\n")[2][:-2]
        redis_server.command("SET", name, DAMAGES[damage](raw))
        assert pool.get("key") == VALUE
        assert pool.stats()["rejected"] == 1
        assert beyond.get("key") == VALUE
        redis_server.command("SET", name, DAMAGES[damage](raw))
        beyond.remove(["key"])
        assert pool.get("key", default=None) is None
        assert redis_server.command("EXISTS", name) == b":0\r\n"


def test_a_damaged_value_is_not_found(tampered: Tampered) -> None:
    tampered.pool.put("key", VALUE)
    tampered.write("key", flip(tampered.read("key"), 100))
    with pytest.raises(errors.NotFound):
        tampered.pool.get("key", into=bytearray(len(VALUE)))


def test_values_that_changed_places_are_misses(tampered: Tampered) -> None:
    pool = tampered.pool
    pool.put_many({"a": VALUE, "b": OTHER, "c": b"untouched"})
    a, b = tampered.read("a"), tampered.read("b")
    tampered.write("a", b)
    tampered.write("b", a)
    assert pool.get_many(["a", "b", "c"]) == [None, None, b"untouched"]
    assert not tampered.exists("a")
    assert not tampered.exists("b")
    assert pool.stats()["rejected"] == 2


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
    into = bytearray(len(VALUE))
    assert pool.get_many(["key"], into=[into]) == [None]


def test_the_native_store_says_why_and_removes_it(tampered: Tampered) -> None:
    pool = tampered.pool
    store = Store.open(tampered.server.unix_url)
    key = object_key(pool.namespace, Pool.identity("key"))
    pool.put("key", VALUE)
    damaged = flip(tampered.read("key"), HEADER)
    tampered.write("key", damaged)
    with pytest.raises(errors.Rejected) as caught:
        store.get(key, bytearray(len(VALUE)), timeout=LIMIT)
    assert caught.value.reason == "payload_checksum"
    assert not tampered.exists("key")
    tampered.write("key", damaged)
    [outcome] = store.get_many([(key, bytearray(len(VALUE)))], timeout=LIMIT)
    assert isinstance(outcome, errors.Rejected)
    assert not tampered.exists("key")


def test_a_damaged_file_is_a_miss(tmp_path: Path) -> None:
    with penstock.open(f"file://{tmp_path}/pool?size=16MiB") as pool:
        pool.put("key", VALUE)
        [path] = (
            path
            for path in (tmp_path / "pool").rglob("*")
            if path.is_file() and VALUE in path.read_bytes()
        )
        raw = path.read_bytes()
        path.write_bytes(flip(raw, raw.index(VALUE) + 5))
        assert pool.get("key", default=None) is None
        assert pool.stats()["rejected"] == 1
        assert "key" not in pool
