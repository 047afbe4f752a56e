"""Models in which some layers keep a state instead of each token's KV: short convolutions, gated
delta net, Mamba-2, beside attention. A hit needs the state at its end, and no other."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.engines.node import Answer, Node
from lab.models.hybrids import HYBRIDS, Hybrid
from lab.waiting import eventually
from tests.e2e.conftest import tokens
from tests.servers import Server

pytestmark = pytest.mark.e2e


# Nemotron-H has layers of the same kinds as Granite.
PARAMETERS = [
    pytest.param(name, marks=pytest.mark.soak) if name == "nemotron_h" else name for name in HYBRIDS
]


@pytest.fixture(scope="module", params=PARAMETERS)
def hybrid(request: pytest.FixtureRequest) -> Hybrid:
    return HYBRIDS[request.param]


@pytest.fixture(scope="module")
def model(hybrid: Hybrid, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hybrid.saved(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def alone(hybrid: Hybrid, model: Path, start: Callable[..., Node]) -> Node:
    """vLLM without Penstock. It keeps the states at the ends of all blocks, not only of prompts."""
    return start(model, prefix_cache_retention_interval=None, **hybrid.engine)


def own_hit(alone: Node, prompt: list[int], count: int, answers: int = 8) -> Answer:
    """The answer after a hit of `count` tokens in vLLM's own prefix cache."""
    alone.forget()
    if count:
        alone.ask(prompt[: count + 1], max_tokens=1)
    answer = alone.ask(prompt, max_tokens=answers)
    assert answer.cached == count
    return answer


def within(prompt: list[int], block: int) -> int:
    """The tokens of a prompt that can be loaded: whole blocks before the last token."""
    return (len(prompt) - 1) // block * block


def reach(node: Node, prompt: list[int]) -> int:
    """How many tokens of a prompt the pool has, as an engine finds that has none of them."""
    node.forget()
    return node.ask(prompt).cached


