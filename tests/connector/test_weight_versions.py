"""Versions of weights: which namespaces follow from what workers see and updates say."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from lab.waiting import eventually
from penstock.pool.namespace import publish_namespace
from penstock.vllm.groups import Group
from penstock.vllm.messages import ModelShare, ModelShares, RankShare, RankWeights
from penstock.vllm.model_facts import shared_facts
from penstock.vllm.worker import PARTIAL, Reading, Weights
from tests.connector.engine import PlainEngine

FULL = Group(0, "full_attention", 4, None, "bfloat16", ())
TOKENS = range(4 * FULL.block_size + 1)
WHOLE = 4 * FULL.block_size
RANK = (0, 0)


def share(weights: str) -> ModelShare:
    return ModelShare(weights, buffers={"rotary": "same"}, code={})


class Memory:
    """A rank's tensors, of which a sample sees the first."""

    def __init__(self) -> None:
        self.tensors = [0, 0]
        self.is_readable = self.has_files = self.is_whole = True
        self.read_whole = 0

    def read(self, reading: Reading) -> ModelShares | None:
        if not self.is_readable:
            return None
        if reading is Reading.FILES:
            return ModelShares(share(f"files:{self.tensors}")) if self.has_files else None
        told = "" if self.is_whole else PARTIAL
        if reading is Reading.SAMPLE:
            return ModelShares(share(f"{told}sample:{self.tensors[0]}"))
        self.read_whole += 1
        return ModelShares(share(f"{told}tensors:{self.tensors}"))


def begun(memory: Memory) -> tuple[Weights, list[int]]:
    changes: list[int] = []
    weights = Weights(memory.read, lambda: changes.append(1))
    weights.begin(ModelShares(share("files:start")))
    return weights, changes


def now(weights: Weights, version: str = "") -> str:
    told = weights.tell(version, RANK, is_updating=False)
    return "unknown" if told.models is None else told.models.model.weights


class Life(RuleBasedStateMachine):
    """Anything that happens to weights. What is told of them is what they are."""

    @initialize()
    def start(self) -> None:
        self.memory = Memory()
        self.weights, self.seen = begun(self.memory)
        self.was_seen = True
        """Whether all changes were seen that somebody could see."""

    values = st.integers(0, 3)

    @rule(value=values, place=st.integers(0, 1))
    def change(self, value: int, place: int) -> None:
        """By one of vLLM's ways."""
        before = len(self.seen)
        self.weights.note_change()
        self.memory.tensors[place] = value
        self.weights.note_change()
        assert len(self.seen) == before + 2

    @rule(value=values, place=st.integers(0, 1))
    def reload(self, value: int, place: int) -> None:
        """From files, all of them."""
        self.weights.note_change()
        self.memory.tensors[place] = value
        self.weights.note_reload()
        assert now(self.weights) == f"files:{self.memory.tensors}"

    @rule(value=values, place=st.integers(0, 1), fails=st.booleans())
    def call(self, value: int, place: int, fails: bool) -> None:
        """By a method that says nothing."""
        before, tensors = len(self.seen), list(self.memory.tensors)

        def called() -> None:
            self.memory.tensors[place] = value
            if fails:
                raise KeyError

        if fails:
            with pytest.raises(KeyError):
                self.weights.compare(called)
        else:
            self.weights.compare(called)
        assert (len(self.seen) > before) == (self.memory.tensors != tensors)

    @rule(value=values, is_asked=st.booleans())
    def change_unseen(self, value: int, is_asked: bool) -> None:
        """In the process, by nobody's way; then the connector is reset."""
        if is_asked or self.seen:
            now(self.weights)
        before, tensors = len(self.seen), list(self.memory.tensors)
        self.memory.tensors[0] = value
        self.weights.look()
        assert (len(self.seen) > before) == (self.memory.tensors != tensors)

    @rule()
    def tell(self) -> None:
        start = self.memory.tensors == [0, 0]
        told = now(self.weights)
        if start and not self.seen:
            # Nobody has asked for the bytes, so nobody has read them.
            return
        tensors = f"tensors:{self.memory.tensors}"
        # Nobody has written since, or just the same. What they were at the start is not known if
        # the first change was not seen.
        files = f"files:{self.memory.tensors}"
        assert told in (tensors, files, *(["files:start"] if start else []))

    @rule(version=st.sampled_from(["one", "two"]))
    def tell_named(self, version: str) -> None:
        told = now(self.weights, version)
        named = f"version:{version}:sample:{self.memory.tensors[0]}"
        # A name alone says nothing of weights that are known to be those of the start.
        start = self.memory.tensors == [0, 0] and not self.seen
        assert told in (named, *(["files:start"] if start else []))

    @precondition(lambda self: self.seen)
    @rule()
    def is_read_once(self) -> None:
        now(self.weights)
        before = self.memory.read_whole
        now(self.weights)
        assert self.memory.read_whole == before


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_weights_that_cannot_be_read_are_taken_for_changed_and_are_unknown() -> None:
    memory = Memory()
    weights, seen = begun(memory)
    memory.is_readable = False
    weights.compare(lambda: None)
    assert seen
    assert now(weights) == now(weights, "named") == "unknown"
    memory.is_readable = True
    assert now(weights) == "tensors:[0, 0]", "nobody knows what they were"


