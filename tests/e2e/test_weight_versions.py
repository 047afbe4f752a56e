"""Weights that change while engines run, by whatever way, and what engines with the same weights
share then."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab.engines.node import Node
from lab.engines.trainer import LIVE, PUSHED, push
from lab.models import attention
from lab.models.saved import changed
from lab.waiting import eventually
from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.stored import all_stored

pytestmark = pytest.mark.e2e

Start = Callable[..., Node]

FOUND = 4 * BLOCK
ELEMENTS = (40.0, -40.0)
"""What one element of some thousands is set to."""
TWO_RANKS = {"tensor_parallel_size": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}


def prompt(number: int) -> list[int]:
    """A prompt of four whole blocks and some tokens."""
    return tokens(FOUND + 5, seed=number)


@dataclass(frozen=True)
class Weights:
    """A model's folder, and what one element was set to since."""

    model: Path
    element: float | None = None

    def put(
        self, node: Node, *, name: str | None = None, pushed: bool = False, in_place: bool = False
    ) -> None:
        """Brings an engine there. A trainer's push is `in_place` if requests run."""
        if pushed:
            push(node, self.model, in_place=in_place)
        else:
            node.call("reload_weights", weights_path=str(self.model))
        self.put_element(node)
        if name is not None:
            node.set_weight_version(name)

    def put_element(self, node: Node) -> None:
        """Sets the element alone, in the middle of a tensor: the keys of a layer depend on it."""
        if self.element is not None:
            name = "model.layers.1.self_attn.qkv_proj.weight"
            node.call("set_element", name=name, place=[150, 77], value=self.element)


