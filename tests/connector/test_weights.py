"""When weights change: nothing of those before is offered, and nothing of both is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from penstock.vllm.groups import Group
from penstock.vllm.messages import WorkerReport
from penstock.vllm.scheduler.promises import REMOTE_DECODE
from tests.connector.engine import Asked, PlainEngine

FULL = Group(0, "full_attention", 4, None, "bfloat16", ())
BLOCK = FULL.block_size
TOKENS = range(4 * BLOCK + 1)
WHOLE = 4 * BLOCK


class Blocks:
    """An engine's own cache that can be emptied."""

    def __init__(self) -> None:
        self.empty: Callable[[], None] = lambda: None

    def watch_resets(self, is_reset: Callable[[], None]) -> None:
        self.empty = is_reset

    def is_cached(self, block_hash: bytes, group: int) -> bool:
        return False

    def hold(self, blocks: Iterable[int]) -> None:
        raise NotImplementedError

    def free(self, blocks: Iterable[int]) -> None:
        raise NotImplementedError


@pytest.fixture
def engine() -> PlainEngine:
    return PlainEngine([FULL])


@pytest.fixture
def blocks(engine: PlainEngine) -> Blocks:
    own = Blocks()
    engine.half.bind(own)
    return own


def change(engine: PlainEngine, count: int = 1, worker: str = "one") -> None:
    engine._tell(WorkerReport(changes={worker: count}))
    versions = engine.half.versions
    if versions.asks:
        # As before the next request. No worker can tell what they are.
        versions.on_told([None])


def computed(engine: PlainEngine, request: Asked) -> None:
    """Computes a prompt, and stores it."""
    engine.step({request.request_id: request.num_tokens})
    engine.settle()


def stores(engine: PlainEngine) -> int:
    return sum(len(orders.stores) for orders in engine.orders)


def test_what_was_stored_before_is_not_offered_and_what_is_stored_after_is(
    engine: PlainEngine, blocks: Blocks
) -> None:
    engine.put_prompt(TOKENS)
    assert engine.match(engine.ask("a", TOKENS)) == WHOLE
    before = engine.agreement.namespaces
    change(engine)
    assert engine.agreement.namespaces != before
    later = engine.ask("b", TOKENS)
    assert engine.match(later) == 0
    computed(engine, later)
    assert engine.match(engine.ask("c", TOKENS)) == WHOLE


def test_a_request_from_before_neither_loads_nor_stores(
    engine: PlainEngine, blocks: Blocks
) -> None:
    engine.put_prompt(TOKENS)
    request = engine.ask("a", TOKENS)
    assert engine.match(request) == WHOLE
    change(engine)
    engine.put_prompt(TOKENS)
    assert engine.match(request) == 0
    computed(engine, request)
    assert stores(engine) == 0


def test_a_request_from_before_promises_nothing(engine: PlainEngine, blocks: Blocks) -> None:
    def promised(name: str) -> int:
        request = engine.ask(name, TOKENS, {REMOTE_DECODE: True})
        engine.match(request)
        engine.step({name: request.num_tokens})
        if name == "old":
            change(engine)
        said = engine.half.promise(name)
        assert said is not None
        return int(said["penstock.promise"]["tokens"])

    assert promised("old") == 0
    blocks.empty()
    assert promised("new") == WHOLE


@pytest.mark.parametrize("hit", [BLOCK, WHOLE])
def test_who_hits_the_engines_own_old_blocks_does_not_either_until_they_are_gone(
    hit: int, engine: PlainEngine, blocks: Blocks
) -> None:
    change(engine)
    engine.put_prompt(TOKENS)
    hits = engine.ask("a", TOKENS)
    assert engine.match(hits, hit) == 0
    computed(engine, hits)
    assert stores(engine) == 0
    blocks.empty()
    assert engine.match(engine.ask("b", TOKENS), BLOCK) == WHOLE - BLOCK


