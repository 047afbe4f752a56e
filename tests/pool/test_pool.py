"""The pool's promises, over every kind of store."""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock import Pool, errors
from penstock.pool.namespace import RENEWED_SECONDS, publish_namespace
from tests.clock import Clock

SEALED = 64
"""Bytes that a value takes in a store beside its own."""


@pytest.fixture
def pool(pool_url: str) -> Iterator[Pool]:
    with penstock.open(pool_url) as pool:
        yield pool


def test_a_value_comes_back_as_it_was_put(pool: Pool) -> None:
    assert "key" not in pool
    assert pool.put("key", b"value") is True
    assert "key" in pool
    assert pool.get("key") == b"value"
    assert isinstance(pool.get("key"), bytearray)


def test_text_and_its_utf8_bytes_are_one_key(pool: Pool) -> None:
    pool.put("clé", b"value")
    assert pool.get("clé".encode()) == b"value"


def test_a_put_over_a_value_says_which_of_both_is_there(pool: Pool) -> None:
    pool.put("key", b"first")
    stored = pool.put("key", b"other")
    assert pool.get("key") == (b"other" if stored else b"first")
    assert pool.put("key", b"longer") is True
    assert pool.get("key") == b"longer"
    assert pool.remove(["key"]) == 1
    assert pool.put("key", b"other") is True
    assert pool.get("key") == b"other"


def test_a_missing_key_raises_or_gives_the_default(pool: Pool) -> None:
    with pytest.raises(errors.NotFound, match="'absent'"):
        pool.get("absent")
    with pytest.raises(KeyError):
        pool.get("absent", into=bytearray(8))
    assert pool.get("absent", default=None) is None
    assert pool.get("absent", into=bytearray(8), default=-1) == -1
    assert pool.stats()["misses"] >= 4


def test_a_destination_is_filled_from_its_start(pool: Pool) -> None:
    pool.put("key", b"value")
    into = bytearray(b"........")
    assert pool.get("key", into=into) == 5
    assert into == b"value..."