class Truth:
    """What vLLM alone says, from an empty cache, under any weights. Each is asked once."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._weights: Weights | None = None
        self._said: dict[tuple[Weights, int, int], tuple[int, ...]] = {}

    def __call__(self, weights: Weights, number: int, count: int = 8) -> tuple[int, ...]:
        """So many tokens behind a prompt."""
        key = weights, number, count
        if key not in self._said:
            if weights != self._weights:
                weights.put(self._node)
                self._weights = weights
            self._node.forget()
            self._said[key] = self._node.ask(prompt(number), count).tokens
        return self._said[key]


@pytest.fixture(scope="module")
def old(llama: Path) -> Weights:
    return Weights(llama)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """The same model with other weights."""
    return Weights(attention.llama(tmp_path_factory.mktemp("new"), seed=1))


@pytest.fixture(scope="module")
def third(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """And with others again."""
    return Weights(attention.llama(tmp_path_factory.mktemp("third"), seed=2))


@pytest.fixture(scope="module")
def truth(llama: Path, start: Start) -> Truth:
    return Truth(start(llama, **LIVE))


@pytest.fixture(scope="module")
def four(llama: Path, start: Start, tmp_path_factory: pytest.TempPathFactory) -> list[Node]:
    """Four engines on one pool. What weights they have is left by the test before."""
    pool = f"file://{tmp_path_factory.mktemp('four')}/pool?size=1GiB"
    settings = [{"penstock.host_tier": kept} for kept in (True, True, False, False)]
    return [start(llama, pool=pool, settings=each, ready=False, **PUSHED) for each in settings]


@pytest.fixture
def fleet(four: list[Node], old: Weights) -> Iterator[list[Node]]:
    """The four engines, with the old weights."""
    for node in four:
        node.wait_ready()
        old.put(node, name="old")
        node.forget()
    return four


def asked(node: Node, number: int) -> tuple[int, tuple[int, ...]]:
    """What an engine has of a prompt from the pool, and what it says. If it has nothing, the pool
    has the prompt then."""
    node.forget()
    before = node.counters()
    answer = node.ask(prompt(number))
    if answer.cached == 0:
        all_stored(node, 4, since=before)
    return answer.cached, answer.tokens


@pytest.mark.parametrize("ranks", [{}, TWO_RANKS], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("pushed", [False, True], ids=["reloaded", "pushed"])
def test_engines_with_the_same_new_weights_share(
    pushed: bool,
    ranks: dict[str, Any],
    tmp_path: Path,
    llama: Path,
    old: Weights,
    new: Weights,
    truth: Truth,
    start: Start,
) -> None:
    """One engine goes on, and back, while the other still has the old weights. Then the other
    follows, and goes back too. What trainers push they name."""
    options = {"pool": f"file://{tmp_path}/pool?size=1GiB", **(PUSHED if pushed else LIVE), **ranks}
    names = {old: "step 0", new: "step 1"} if pushed else {}

    def change(node: Node, weights: Weights) -> None:
        weights.put(node, name=names.get(weights), pushed=pushed)

    assert truth(old, 1) != truth(new, 1), "the weights matter"
    with start(llama, **options) as one, start(llama, **options) as other:
        if pushed:
            for node in (one, other):
                change(node, old)
        assert asked(one, 1) == (0, truth(old, 1))
        change(one, new)
        for number in (1, 2):
            assert asked(one, number) == (0, truth(new, number))
        # Who has the old weights keeps what is of them, and sees nothing else.
        assert asked(other, 1) == (FOUND, truth(old, 1))
        for number in (2, 3):
            assert asked(other, number) == (0, truth(old, number))
        change(one, old)
        for number in (1, 2, 3):
            assert asked(one, number) == (FOUND, truth(old, number))
        assert asked(one, 4) == (0, truth(old, 4))
        assert asked(other, 4) == (FOUND, truth(old, 4))
        for node in (one, other):
            change(node, new)
            for number in (1, 2):
                assert asked(node, number) == (FOUND, truth(new, number))
        assert asked(other, 3) == (0, truth(new, 3))
        assert asked(one, 3) == (FOUND, truth(new, 3))
        change(other, old)
        for number in (1, 2, 3, 4):
            assert asked(other, number) == (FOUND, truth(old, number))


def test_weights_that_a_kernel_keeps_in_its_own_form(
    tmp_path: Path, llama: Path, plain: Node, start: Start
) -> None:
    """vLLM packs weights for a CPU's kernels, and empties their tensors. All that it still shows
    of these three models is equal."""
    others = [
        changed(tmp_path / weight, llama, f"model.layers.1.{weight}.weight", lambda t: t.neg_())
        for weight in ("mlp.down_proj", "self_attn.k_proj")
    ]
    pool = f"file://{tmp_path}/pool?size=1GiB"
    right = []
    for model in others:
        with start(model) as alone:
            right.append([alone.ask(prompt(number)).tokens for number in (1, 2)])
    was = [plain.ask(prompt(number)).tokens for number in (1, 2)]
    assert was != right[0] != right[1] != was, "the weights matter"
    with start(llama, pool=pool) as one, start(llama, pool=pool) as second:
        assert asked(one, 1) == (0, was[0])
        one.call("reload_weights", weights_path=str(others[0]))
        assert asked(one, 1) == (0, right[0][0])
        assert asked(one, 2) == (0, right[0][1])
        assert asked(second, 1) == (FOUND, was[0])
        assert asked(second, 2) == (0, was[1])
        second.call("reload_weights", weights_path=str(others[1]))
        assert asked(second, 1) == (0, right[1][0])
        assert asked(second, 2) == (0, right[1][1])


def test_engines_share_by_name(fleet: list[Node], new: Weights, truth: Truth) -> None:
    one, other, third, _ = fleet
    for node in (one, other, third):
        new.put(node, name="another" if node is third else "new", pushed=True)
    assert asked(one, 20) == (0, truth(new, 20))
    assert asked(other, 20) == (FOUND, truth(new, 20))
    # Another name may miss.
    assert asked(third, 20) in [(cached, truth(new, 20)) for cached in (0, FOUND)]


Change = Callable[[Any], object]


def _first(tensor: Any) -> None:
    tensor.view(-1)[0] += 1


CHANGES: list[tuple[str, Change]] = [
    ("model.layers.0.input_layernorm.weight", _first),
    ("model.layers.0.self_attn.q_proj.weight", _first),
    ("model.layers.2.mlp.down_proj.weight", _first),
    # vLLM puts these into a tensor with others: in the middle, and at the end.
    ("model.layers.0.self_attn.k_proj.weight", lambda tensor: tensor.neg_()),
    ("model.layers.3.mlp.up_proj.weight", lambda tensor: tensor.neg_()),
]


@pytest.mark.parametrize("case", range(len(CHANGES)), ids=[name for name, _ in CHANGES])
def test_the_same_name_over_other_weights(
    case: int, tmp_path: Path, fleet: list[Node], new: Weights, truth: Truth
) -> None:
    one, other, third, _ = fleet
    false = Weights(changed(tmp_path / "false", new.model, *CHANGES[case]))
    first, second = 30 + case, 40 + case
    new.put(one, name="step", pushed=True)
    assert asked(one, first) == (0, truth(new, first))
    false.put(other, name="step", pushed=True)
    assert asked(other, first) == (0, truth(false, first))
    # The other way round, by another way.
    assert asked(other, second) == (0, truth(false, second))
    new.put(third, name="step")
    assert asked(third, second) == (0, truth(new, second))


@pytest.mark.parametrize("way", ["one element", "reloaded"])
def test_a_name_says_nothing_of_weights_that_come_after_it(
    way: str, fleet: list[Node], new: Weights, truth: Truth
) -> None:
    """vLLM keeps the name until somebody gives another."""
    one, other, *_ = fleet
    first, second = (50, 51) if way == "reloaded" else (52, 53)
    after = Weights(new.model, ELEMENTS[0])
    assert truth(after, first) != truth(new, first), "the element matters"
    for node in (one, other):
        new.put(node, name="named", pushed=True)
    assert asked(one, first) == (0, truth(new, first))
    if way == "reloaded":
        after.put(other)
    else:
        after.put_element(other)
    assert asked(other, first) == (0, truth(after, first))
    assert asked(other, second) == (0, truth(after, second))
    assert asked(one, second) == (0, truth(new, second))


def test_what_is_computed_during_an_update_is_of_no_weights(
    fleet: list[Node], old: Weights, new: Weights, truth: Truth
) -> None:
    """Tensors change in place, chunk by chunk, and requests run between them."""
    one, other, *_ = fleet
    assert asked(other, 60) == (0, truth(old, 60))
    before = one.counters()
    between: list[int] = []
    running: list[int] = []

    def compute() -> None:
        # What is new, what was asked before, and what the pool has under the old weights.
        between.append(70 + len(between))
        running.append(one.start(prompt(61), 1000))
        for number in (*between, 60):
            one.ask(prompt(number))

    push(one, new.model, name="in chunks", chunks=4, in_place=True, between=compute)
    for number in running:
        one.abort(number)
    new.put(other, name="in chunks", pushed=True)
    assert asked(one, 62) == (0, truth(new, 62))
    after = one.counters()
    for number in (60, 61, *between):
        for node in (one, other):
            assert asked(node, number)[1] == truth(new, number)
    # Only what was computed with all new weights was stored, and nothing was loaded.
    names = ("stored_blocks", "loaded_tokens")
    assert [after.get(name, 0) - before.get(name, 0) for name in names] == [4, 0]
    assert asked(other, 62) == (FOUND, truth(new, 62))


@pytest.mark.parametrize("clear", [True, False], ids=["cleared", "kept"])
def test_requests_that_an_update_holds(
    clear: bool, fleet: list[Node], old: Weights, new: Weights, truth: Truth
) -> None:
    """A trainer pauses the engine, and lets its requests go on with the new weights."""
    one, other, third, _ = fleet
    numbers = range(80, 84) if clear else range(84, 88)
    held = [one.start(prompt(number), 100) for number in numbers[:2]]
    one.ask(prompt(numbers[2]))
    one.pause(clear=clear)
    waits = one.start(prompt(numbers[3]))
    push(one, new.model, name=f"held, {clear}")
    one.resume()
    for number in held:
        one.answer(number)
    assert one.answer(waits).tokens == truth(new, numbers[3])
    new.put(other, name=f"held, {clear}", pushed=True)
    for number in numbers:
        for node in (one, other):
            assert asked(node, number)[1] == truth(new, number)
        assert asked(third, number)[1] == truth(old, number)


@dataclass(frozen=True)
class Asked:
    """A request under way."""

    request: int
    number: int
    weights: Weights
    is_cached: bool
    """Whether the engine's own cache may have some of it."""
    is_of_one: bool
    """Whether it is of these weights alone, from its first block to its end."""


