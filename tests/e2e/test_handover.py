"""A prefill engine computes prompts, a decode engine goes on with them: same tokens, and the decode
engine loads what the prefill engine has stored, whichever way a proxy asks."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lab.engines.node import ANSWER_TIMEOUT, Answer, Node
from lab.network import LIMIT
from lab.waiting import eventually
from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.stored import all_stored
from tests.e2e.test_parallel import TOPOLOGIES

pytestmark = pytest.mark.e2e

LENGTHS = (20, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1, 15 * BLOCK + 100)
"""Prompts without a whole block, around a block's border, and of several steps."""

STANDS_STILL = "the engine stands still in the middle of a prompt"

TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What serial proxies send to the prefill engine, as vLLM's toy_proxy_server.py does."""


def serial(prefill: Node, decode: Node, prompt: list[int]) -> Answer:
    """The decode engine gets what the prefill engine's answer says."""
    first = prefill.ask(prompt, max_tokens=1, params=dict(TO_PREFILL))
    assert first.params is not None
    assert first.params["do_remote_prefill"] is True
    return decode.ask(prompt, params=first.params)


def blind(prefill: Node, decode: Node, prompt: list[int]) -> Answer:
    """Only the engines' roles tell, as with vLLM's disagg_proxy_demo.py."""
    prefill.ask(prompt, max_tokens=1)
    return decode.ask(prompt)


def concurrent(prefill: Node, decode: Node, prompt: list[int]) -> Answer:
    """Both get the prompt at once, the decode engine first, as with Mooncake's proxy."""
    answer = start_first(decode, prompt)
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "x"}
    prefill.ask(prompt, max_tokens=1, params=params)
    return decode.answer(answer)


def start_first(decode: Node, prompt: list[int]) -> int:
    """The decode engine gets an announced prompt, and has begun to wait for its blocks."""
    before = decode.counters().get("handovers", 0)
    answer = decode.start(prompt, params={"do_remote_prefill": True, "transfer_id": "x"})
    if reachable(prompt):
        decode.wait_for("handovers", before + 1, timeout=LIMIT)
    return answer


FAMILIES = (serial, blind, concurrent)