def test_weights_that_are_not_among_the_tensors_are_known_by_their_files_alone() -> None:
    memory = Memory()
    memory.is_whole = False
    weights, seen = begun(memory)
    weights.compare(lambda: None)
    assert not seen, "what can be seen has not changed"
    weights.note_change()
    assert now(weights) == now(weights, "named") == "unknown"
    weights.note_reload()
    assert now(weights) == "files:[0, 0]"
    memory.has_files = False
    assert now(weights) == "files:[0, 0]", "they have come"
    weights.note_reload()
    assert now(weights) == "unknown"


def test_nothing_is_read_while_an_update_goes_on() -> None:
    memory = Memory()
    weights, _ = begun(memory)
    weights.note_change()
    before = memory.read_whole
    assert weights.tell("", RANK, is_updating=True).models is None
    assert memory.read_whole == before


def test_weights_that_were_known_by_their_tensors_are_known_again() -> None:
    memory = Memory()
    weights = Weights(memory.read, lambda: None)
    weights.begin(ModelShares(share("tensors:[0, 0]")))
    for value, expected in ((1, "tensors:[1, 0]"), (0, "tensors:[0, 0]")):
        weights.note_change()
        memory.tensors[0] = value
        weights.note_change()
        assert now(weights) == expected


@pytest.mark.parametrize(
    ("model", "draft"),
    [("tensors:m", "files:d"), ("files:m", "tensors:d"), ("tensors:m", "tensors:d")],
)
def test_the_start_is_known_again_whatever_of_it_came_from_files(model: str, draft: str) -> None:
    tensors = ["m", "d"]

    def read(reading: Reading) -> ModelShares | None:
        kind = "sample" if reading is Reading.SAMPLE else "tensors"
        return ModelShares(*(share(f"{kind}:{each}") for each in tensors))

    weights = Weights(read, lambda: None)
    start = ModelShares(share(model), share(draft))
    weights.begin(start)
    for place in (0, 1):
        was = tensors[place]
        weights.note_change()
        tensors[place] = "other"
        weights.note_change()
        assert weights.tell("", RANK, is_updating=False).models == read(Reading.WHOLE) != start
        weights.note_change()
        tensors[place] = was
        weights.note_change()
        assert weights.tell("", RANK, is_updating=False).models == start


def test_after_sleep_a_name_alone_says_nothing() -> None:
    memory = Memory()
    weights, seen = begun(memory)
    weights.note_sleep()
    assert seen
    assert now(weights, "v") == now(weights) == "files:start"
    # What nobody saw is a change as any other.
    weights.note_sleep()
    memory.tensors[1] = 1
    assert now(weights, "v") == "version:v:sample:0"
    memory.tensors[1] = 0
    weights.note_change()
    # The same weights, by an update that calls them so.
    assert now(weights, "v") == "version:v:sample:0"
    weights.note_sleep()
    assert now(weights, "v") == "version:v:sample:0"