class History:
    """Updates of engines on one pool, drawn at random, with requests meanwhile. All answers that
    are of one engine's weights are compared with those of vLLM alone."""

    def __init__(
        self, seed: int, nodes: list[Node], weights: list[Weights], truth: Truth, prompts: range
    ) -> None:
        self._draws = random.Random(seed)
        self._nodes, self._all, self._truth, self._prompts = nodes, weights, truth, prompts
        self._has = dict.fromkeys(nodes, weights[0])
        self._seen: dict[Node, set[int]] = {node: set() for node in nodes}
        """Prompts that an engine's own cache may have."""
        self._may_be_old = dict.fromkeys(nodes, False)
        """Whether what an engine's own cache has may be of weights before."""
        self._computed: dict[Node, set[tuple[Weights, int]]] = {node: set() for node in nodes}
        self.log: list[str] = []
        self.compared = self.loaded = self.shared = 0
        """Answers that were compared; those with blocks from the pool; and those of these that the
        engine itself had never been asked for under its weights."""

    def turn(self) -> None:
        """Updates an engine while it and others have requests. Then more are asked."""
        draws = self._draws
        node, *others = draws.sample(self._nodes, 3)
        beside = [(each, self._start(each)) for each in others]
        running = [self._start(node, mixed=True) for _ in range(draws.randrange(3))]
        self._update(node)
        self._may_be_old[node] = True
        reset = draws.choice(("none", "none", "running", "idle"))
        self.log.append(f"  reset: {reset}")
        if reset == "running" and node.reset(running=True, pool=draws.random() < 0.5):
            # What runs begins anew, under the new weights.
            self._seen[node] = {asked.number for asked in running if asked}
            self._may_be_old[node] = False
        for asked in filter(None, running):
            node.answer(asked.request)
        if reset == "idle" or len(self._seen[node]) > len(self._prompts) - 3:
            node.forget()
            self._seen[node].clear()
            self._may_be_old[node] = False
        for each, asked in beside:
            self._compare(each, asked)
        for each in (node, node, *others):
            self._compare(each, self._start(each))

    def _update(self, node: Node) -> None:
        draws, has = self._draws, self._has[node]
        kind = draws.choice(("again", "others", "others", "element"))
        pushed = draws.random() < 0.5
        if kind == "element":
            elements = [each for each in ELEMENTS if each != has.element]
            weights = Weights(has.model, draws.choice(elements))
            weights.put_element(node)
        else:
            weights = has if kind == "again" else draws.choice(self._all)
            weights.put(node, pushed=pushed, in_place=True)
        name = draws.choice((None, None, f"{weights}", f"{weights} {draws.randrange(2)}"))
        if name is not None:
            node.set_weight_version(name)
        self._has[node] = weights
        place = self._nodes.index(node)
        self.log.append(f"{place}: {kind}, pushed: {pushed}, {name=}, {weights}")

    def _start(self, node: Node, *, mixed: bool = False) -> Asked | None:
        """Starts a request, if there is one whose answer can be known. That of a `mixed` one is
        not, as its weights change."""
        may_be_old = self._may_be_old[node] and not mixed
        known = [each for each in self._prompts if not (may_be_old and each in self._seen[node])]
        if not known:
            return None
        number = self._draws.choice(known)
        is_cached = number in self._seen[node]
        self._seen[node].add(number)
        request = node.start(prompt(number), self._draws.choice((2, 8, 24)))
        return Asked(request, number, self._has[node], is_cached, not mixed)

    def _compare(self, node: Node, asked: Asked | None) -> None:
        if asked is None:
            return
        assert asked.weights == self._has[node]
        answer = node.answer(asked.request)
        right = self._truth(asked.weights, asked.number, 24)
        place = self._nodes.index(node)
        said = f"{place} on {asked}: {answer}, not {right}\n" + "\n".join(self.log)
        assert answer.tokens == right[: len(answer.tokens)], said
        self.compared += 1
        key = asked.weights, asked.number
        if answer.cached and not asked.is_cached:
            self.loaded += 1
            self.shared += key not in self._computed[node]
        self._computed[node].add(key)