def reachable(prompt: list[int]) -> int:
    """Tokens that an engine takes from another: whole blocks before the last token."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def pair(start: Callable[..., Node], model: Path, pool: str, **options: Any) -> tuple[Node, Node]:
    """A prefill and a decode engine over one pool."""
    return (
        start(model, pool=pool, role="kv_producer", **options),
        start(model, pool=pool, role="kv_consumer", **options),
    )


@pytest.mark.parametrize(
    "any_pool",
    [
        pytest.param("file", marks=pytest.mark.full),
        pytest.param("shm", marks=pytest.mark.soak),
        "valkey-unix",
    ],
    indirect=True,
)
def test_all_families_of_proxies(
    any_pool: str, llama: Path, plain: Node, start: Callable[..., Node]
) -> None:
    settings = {"penstock.handover_timeout": 60.0}
    prefill, decode = pair(start, llama, any_pool, settings=settings)
    seed = zlib.crc32(any_pool.encode())
    with prefill, decode:
        loaded = 0
        for family in FAMILIES:
            for length in LENGTHS:
                seed += 1
                prompt = tokens(length, seed)
                cold, own_hit = plain.ask(prompt), plain.ask(prompt)
                answer = family(prefill, decode, prompt)
                assert answer.tokens == cold.tokens
                assert answer.text == own_hit.text
                loaded += reachable(prompt)
                # vLLM shows a serial proxy's client what the prefill engine had cached, so only
                # the counters tell what was loaded.
                decode.wait_for("loaded_tokens", loaded, timeout=LIMIT)
        seen = decode.counters()
        assert seen["loaded_tokens"] == loaded
        assert seen.get("stored_blocks", 0) == 0
        assert seen.get("handovers_given_up", 0) == 0
        assert seen.get("load_failed_blocks", 0) == 0
        # The same prompt again: a prefill engine computes it, though the pool has it.
        prefill.forget()
        assert prefill.ask(prompt, max_tokens=1).cached == 0
        assert prefill.counters().get("loads", 0) == 0


@pytest.mark.parametrize("topology", ["tp2", pytest.param("pp2-2", marks=pytest.mark.full)])
def test_a_prefill_engine_of_another_topology(
    topology: str, llama: Path, plain: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    """Both cut their objects in the same way, whatever their ranks hold."""
    args, env = TOPOLOGIES[topology]
    common: dict[str, Any] = {
        "pool": f"file://{tmp_path}/pool?size=1GiB",
        "settings": {"penstock.pool_geometry": "portable", "penstock.handover_timeout": 60.0},
        "distributed_executor_backend": "mp",
    }
    env = env | {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    prefill = start(llama, role="kv_producer", env=env, **common, **args)
    decode = start(llama, role="kv_consumer", env={"VLLM_CPU_OMP_THREADS_BIND": "0"}, **common)
    loaded = 0
    with prefill, decode:
        for number, family in enumerate(FAMILIES):
            prompt = tokens(6 * BLOCK + 30, seed=70_000 + number)
            assert family(prefill, decode, prompt).tokens == plain.ask(prompt).tokens
            loaded += reachable(prompt)
            decode.wait_for("loaded_tokens", loaded, timeout=LIMIT)
        assert decode.counters().get("promises_refused", 0) == 0


@pytest.mark.parametrize(
    ("any_pool", "pairs"),
    [
        pytest.param("file", 1, marks=pytest.mark.full),
        pytest.param("shm", 1, marks=pytest.mark.full),
        pytest.param("valkey-unix", 1, marks=pytest.mark.soak),
        ("valkey-unix", 2),
        pytest.param("file", 2, marks=pytest.mark.soak),
        pytest.param("shm", 2, marks=pytest.mark.soak),
    ],
    indirect=["any_pool"],
)
def test_many_at_once(
    any_pool: str, pairs: int, llama: Path, plain: Node, start: Callable[..., Node]
) -> None:
    """More prompts than the engines can compute at once, by all families of proxies. With two
    engines of each kind, a prompt's engines are any two of them."""
    # Short steps, so that long prompts come in several. And patience: others come first.
    steps = {"max_num_batched_tokens": 4 * BLOCK, "settings": {"penstock.handover_timeout": 60.0}}
    engines = [pair(start, llama, any_pool, **steps) for _ in range(pairs)]
    prompts = [tokens(3 * BLOCK + 17 * n, seed=40_000 + n) for n in range(24)]

    def run(number: int) -> Answer:
        family = FAMILIES[number % len(FAMILIES)]
        prefill, decode = engines[number % pairs][0], engines[number // 5 % pairs][1]
        return family(prefill, decode, prompts[number])

    with contextlib.ExitStack() as running, ThreadPoolExecutor(len(prompts)) as pool:
        for engine in itertools.chain(*engines):
            running.enter_context(engine)
        answers = list(pool.map(run, range(len(prompts))))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == plain.ask(prompt).tokens
        for _, decode in engines:
            # An idle engine reports with its next step.
            decode.ask([7, 8, 9], max_tokens=2)
        seen = [decode.counters() for _, decode in engines]
        assert all(counters["loaded_tokens"] > 0 for counters in seen)
        loaded = sum(counters["loaded_tokens"] for counters in seen)
        assert loaded >= 0.99 * sum(map(reachable, prompts))
        assert sum(counters.get("handovers_given_up", 0) for counters in seen) == 0


def test_a_promise_that_nobody_keeps_costs_the_wait(
    llama: Path, plain: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    pool, other = (f"file://{tmp_path}/{name}?size=1GiB" for name in ("pool", "other"))
    wait = {"penstock.handover_timeout": 2.0}
    prefill = start(llama, pool=other, role="kv_producer")
    decode = start(llama, pool=pool, role="kv_both", settings=wait)
    prompt = tokens(5 * BLOCK, seed=50_000)
    with prefill, decode:
        # Promised truly, but for another pool.
        promise = prefill.ask(prompt, max_tokens=1, params=dict(TO_PREFILL)).params
        answer = decode.ask(prompt, params=promise)
        assert answer.tokens == plain.ask(prompt).tokens
        assert answer.seconds >= 2.0
        decode.wait_for("handovers_given_up", 1, timeout=LIMIT)

        # Nobody waits for what fits neither the prompt nor this engine.
        assert promise is not None
        for name, wrong in (("last", "00" * 32), ("namespaces", ["00" * 16]), ("tokens", -1)):
            prompt = tokens(5 * BLOCK, seed=50_001 + len(name))
            changed = promise["penstock.promise"] | {name: wrong}
            if name != "last":
                changed |= {"last": ""}
            answer = decode.ask(prompt, params={**promise, "penstock.promise": changed})
            assert answer.tokens == plain.ask(prompt).tokens
        counters = decode.counters()
        assert counters["promises_refused"] == 2
        # The one that cannot be read counts as an announcement.
        assert counters["handovers_given_up"] == 2


DYING = 20 * BLOCK
"""Tokens of a prompt that no engine survives which stands still at it."""


def stand_still() -> None:
    """Has the engine never end its first step with a prompt that long.

    Called in a test's engine before it starts; the engine's other processes are forked from it. An
    engine that is to die in the middle of a prompt stands still there until it is killed."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    execute_model = GPUModelRunner.execute_model

    @functools.wraps(execute_model)
    def wrapped(self: Any, scheduler_output: Any, *args: Any, **options: Any) -> Any:
        prompts = [new.prompt_token_ids or () for new in scheduler_output.scheduled_new_reqs]
        if any(len(prompt) == DYING for prompt in prompts):
            print(STANDS_STILL, file=sys.stderr, flush=True)
            threading.Event().wait()
        return execute_model(self, scheduler_output, *args, **options)

    GPUModelRunner.execute_model = wrapped


@pytest.mark.parametrize("stored", [0, 4])
def test_the_prefill_engine_dies(
    stored: int, llama: Path, plain: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    """Before it has computed anything, and when it has stored some blocks of the prompt."""
    url = f"file://{tmp_path}/pool?size=1GiB"
    prefill = start(
        llama,
        pool=url,
        role="kv_producer",
        max_num_batched_tokens=4 * BLOCK,
        prepare="tests.e2e.test_handover:stand_still",
    )
    decode = start(llama, pool=url, role="kv_consumer", settings={"penstock.handover_timeout": 2.0})
    prompt = tokens(DYING, seed=60_000)
    with decode:
        if stored:
            # What stands still stores nothing more, and a step may end before its stores begin. So
            # these blocks are those of an earlier prompt.
            beginning = prompt[: stored * BLOCK]
            prefill.ask(beginning, max_tokens=1)
            all_stored(prefill, stored)
        answer = start_first(decode, prompt)
        prefill.start(prompt, max_tokens=1, params={"do_remote_decode": True})
        eventually(lambda: STANDS_STILL in prefill.log.read_text())
        prefill.kill()
        assert decode.answer(answer).tokens == plain.ask(prompt).tokens
        decode.wait_for("handovers_given_up", 1, timeout=LIMIT)
        assert decode.counters()["lookup_hit_blocks"] >= stored


def test_a_request_that_waits_is_aborted(
    llama: Path, plain: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    pool = f"file://{tmp_path}/pool?size=1GiB"
    # Longer than anything here takes.
    decode = start(llama, pool=pool, settings={"penstock.handover_timeout": 2 * ANSWER_TIMEOUT})
    with decode:
        waits = start_first(decode, tokens(4 * BLOCK, seed=1))
        decode.abort(waits)
        assert decode.answer(waits).finish == "abort"
        prompt = tokens(4 * BLOCK, seed=2)
        assert decode.ask(prompt).tokens == plain.ask(prompt).tokens
        decode.forget(timeout=LIMIT)