def test_a_value_that_does_not_fit_says_how_large_it_is(pool: Pool) -> None:
    pool.put("key", b"value")
    with pytest.raises(errors.TooSmall) as caught:
        pool.get("key", into=bytearray(4))
    assert caught.value.nbytes == 5
    assert pool.get("key") == b"value"


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 1 << 20, 20 << 20])
def test_sizes(pool: Pool, size: int) -> None:
    value = bytes(range(256)) * (size // 256 + 1)
    value = value[:size]
    assert pool.put("key", value)
    assert pool.get("key") == value
    into = bytearray(size)
    assert pool.get("key", into=into) == size
    assert into == value


def test_many_values_of_many_sizes(pool: Pool) -> None:
    values: dict[str | bytes, bytes] = {
        f"key {i}": bytes([i % 251]) * (i * 1000) for i in range(120)
    }
    assert pool.put_many(values) == [True] * len(values)
    pool.put_many(list(values.items()))
    keys = [*values, "absent", *reversed(values)]
    found = pool.get_many(keys)
    assert found == [values.get(key) for key in keys]
    into = [bytearray(120_000) for _ in keys]
    sizes = pool.get_many(keys, into=into)
    for key, size, buffer in zip(keys, sizes, into, strict=True):
        if key == "absent":
            assert size is None
        else:
            assert size == len(values[key])
            assert buffer[:size] == values[key]
    assert pool.contains(keys) == [key != "absent" for key in keys]
    assert pool.remove(keys) == len(values)
    assert not any(pool.contains(keys))


def test_nothing_is_something_that_can_be_asked_for(pool: Pool) -> None:
    assert pool.contains([]) == []
    assert pool.put_many({}) == []
    assert pool.get_many([]) == []
    assert pool.remove([]) == 0


def test_scattered_buffers_are_one_value(pool: Pool) -> None:
    pool.put("key", [b"ab", bytearray(b"cde"), memoryview(b"f"), b""])
    head, tail = bytearray(4), bytearray(4)
    assert pool.get("key", into=[head, tail]) == 6
    assert (head, tail[:2]) == (b"abcd", b"ef")


def test_namespaces_do_not_see_each_other(pool_url: str) -> None:
    # A memory pool is private to its handle: both need one store.
    with penstock.open(pool_url, namespace="a") as a:
        b = Pool(a._open_store(), "b")
        a.put("key", b"of a")
        assert b.get("key", default=None) is None
        b.put("key", b"value of b")
        assert a.get("key") == b"of a"
        assert [entry.identity for entry in a.list()] == [Pool.identity("key")]
        used = {one.digest: one for one in a.namespaces()}
        assert used[a.namespace].objects == used[b.namespace].objects == 1
        assert used[b.namespace].nbytes == SEALED + len(b"value of b")
        assert used[a.namespace].description == {"kind": "pool", "name": "a"}
        assert used[b.namespace].description == {"kind": "pool", "name": "b"}


def test_a_namespace_is_described_again_while_values_are_put(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, "penstock.pool.pool")
    described = functools.partial(publish_namespace, clock=lambda: clock.now)
    monkeypatch.setattr("penstock.pool.pool.publish_namespace", described)
    with penstock.open("memory://?size=1MiB", namespace="a") as pool:

        def when(put: Callable[[], object]) -> tuple[float | None, float | None]:
            put()
            used = {one.digest: one for one in pool.namespaces()}[pool.namespace]
            return used.first_described, used.last_described

        assert when(lambda: pool.put("key", b"value")) == (100, 100)
        clock.now += RENEWED_SECONDS - 1
        assert when(lambda: pool.put("key", b"value")) == (100, 100)
        clock.now += 1
        assert when(lambda: pool.put_many({"key": b"value"})) == (100, 400)
        clock.now += RENEWED_SECONDS
        assert when(lambda: pool.get("key")) == (100, 400)


def test_what_a_pool_says_of_itself(pool: Pool, pool_url: str) -> None:
    pool.put("key", b"value")
    pool.get("key")
    assert pool.url.split(":")[0] == pool_url.split(":")[0]
    assert pool.describe()
    stats = pool.stats()
    assert stats["bytes_written"] >= SEALED + 5
    assert stats["bytes_read"] >= SEALED + 5
    assert stats["rejected"] == stats["errors"] == 0
    assert pool.url in repr(pool)


def test_a_closed_pool_says_so(pool_url: str) -> None:
    pool = penstock.open(pool_url)
    pool.close()
    pool.close()
    with pytest.raises(errors.Closed):
        pool.get("key")
    with pytest.raises(ValueError, match="closed"):
        pool.put("key", b"")
    assert "closed" in repr(pool)


def test_many_threads_share_a_pool(pool: Pool) -> None:
    failures = []

    def work(number: int) -> None:
        try:
            for i in range(50):
                value = bytes([number]) * (1000 + i)
                pool.put(f"{number} {i}", value)
                assert pool.get(f"{number} {i}") == value
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(pool.list()) == 8 * 50


@given(
    values=st.dictionaries(
        st.binary(max_size=100), st.lists(st.binary(max_size=300), max_size=5), max_size=20
    )
)
@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_keys_and_values_come_back(pool: Pool, values: dict[bytes, list[bytes]]) -> None:
    pool.remove(list(values))
    pool.put_many(values.items())
    for key, pieces in values.items():
        assert pool.get(key) == b"".join(pieces)


class TestArguments:
    """What is refused before anything is done."""

    @pytest.fixture
    def pool(self) -> Pool:
        return penstock.open("memory://?size=1MiB")

    @pytest.mark.parametrize(
        "url",
        ["", "nonsense", "http://host", "memory://", "file://relative", "memory://?size=lots"],
    )
    def test_url(self, url: str) -> None:
        with pytest.raises(errors.ConfigError):
            penstock.open(url)

    def test_a_key_is_not_a_list_of_keys(self, pool: Pool) -> None:
        for method in (pool.contains, pool.get_many, pool.remove):
            with pytest.raises(errors.ConfigError, match=r"\['key'\]"):
                method("key")

    @pytest.mark.parametrize("timeout", [0, -1, float("nan")])
    def test_timeout(self, pool: Pool, timeout: float) -> None:
        with pytest.raises(errors.ConfigError, match="timeout"):
            pool.get("key", timeout=timeout)

    def test_an_endless_timeout_is_a_long_one(self, pool: Pool) -> None:
        assert pool.get("key", default=None, timeout=float("inf")) is None

    def test_destinations_are_one_for_each_key(self, pool: Pool) -> None:
        with pytest.raises(errors.ConfigError, match="2 keys, but 1"):
            pool.get_many(["a", "b"], into=[bytearray(1)])

    def test_destinations_do_not_overlap(self, pool: Pool) -> None:
        pool.put_many({"a": b"1234", "b": b"5678"})
        memory = bytearray(b"......")
        halves = [memoryview(memory)[:4], memoryview(memory)[2:]]
        with pytest.raises(errors.ConfigError, match="overlap"):
            pool.get_many(["a", "b"], into=halves)
        with pytest.raises(errors.ConfigError, match="overlap"):
            pool.get("a", into=[memory, memory])
        assert memory == b"......"

    @pytest.mark.parametrize("namespace", [b"short", {"no": object()}, {"no": float("nan")}])
    def test_namespace(self, namespace: object) -> None:
        with pytest.raises(errors.ConfigError):
            penstock.open("memory://?size=1MiB", namespace=namespace)  # type: ignore[arg-type]

    def test_a_value_larger_than_the_store(self, pool: Pool) -> None:
        with pytest.raises(errors.PenstockError):
            pool.put("key", bytes(2 << 20))


def test_exceptions_are_builtins_too_and_travel_between_processes() -> None:
    pairs = {
        errors.ConfigError: ValueError,
        errors.Unreachable: ConnectionError,
        errors.TimedOut: TimeoutError,
        errors.Denied: PermissionError,
        errors.IoError: OSError,
        errors.NotFound: KeyError,
        errors.LayoutError: ValueError,
    }
    for ours, builtin in pairs.items():
        assert issubclass(ours, builtin)
    kinds = set()
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, errors.PenstockError)
        error = pickle.loads(pickle.dumps(kind("what happened")))
        assert str(error) == "what happened"
        kinds.add(kind.kind)
    assert len(kinds) == len(errors.__all__)