@pytest.mark.parametrize("updates", [40, pytest.param(200, marks=pytest.mark.full)])
def test_updates_at_random(
    updates: int,
    fleet: list[Node],
    old: Weights,
    new: Weights,
    third: Weights,
    truth: Truth,
) -> None:
    weights = [
        Weights(model, element)
        for model in (old.model, new.model, third.model)
        for element in (None, *ELEMENTS)
    ]
    prompts = range(10 * updates, 10 * updates + 8)
    history = History(11, fleet, weights, truth, prompts)
    for _ in range(updates):
        history.turn()
    assert history.compared > updates
    # At the end all have the same.
    first, *rest = fleet
    for node in fleet:
        weights[-1].put(node)
    assert asked(first, prompts.stop) == (0, truth(weights[-1], prompts.stop))
    for node in rest:
        assert asked(node, prompts.stop) == (FOUND, truth(weights[-1], prompts.stop))
    assert history.shared > 0


def test_a_write_past_vllm_is_seen_with_a_reset(tmp_path: Path, llama: Path, start: Start) -> None:
    flag = tmp_path / "flag"
    pool = f"file://{tmp_path}/pool?size=1GiB"
    with start(llama, pool=pool, **LIVE) as node:
        before = asked(node, 1)
        node.call("negate_when", name="model.embed_tokens.weight", flag=str(flag))
        flag.touch()
        eventually(flag.with_suffix(".done").exists)
        assert node.reset(pool=True)
        cached, right = asked(node, 1)
        assert cached == 0
        assert right != before[1], "the tensor matters"