def test_a_request_that_begins_anew_after_the_reset_is_like_any_other(
    engine: PlainEngine, blocks: Blocks
) -> None:
    request = engine.ask("a", TOKENS)
    engine.match(request)
    engine.step({"a": 2 * BLOCK})
    engine.settle()
    change(engine)
    engine.put_prompt(TOKENS)
    # Still with old blocks: preempted, and not yet reset.
    engine.step({}, preempted=["a"])
    assert engine.match(request) == 0
    blocks.empty()
    engine.step({}, preempted=["a"])
    assert engine.match(request) == WHOLE


def test_a_store_from_before_says_nothing_of_the_new_weights(
    engine: PlainEngine, blocks: Blocks
) -> None:
    request = engine.ask("a", TOKENS)
    engine.match(request)
    engine.step({"a": request.num_tokens})
    (store,) = (part.job.job for part in engine.parts)
    change(engine)
    engine._tell(WorkerReport(released={store: 1}))
    engine._tell(WorkerReport(stored={store: 1}))
    engine.parts.clear()
    assert engine.match(engine.ask("b", TOKENS)) == 0


def test_host_memory_of_other_weights_does_not_count(engine: PlainEngine, blocks: Blocks) -> None:
    def held(weights: int) -> WorkerReport:
        request = Asked("", list(TOKENS), len(TOKENS))
        request.hash_blocks()
        changes = b"".join(bytes([0, 0, 1]) + bytes(5) + name for name in engine.names(request, 0))
        return WorkerReport(held=changes, weights=weights)

    engine._tell(held(0))
    assert engine.match(engine.ask("a", TOKENS)) == WHOLE
    change(engine)
    assert engine.match(engine.ask("b", TOKENS)) == 0
    engine._tell(held(0))
    assert engine.match(engine.ask("c", TOKENS)) == 0
    engine._tell(held(engine.half._weights.count))
    assert engine.match(engine.ask("d", TOKENS)) == WHOLE


def test_each_change_of_each_worker_counts_once(engine: PlainEngine, blocks: Blocks) -> None:
    seen: list[Any] = []
    for worker, count, is_news in (
        ("one", 1, True),
        ("one", 1, False),
        ("other", 1, True),
        ("one", 2, True),
        ("other", 1, False),
    ):
        before = engine.agreement.namespaces
        change(engine, count, worker)
        assert (engine.agreement.namespaces != before) is is_news
        seen.append(engine.agreement.namespaces)
    assert len(set(seen)) == 3


def test_of_two_ranks_reports_the_one_of_the_newer_weights_counts() -> None:
    old, new = WorkerReport(held=b"old", weights=1), WorkerReport(held=b"new", weights=2)
    assert WorkerReport(held=b"old", weights=1).merge(new).held == b"new"
    assert WorkerReport(held=b"new", weights=2).merge(old).held == b"new"
    assert WorkerReport(held=b"a", weights=2).merge(new).held == b"anew"
    assert WorkerReport(weights=2).is_empty()


def test_who_has_images_does_not_either_until_what_was_made_of_images_is_forgotten(
    engine: PlainEngine, blocks: Blocks
) -> None:
    change(engine)
    engine.put_prompt(TOKENS)
    blocks.empty()
    seen = engine.ask("a", TOKENS, has_images=True)
    assert engine.match(seen) == 0
    computed(engine, seen)
    assert stores(engine) == 0
    # A prompt of text alone may, unless it comes to the blocks of one with images.
    assert engine.match(engine.ask("b", TOKENS)) == WHOLE
    assert engine.match(engine.ask("c", TOKENS), BLOCK) == 0
    engine.half.on_encoder_reset()
    assert engine.match(engine.ask("d", TOKENS, has_images=True), BLOCK) == 0
    blocks.empty()
    assert engine.match(engine.ask("e", TOKENS, has_images=True), BLOCK) == WHOLE - BLOCK


def test_an_engine_whose_weights_never_changed_has_nothing_old_of_images(
    engine: PlainEngine, blocks: Blocks
) -> None:
    engine.put_prompt(TOKENS)
    assert engine.match(engine.ask("a", TOKENS, has_images=True)) == WHOLE