def test_an_identity_that_users_give_stands_for_its_files_after_a_reload_too() -> None:
    memory = Memory()
    weights = Weights(memory.read, lambda: None)
    weights.begin(ModelShares(share("id:ours")))
    weights.note_change()
    weights.note_reload()
    assert now(weights) == "id:ours"
    weights.note_change()
    memory.tensors[1] = 1
    weights.note_reload()
    assert now(weights) == "files:[0, 1]"
    memory.is_whole = False
    weights.note_reload()
    assert now(weights) == "files:[0, 1]", "what cannot be read is known by its files"


def test_a_named_version_is_named_on_all_ranks_together() -> None:
    def weights(*told: str) -> str:
        found = shared_facts({(0, rank): share(each) for rank, each in enumerate(told)})["weights"]
        assert isinstance(found, str)
        return found

    one = weights("version:step:7:sample:a", "version:step:7:sample:b")
    assert one.startswith("version:step:7:")
    assert len({one, weights("version:step:7:sample:a", "version:step:7:sample:c")}) == 2
    assert weights("version:step:7:sample:a").startswith("version:step:7:")
    # Ranks that were told different names have no name.
    assert weights("version:a:sample:a", "version:b:sample:a").startswith("tensors:")
    assert weights("tensors:a", "files:b").startswith("tensors:")
    assert weights("files:b", "files:b") == "files:b"


@pytest.fixture
def engines(tmp_path: Path) -> Callable[..., PlainEngine]:
    """Starts engines over one pool."""
    return functools.partial(PlainEngine, [FULL], pool=f"file://{tmp_path}/pool?size=64MiB")


def told(count: int, weights: str | None) -> list[RankWeights]:
    models = None if weights is None else ModelShares(share(weights))
    return [RankWeights("worker", count, RANK, models)]


def updated(engine: PlainEngine, weights: str | None, *, count: int, name: str = "") -> None:
    """The weights change, and what they are is asked as vLLM's engine does."""
    versions = engine.half.versions
    versions.on_changed({"worker": count})
    if name:
        versions.on_named(name)
    assert versions.asks
    assert versions.name == name
    versions.on_told(told(count, weights))
    assert not versions.asks


def test_engines_with_the_same_new_weights_share_and_others_do_not(
    engines: Callable[..., PlainEngine],
) -> None:
    one, other, old = engines(), engines(), engines()
    start = one.agreement.namespaces
    for engine in (one, other):
        updated(engine, "tensors:new", count=1)
    assert one.agreement.namespaces == other.agreement.namespaces != start
    assert old.agreement.namespaces == start
    one.put_prompt(TOKENS)
    assert other.match(other.ask("a", TOKENS)) == WHOLE
    assert old.match(old.ask("a", TOKENS)) == 0
    # Back: what the pool had is found again.
    updated(one, "files:start", count=2)
    back = one.agreement.namespaces
    updated(one, "tensors:new", count=3)
    updated(one, "files:start", count=4)
    assert one.agreement.namespaces == back
    assert one.match(one.ask("b", TOKENS)) == 0


def test_weights_that_nobody_can_tell_are_of_one_engine_alone(
    engines: Callable[..., PlainEngine],
) -> None:
    one, other = engines(), engines()
    for engine in (one, other):
        updated(engine, None, count=1)
    assert one.agreement.namespaces != other.agreement.namespaces


def test_a_name_that_comes_late_is_the_name(engines: Callable[..., PlainEngine]) -> None:
    one, other = engines(), engines()
    updated(one, "version:v:sample:a", count=1, name="v")
    # A request came between the update's end and its name.
    updated(other, "tensors:new", count=1)
    request = other.ask("a", TOKENS)
    assert one.agreement.namespaces != other.agreement.namespaces
    other.half.versions.on_named("v")
    assert other.half.versions.asks
    other.half.versions.on_told(told(1, "version:v:sample:a"))
    assert one.agreement.namespaces == other.agreement.namespaces
    # The request was computed with these weights, so its blocks are stored under their name.
    other.match(request)
    other.step({"a": request.num_tokens})
    other.settle()
    assert one.match(one.ask("a", TOKENS)) == WHOLE