def test_files_that_are_overwritten_after_a_reload(
    tmp_path: Path,
    llama: Path,
    new: Weights,
    third: Weights,
    truth: Truth,
    start: Start,
) -> None:
    """A trainer saves each checkpoint to the same folder."""
    latest = tmp_path / "latest"
    shutil.copytree(new.model, latest)
    pool = f"file://{tmp_path}/pool?size=1GiB"
    with start(llama, pool=pool, **LIVE) as one, start(llama, pool=pool, **LIVE) as other:
        one.call("reload_weights", weights_path=str(latest))
        # The next checkpoint comes before the next request.
        shutil.copytree(third.model, latest, dirs_exist_ok=True)
        assert asked(one, 1) == (0, truth(new, 1))
        third.put(other)
        assert asked(other, 1) == (0, truth(third, 1))


def test_files_that_have_not_all_weights(
    tmp_path: Path, llama: Path, new: Weights, start: Start
) -> None:
    from safetensors.torch import load_file, save_file

    part = tmp_path / "part"
    shutil.copytree(llama, part)
    (path,) = part.glob("*.safetensors")
    tensors = load_file(path)
    save_file({k: v for k, v in tensors.items() if ".1.mlp" in k}, path, metadata={"format": "pt"})
    pool = f"file://{tmp_path}/pool?size=1GiB"
    with start(llama, pool=pool, **LIVE) as one, start(new.model, pool=pool, **LIVE) as other:
        with start(new.model, **LIVE) as alone:
            alone.call("reload_weights", weights_path=str(part))
            alone.forget()
            right = alone.ask(prompt(1)).tokens
        for node in (one, other):
            node.call("reload_weights", weights_path=str(part))
        assert asked(one, 1)[0] == 0
        assert asked(other, 1) == (0, right)


@pytest.mark.parametrize("ranks", [{}, TWO_RANKS], ids=["one rank", "two ranks"])
def test_shards_of_weights_that_a_kernel_packs(
    ranks: dict[str, Any], tmp_path: Path, llama: Path, start: Start
) -> None:
    """Engines on a CPU whose weights come from sharded checkpoints start."""
    shards = tmp_path / "shards"
    shutil.copytree(llama, shards)
    for path in shards.glob("*.safetensors"):
        path.unlink()
    with start(llama, **LIVE, **ranks) as node:
        node.call("save_sharded_state", path=str(shards))
    with start(
        shards, pool=f"file://{tmp_path}/pool?size=1GiB", load_format="sharded_state", **ranks
    ) as node:
        assert asked(node, 1)[0] == 0
