"""The native module: its stubs, and what only it offers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from lab.waiting import LIMIT
from penstock import errors
from penstock._native import Store, parse_size
from penstock.layout import Descriptor, TensorView, check_ranks, objects
from penstock.pool.namespace import (
    DESCRIPTIONS,
    RENEWED_SECONDS,
    Published,
    canonical_json,
    namespace_digest,
    object_key,
    publish_namespace,
    read_namespace,
    read_published,
)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("0", 0), ("64KiB", 65536), ("1.5 GB", 1_500_000_000), ("2G", 2 << 30)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


def test_what_is_no_size_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="lots"):
        parse_size("lots")


class TestStore:
    """The fixed-width form of keys, as the connector uses it."""

    NAMESPACE = bytes(range(16))
    SPAN = bytes([2, 0, 8, 0, 0, 0, 4, 0])

    @pytest.fixture
    def store(self) -> Store:
        return Store.open("memory://?size=1MiB", client_name="tests")

    def key(self, chunk: bytes) -> bytes:
        return self.NAMESPACE + chunk.ljust(32, b"\0") + self.SPAN

    def test_keys_come_back_from_a_listing(self, store: Store) -> None:
        keys = [self.key(bytes([i]) * 32) for i in range(3)]
        assert (
            store.put_many([(key, b"x" * i) for i, key in enumerate(keys)], timeout=LIMIT)
            == [True] * 3
        )
        assert sorted(store.list(self.NAMESPACE, timeout=LIMIT)) == [
            (key, 64 + i) for i, key in enumerate(keys)
        ]
        assert store.list(bytes(16), timeout=LIMIT) == []
        assert store.usage(timeout=LIMIT) == [(self.NAMESPACE, 3, 3 * 64 + 3, None)]
        assert store.capabilities()["shared"] is False

    @pytest.mark.parametrize("key", [b"", b"x" * 55, b"x" * 57, bytes(56)])
    def test_what_is_no_key(self, store: Store, key: bytes) -> None:
        for operation in (
            lambda: store.contains([key], timeout=LIMIT),
            lambda: store.get(key, bytearray(1), timeout=LIMIT),
            lambda: store.put(key, b"", timeout=LIMIT),
            lambda: store.put_many([(key, b"")], timeout=LIMIT),
            lambda: store.remove([key], timeout=LIMIT),
        ):
            with pytest.raises(errors.ConfigError):
                operation()

    def test_what_is_retired_goes_first(self) -> None:
        store = Store.open("memory://?size=64KiB")
        for number in range(6):
            for name in (b"o" * 16, b"r" * 16):
                store.put(object_key(name, b"%d" % number), bytes(4000), timeout=LIMIT)
        store.retire(b"r" * 16, timeout=LIMIT)
        store.get(object_key(b"r" * 16, b"0"), bytearray(4000), timeout=LIMIT)
        for number in range(8):
            store.put(object_key(b"n" * 16, b"%d" % number), bytes(4000), timeout=LIMIT)
        left = {name[:1]: objects for name, objects, *_ in store.usage(timeout=LIMIT)}
        assert left == {b"o": 6, b"r": 1, b"n": 8}
        with pytest.raises(errors.ConfigError):
            store.retire(b"r", timeout=LIMIT)

    def test_a_failure_is_one_values_outcome(self, store: Store) -> None:
        fits, large = self.key(b"a"), self.key(b"b")
        outcomes = store.put_many([(large, bytes(2 << 20)), (fits, b"1")], timeout=LIMIT)
        assert isinstance(outcomes[0], errors.PenstockError)
        assert outcomes[1] is True
        found = store.get_many(
            [(large, bytearray(1)), (fits, bytearray(0)), (fits, bytearray(1))], timeout=LIMIT
        )
        assert found[0] is None
        assert isinstance(found[1], errors.TooSmall)
        assert found[2] == 1


class TestNamespaces:
    def test_the_digest_is_of_canonical_json(self) -> None:
        description = {"b": [1, "é"], "a": None}
        text = b'{"a":null,"b":[1,"\\u00e9"]}'
        assert (
            namespace_digest(description)
            == hashlib.sha256(b"penstock namespace 2\n" + text).digest()[:16]
        )

    def test_publishing_and_reading(self) -> None:
        store = Store.open("memory://?size=1MiB")
        digest = bytes(range(16))
        assert read_namespace(store, digest) is None
        publish_namespace(store, digest, {"model": "a"})
        publish_namespace(store, digest, {"model": "b"})
        assert read_namespace(store, digest) == {"model": "a"}
        assert read_namespace(store, bytes(16)) is None

    def test_when_it_was_described_first_and_last(self) -> None:
        store, digest = Store.open("memory://?size=1MiB"), bytes(range(16))

        def publish(at: float, **description: str) -> Published | None:
            publish_namespace(store, digest, description, clock=lambda: at)
            return read_published(store, digest)

        a = {"model": "a"}
        assert publish(1000.7, model="a") == Published(a, 1000, 1000)
        text = bytearray(1000)
        nbytes = store.get(object_key(DESCRIPTIONS, digest), text, timeout=LIMIT)
        times = {"first": 1000, "last": 1000}
        assert json.loads(text[:nbytes]) == {"model": "a", "penstock:described": times}
        assert publish(999 + RENEWED_SECONDS, model="b") == Published(a, 1000, 1000)
        puts = store.stats()["puts"]
        # The new value is as long as the old one, which a store may keep.
        assert publish(1000 + RENEWED_SECONDS, model="b") == Published(a, 1000, 1300)
        assert store.stats()["puts"] == puts + 1
        # A clock that is behind.
        assert publish(1299, model="b") == Published(a, 1000, 1299)
        new = {"model": "a", "kind": "new"}
        assert publish(1299, **new) == Published(new, 1000, 1299)

    @pytest.mark.parametrize("kind", ["memory://?size=1MiB", "file://{}?size=1MiB"])
    def test_readers_always_find_a_description_that_is_renewed(
        self, kind: str, tmp_path: Path
    ) -> None:
        class Watched:
            """A store from which nothing may be removed."""

            def __init__(self, store: Store) -> None:
                self.get, self.put = store.get, store.put

            def unencrypted(self) -> Watched:
                return self

        store, digest = Store.open(kind.format(tmp_path)), bytes(range(16))
        publish_namespace(store, digest, {"model": "a"}, clock=lambda: 1000)
        watched: Any = Watched(store)
        for renewed in range(1, 5):
            now = 1000 + renewed * RENEWED_SECONDS
            publish_namespace(watched, digest, {"model": "a"}, clock=lambda at=now: at)
            assert read_published(store, digest) == Published({"model": "a"}, 1000, now)

    def test_the_name_of_the_times_is_taken(self) -> None:
        store = Store.open("memory://?size=1MiB")
        with pytest.raises(errors.ConfigError, match="penstock:described"):
            publish_namespace(store, bytes(16), {"penstock:described": 1})

    def test_a_description_of_an_older_version_has_no_times_at_first(self) -> None:
        store, digest = Store.open("memory://?size=1MiB"), bytes(range(16))
        key = object_key(DESCRIPTIONS, digest)
        store.put(key, b'{"model":"a"}', timeout=LIMIT)
        assert read_published(store, digest) == Published({"model": "a"}, None, None)
        publish_namespace(store, digest, {"model": "a"}, clock=lambda: 1000)
        assert read_published(store, digest) == Published({"model": "a"}, None, 1000)
        full = {"model": "a" * ((64 << 10) - 12)}
        store.remove([key], timeout=LIMIT)
        assert store.put(key, canonical_json(full), timeout=LIMIT)
        publish_namespace(store, digest, {"model": "a"}, clock=lambda: 1000)
        assert read_published(store, digest) == Published(full, None, None), "no room for times"

    @pytest.mark.parametrize(
        "times", [None, 7, {}, {"first": "1", "last": True}, {"first": -1, "last": 1 << 41}]
    )
    def test_times_that_are_none(self, times: object) -> None:
        store, digest = Store.open("memory://?size=1MiB"), bytes(range(16))
        text = json.dumps({"model": "a", "penstock:described": times}).encode()
        store.put(object_key(DESCRIPTIONS, digest), text, timeout=LIMIT)
        assert read_published(store, digest) == Published({"model": "a"}, None, None)

    @pytest.mark.parametrize("stored", [b"", b"[1]", b"{", b"\xff", b"x" * 70_000])
    def test_what_is_no_description_is_none_and_is_replaced(self, stored: bytes) -> None:
        store = Store.open("memory://?size=1MiB")
        digest = bytes(range(16))
        store.put(object_key(DESCRIPTIONS, digest), stored, timeout=LIMIT)
        assert read_namespace(store, digest) is None
        publish_namespace(store, digest, {"model": "a"})
        assert read_namespace(store, digest) == {"model": "a"}

    def test_a_description_has_its_limits(self) -> None:
        store = Store.open("memory://?size=1MiB")
        with pytest.raises(errors.ConfigError, match="65536"):
            publish_namespace(store, bytes(16), {"long": "x" * 70_000})
        with pytest.raises(errors.ConfigError, match="JSON"):
            namespace_digest({"set": {1, 2}})
        assert json.dumps(store.stats()["puts"]) == "0"


class TestLayout:
    """Conversions; the arithmetic has its own tests in Rust."""

    SHARE = (2, 4, 0, 2)

    def test_a_packed_layout(self) -> None:
        descriptor = Descriptor.packed("LBNHC", self.SHARE, blocks=3, tokens=4, content_bytes=10)
        assert descriptor.layout == "LBNHC"
        assert (descriptor.share, descriptor.blocks, descriptor.tokens) == (self.SHARE, 3, 4)
        assert (descriptor.content_bytes, descriptor.interior) == (10, "NHC")
        assert descriptor.region_bytes == [2 * 3 * 4 * 2 * 10]
        assert descriptor.region_addresses == []
        assert descriptor.block_bytes(self.SHARE) == 160
        # A layer holds 3 blocks of 80 bytes; block 1 of layer 2, then of layer 3.
        assert descriptor.segments(1, self.SHARE) == [(0, 80, 80), (0, 320, 80)]
        # Head 1 of layer 3 alone: 10 of every 20 bytes, token by token.
        assert descriptor.segments(1, (3, 4, 1, 2)) == [
            (0, 330, 10),
            (0, 350, 10),
            (0, 370, 10),
            (0, 390, 10),
        ]
        assert descriptor == descriptor.with_interior("NHC")
        assert descriptor != descriptor.with_interior("HNC")

    def test_a_detected_layout(self) -> None:
        torch = pytest.importorskip("torch")
        layers = [torch.zeros(3, 2, 4, 10, dtype=torch.bfloat16) for _ in range(2)]
        descriptor = Descriptor.detect(
            [
                TensorView(
                    index,
                    address=layer.data_ptr(),
                    shape=tuple(layer.shape),
                    strides=tuple(layer.stride()),
                    itemsize=layer.element_size(),
                    storage_address=layer.untyped_storage().data_ptr(),
                    storage_bytes=layer.untyped_storage().nbytes(),
                )
                for index, layer in enumerate(layers, start=2)
            ],
            head_start=6,
        )
        assert descriptor.layout == "LBHNC"
        assert descriptor.share == (2, 4, 6, 8)
        assert sorted(descriptor.region_addresses) == sorted(one.data_ptr() for one in layers)
        assert [nbytes for _, _, nbytes in descriptor.segments(2, descriptor.share)] == [160, 160]

    def test_objects_and_ranks(self) -> None:
        assert objects((0, 6, 0, 4)) == [(0, 6, 0, 4)]
        assert objects((0, 6, 0, 4), layers_per_object=3, heads_per_object=4) == [
            (0, 3, 0, 4),
            (3, 6, 0, 4),
        ]
        spans, turns = check_ranks([(0, 6, 0, 4), (6, 8, 0, 4)], 8, 4, layers_per_object=2)
        assert spans == [(0, 2, 0, 4), (2, 4, 0, 4), (4, 6, 0, 4), (6, 8, 0, 4)]
        assert turns == [(0, 1), (0, 1)]

    def test_refusals_say_why(self) -> None:
        packed = {"blocks": 3, "tokens": 4, "content_bytes": 10}
        with pytest.raises(errors.LayoutError, match="ABCDE"):
            Descriptor.packed("ABCDE", self.SHARE, **packed)
        with pytest.raises(errors.LayoutError, match="at least one layer"):
            Descriptor.packed("LBHNC", (2, 2, 0, 1), **packed)
        descriptor = Descriptor.packed("LBHNC", self.SHARE, **packed)
        with pytest.raises(errors.LayoutError, match="block 3"):
            descriptor.segments(3, self.SHARE)
        with pytest.raises(errors.LayoutError, match="HNC or NHC"):
            descriptor.with_interior("CNH")
        with pytest.raises(errors.LayoutError):
            Descriptor.detect([])
        with pytest.raises(errors.LayoutError):
            objects((0, 5, 0, 4), layers_per_object=2)
        with pytest.raises(errors.LayoutError, match="no rank holds"):
            check_ranks([(0, 6, 0, 4)], 8, 4)