def test_another_process_goes_on_from_the_state(
    hybrid: Hybrid, model: Path, alone: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    block = hybrid.block
    lengths = (4 * block + 30, 3 * block, 2 * block + 1, 3 * block - 1, block // 2)
    prompts = [tokens(length, seed=length) for length in lengths]
    with Server("valkey", tmp_path) as server:
        with start(model, pool=server.unix_url, **hybrid.engine) as first:
            for prompt in prompts:
                eventually(
                    lambda prompt=prompt: reach(first, prompt) == within(prompt, block),
                    first.counters,
                    pause=0.2,
                )
        with start(model, pool=server.unix_url, **hybrid.engine) as second:
            for prompt in prompts:
                expected = within(prompt, block)
                before = second.counters().get("loaded_tokens", 0)
                answer = second.ask(prompt)
                assert answer.cached == expected
                assert second.counters().get("loaded_tokens", 0) - before == expected
                assert answer.text == own_hit(alone, prompt, expected).text
            assert second.counters().get("load_failed_blocks", 0) == 0


def test_a_conversation_goes_on_after_its_answer(
    hybrid: Hybrid, model: Path, alone: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    """A state that the answer's own tokens have left is stored too."""
    block = hybrid.block
    pool = f"file://{tmp_path}/pool?size=1GiB"
    prompt = tokens(2 * block - 20, seed=5)
    with start(model, pool=pool, **hybrid.engine) as node:
        said = node.ask(prompt, max_tokens=30)
        # Of each group: a block of the prompt, and the one that the answer has filled.
        node.wait_for("stored_blocks", 2 * hybrid.groups)
        node.forget()
        turn = [*prompt, *said.tokens, *tokens(40, seed=6)]
        answer = node.ask(turn)
        assert answer.cached == 2 * block
    # Kernels for one token and for many differ: so here, too, the state comes from the answer.
    alone.forget()
    assert alone.ask(prompt, max_tokens=30).text == said.text
    own = alone.ask(turn)
    assert own.cached == 2 * block
    assert answer.text == own.text


def test_without_its_state_a_prompt_is_computed(
    hybrid: Hybrid, model: Path, alone: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    """Prompts that share a beginning, but not to where a state was kept, do not hit."""
    block = hybrid.block
    folder = tmp_path / "pool"
    prompt = tokens(3 * block + 9, seed=7)
    with start(model, pool=f"file://{folder}?size=1GiB", **hybrid.engine) as node:
        node.ask(prompt)
        node.wait_for("stored_blocks", 3 + 1)
        node.forget()
        sibling = prompt[: block + 40] + tokens(2 * block, seed=8)
        answer = node.ask(sibling)
        assert answer.cached in (0, block)
        assert answer.text == own_hit(alone, sibling, answer.cached).text
        # Of the last states one is enough to lose.
        states = sorted(files(folder), key=lambda path: path.stat().st_size)
        size = states[0].stat().st_size
        for path in states:
            if path.stat().st_size == size:
                path.unlink()
        node.forget()
        answer = node.ask(prompt)
        assert answer.cached % block == 0
        assert answer.text == own_hit(alone, prompt, answer.cached).text


@pytest.mark.parametrize("hybrid", ["lfm2"], indirect=True)
@pytest.mark.parametrize(("writer", "reader"), [("LBHNC", "BLHNC"), ("BLHNC", "LBHNC")])
def test_layouts_share(
    hybrid: Hybrid,
    model: Path,
    alone: Node,
    start: Callable[..., Node],
    tmp_path: Path,
    writer: str,
    reader: str,
) -> None:
    """Whatever the layout of writer and reader. vLLM alone has LBHNC."""
    pool = f"file://{tmp_path}/pool?size=1GiB"
    prompt = tokens(3 * hybrid.block + 20, seed=12)
    expected = own_hit(alone, prompt, 3 * hybrid.block)
    with start(model, pool=pool, settings={"penstock.kv_layout": writer}, **hybrid.engine) as first:
        first.ask(prompt)
        eventually(lambda: reach(first, prompt) == 3 * hybrid.block, first.counters, pause=0.2)
        assert f"KV layout {writer}" in first.log.read_text()
        first.forget()
        assert first.ask(prompt).text == expected.text
    with start(
        model, pool=pool, settings={"penstock.kv_layout": reader}, **hybrid.engine
    ) as second:
        loaded = second.ask(prompt)
        assert loaded.cached == second.counters()["loaded_tokens"] == 3 * hybrid.block
        assert loaded.text == expected.text
        assert f"KV layout {reader}" in second.log.read_text()


def files(folder: Path) -> list[Path]:
    """The files of all values that are longer than a description."""
    found = []
    for path in folder.rglob("*"):
        # An engine may evict it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and path.stat().st_size > 2000:
                found.append(path)
    return found


@pytest.mark.parametrize(
    "hybrid", ["lfm2", pytest.param("qwen3_next", marks=pytest.mark.full)], indirect=True
)
def test_whatever_happens_tokens_are_those_of_a_hit(
    hybrid: Hybrid, model: Path, alone: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    """Preemption, aborts, damage, divergent prompts, evictions and restarts, at random."""
    block = hybrid.block
    rng = random.Random(11)
    roots = [tokens(3 * block, seed=100 + number) for number in range(3)]
    folder = tmp_path / "pool"
    # Room for about ten prompts: the pool evicts all the time.
    pool = f"file://{folder}?size=12MiB"
    options = {
        **hybrid.engine,
        "kv_cache_memory_bytes": 20 * hybrid.block_bytes,
        "max_model_len": 6 * block,
    }
    loaded, preempted = 0.0, 0.0
    for _ in range(2):
        with start(model, pool=pool, **options) as node:
            for _ in range(6):
                # More than there is room for at once. What they store is what is loaded below.
                beside = [node.start(_prompt(rng, roots, block), block) for _ in range(4)]
                time.sleep(rng.uniform(0.0, 0.5))
                node.abort(beside[rng.randrange(4)])
                for number in beside:
                    node.answer(number)
                if rng.random() < 0.3:
                    for path in rng.sample(found := files(folder), len(found) // 2):
                        damage(path)
                node.forget()
                prompt = _prompt(rng, roots, block)
                answer = node.ask(prompt)
                own = own_hit(alone, prompt, answer.cached)
                # What is loaded was computed in a batch with others, so it is rounded differently.
                # With a wrong state, nothing would be near.
                assert answer.tokens[0] == own.tokens[0]
                assert abs(answer.logprobs[0] - own.logprobs[0]) < 0.05
            counters = node.counters()
            loaded += counters.get("loaded_tokens", 0)
            preempted += counters["num_preemptions"]
    assert loaded > 0
    print(f"{loaded:.0f} tokens loaded, {preempted:.0f} preemptions")
    assert preempted > 0


def _prompt(rng: random.Random, roots: list[list[int]], block: int) -> list[int]:
    """A prompt that shares some blocks with others."""
    shared = rng.choice(roots)[: rng.choice([1, 2, 3]) * block]
    return shared + tokens(rng.randrange(1, block), seed=rng.randrange(50))


def damage(path: Path) -> None:
    """Changes a bit of a value, if it is still there."""
    with contextlib.suppress(FileNotFoundError):
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)


def test_each_tensor_parallel_rank_has_its_part(start: Callable[..., Node], tmp_path: Path) -> None:
    hybrid = HYBRIDS["granite_hybrid"]
    model = hybrid.saved(tmp_path / "model")
    pool = f"file://{tmp_path}/pool?size=1GiB"
    ranks = {"tensor_parallel_size": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
    prompt = tokens(3 * hybrid.block + 20, seed=4)
    with start(model, pool=pool, **hybrid.engine, **ranks) as first:
        first.ask(prompt)
        own = first.ask(prompt)
        eventually(lambda: reach(first, prompt) == 3 * hybrid.block, first.counters, pause=0.2)
    with start(model, pool=pool, **hybrid.engine, **ranks) as second:
        loaded = second.ask(prompt)
        assert loaded.cached == own.cached == 3 * hybrid.block
        assert loaded.text == own.text
        assert second.counters()["loaded_tokens"] == 3 * hybrid.block
    with start(model, pool=pool, **hybrid.engine) as alone:
        assert alone.ask(prompt).cached == 0