def test_a_name_without_a_change_says_nothing(engines: Callable[..., PlainEngine]) -> None:
    engine = engines()
    before = engine.agreement.namespaces
    engine.half.versions.on_named("v")
    assert not engine.half.versions.asks
    assert engine.agreement.namespaces == before


def test_a_name_is_gone_with_the_next_change(engines: Callable[..., PlainEngine]) -> None:
    engine = engines()
    updated(engine, "version:v:sample:a", count=1, name="v")
    updated(engine, "tensors:new", count=2)
    assert engine.half.versions.name == ""


def test_what_comes_while_an_update_goes_on_neither_loads_nor_stores(
    engines: Callable[..., PlainEngine],
) -> None:
    engine = engines()
    versions = engine.half.versions
    versions.on_changed({"worker": 1})
    versions.on_update(is_under_way=True)
    assert not versions.asks
    engine.put_prompt(TOKENS)
    request = engine.ask("a", TOKENS)
    assert engine.match(request) == 0
    engine.step({"a": request.num_tokens})
    engine.settle()
    assert not any(orders.stores for orders in engine.orders)
    versions.on_changed({"worker": 2})
    versions.on_update(is_under_way=False)
    assert versions.asks


def test_what_ranks_hold_is_told_once(engines: Callable[..., PlainEngine]) -> None:
    # vLLM collects it again after sleep, from workers whose weights have changed since the start.
    engine = engines()
    updated(engine, "tensors:new", count=1)
    before = engine.agreement.namespaces
    held = RankShare((0, 2, 0, 1), 100, (None,), 64, 64, models=ModelShares(share("files:start")))
    engine.half.accept_shares({RANK: held})
    assert engine.agreement.namespaces == before


def test_a_worker_that_saw_more_is_believed(engines: Callable[..., PlainEngine]) -> None:
    engine = engines()
    engine.half.versions.on_changed({"worker": 1})
    engine.half.versions.on_told(told(3, "tensors:new"))
    assert not engine.half.versions.asks
    engine.half.versions.on_changed({"worker": 3})
    assert not engine.half.versions.asks, "it is no news"


def test_kv_is_kept_on_purpose_by_those_who_say_so(engines: Callable[..., PlainEngine]) -> None:
    kept, other = engines(weight_updates="keep"), engines()
    assert kept.agreement.namespaces != other.agreement.namespaces
    kept.put_prompt(TOKENS)
    kept.half.versions.on_changed({"worker": 1})
    assert not kept.half.versions.asks
    assert kept.match(kept.ask("a", TOKENS)) == WHOLE
    counts = kept.half.take_counts() or {}
    assert (counts["weight_changes"], counts["kept_weight_changes"]) == (1, 1)
    assert other.match(other.ask("a", TOKENS)) == 0


def test_what_is_left_is_dropped_by_those_who_say_so(
    engines: Callable[..., PlainEngine],
) -> None:
    engine, other = engines(weight_updates="drop"), engines()
    engine.put_prompt(TOKENS)
    (namespace,) = engine.agreement.namespaces
    publish_namespace(engine.half._store, namespace, {"model": "m"})
    updated(engine, "tensors:new", count=1)
    engine.put_prompt(TOKENS)

    def is_gone() -> bool:
        return not engine.half._store.list(namespace, timeout=5)

    eventually(is_gone, "the namespace of the weights before is removed")
    counts: dict[str, object] = {}

    def is_counted() -> bool:
        counts.update(engine.half.take_counts() or {})
        return counts.get("dropped_namespaces") == 1

    eventually(is_counted, "the removal is counted")
    assert engine.match(engine.ask("a", TOKENS)) == WHOLE
    assert other.match(other.ask("a", TOKENS)) == 0
