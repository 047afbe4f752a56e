"""What is known of the pool: look-ups of a real one, and what was told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock._native import Store
from penstock.vllm import presence
from penstock.vllm.messages import CHUNK_BYTES, Span, block_name
from penstock.vllm.presence import Presence
from penstock.vllm.stats import PenstockStats

NAMESPACE = bytes(16)
SPANS: list[Span] = [(0, 4, 0, 2), (4, 8, 0, 2)]


def chunk(number: int) -> bytes:
    return bytes([number]) * CHUNK_BYTES


def key(number: int, span: Span) -> bytes:
    return NAMESPACE + chunk(number) + b"".join(n.to_bytes(2, "little") for n in span)


@pytest.fixture
def pool(tmp_path: Path) -> Store:
    return Store.open(f"file://{tmp_path}/pool?size=64MiB")


@pytest.fixture
def known(pool: Store) -> Iterator[Presence]:
    made = Presence(pool, 5.0, PenstockStats())
    yield made
    made.shutdown()


def answers(known: Presence, numbers: list[int]) -> list[list[bool]]:
    deadline = time.monotonic() + 10
    while (found := known.answers(numbers)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return found


def test_a_block_is_there_when_all_its_spans_are(known: Presence, pool: Store) -> None:
    for number, spans in ((1, SPANS), (2, SPANS[:1]), (3, SPANS)):
        for span in spans:
            pool.put(key(number, span), b"value", timeout=5.0)
    chunks = [chunk(1), chunk(2), chunk(3)]
    numbers = known.ask([(NAMESPACE, chunks, SPANS), (NAMESPACE, chunks[:2], SPANS[:1])])
    assert len(numbers) == 2
    assert answers(known, numbers) == [[True, False, True], [True, True]]


def test_what_was_learned_last_is_known(known: Presence) -> None:
    hashes = [chunk(1), chunk(2)]
    assert known.learn(0, hashes, [True, True]) == [True, True]
    assert block_name(0, chunk(2)) in known
    assert block_name(1, chunk(2)) not in known
    assert known.learn(0, hashes, [True, False]) == [True, False]
    assert block_name(0, chunk(2)) not in known
    known.remove(block_name(0, chunk(1)))
    assert block_name(0, chunk(1)) not in known


def test_a_block_that_cannot_be_decrypted_is_known_and_not_loaded(known: Presence) -> None:
    name = block_name(0, chunk(1))
    known.add_foreign(name)
    assert known.learn(0, [chunk(1)], [True]) == [False]
    assert name in known
    # It went, and another was stored under its name.
    known.learn(0, [chunk(1)], [False])
    assert known.learn(0, [chunk(1)], [True]) == [True]


def test_what_is_remembered_is_bounded(known: Presence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_REMEMBERED", 3)
    names = [block_name(0, chunk(number)) for number in range(4)]
    for name in (*names[:3], names[0], names[3]):
        known.add(name)
    assert [name in known for name in names] == [True, False, True, True]
    known.forget()
    assert not any(name in known for name in names)


def test_a_look_up_that_nobody_waits_for_is_not_answered(known: Presence) -> None:
    dropped = known.ask([(NAMESPACE, [chunk(1)], SPANS)])
    known.drop(dropped)
    kept = known.ask([(NAMESPACE, [chunk(1)], SPANS)])
    assert answers(known, kept) == [[False]]
    assert known.answers(dropped) is None
