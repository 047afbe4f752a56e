"""Sessions (vLLM's streaming input): a request goes on after its answer, without the answer's last
token. A hash that has this token is another one then."""

from __future__ import annotations

from dataclasses import replace

from penstock.vllm.groups import State
from tests.connector.engine import HASH_TOKENS, Asked, PlainEngine
from tests.connector.test_scheduler import FULL

PROMPT = [1, 2, 3, 4, 5, 6, 7]
"""With one more token it fills two blocks."""


def begun(engine: PlainEngine) -> Asked:
    """A session whose first answer has one token, which fills the second block."""
    request = engine.ask("session", PROMPT, resumable=True)
    engine.match(request)
    engine.step({"session": len(PROMPT)})
    assert len(request.block_hashes) == 2
    return request


def go_on(request: Asked) -> None:
    """As vLLM's scheduler does when more is said."""
    kept = request.num_tokens - 1
    del request.tokens[kept:]
    del request.block_hashes[kept // HASH_TOKENS :]
    request.tokens += [51, 52, 53, 54, 55]
    request.num_prompt_tokens = len(request.tokens)
    request.hash_blocks()


def stored(engine: PlainEngine) -> bytes:
    return b"".join(job.blocks.encode() for orders in engine.orders for job in orders.stores)


def test_what_is_said_later_is_stored_by_its_own_hashes() -> None:
    engine = PlainEngine([FULL])
    request = begun(engine)
    dropped = request.block_hashes[1]
    go_on(request)
    engine.step({"session": 5})
    assert request.num_computed_tokens == 12
    assert len(request.block_hashes) == 3
    assert all(block_hash in stored(engine) for block_hash in request.block_hashes)
    assert dropped not in stored(engine)


def test_nothing_is_shared_once_a_hash_that_was_handed_over_has_changed() -> None:
    engine = PlainEngine([FULL])
    request = begun(engine)
    # It is preempted, and looked up again with the answer's token in its hashes.
    engine.put_prompt(request.tokens)
    engine.step({}, preempted=["session"])
    engine.match(request)
    go_on(request)
    assert engine.match(request) == 0
    before = stored(engine)
    engine.step({"session": 12})
    assert stored(engine) == before
    assert not engine.finish(request)


def test_states_of_a_session_are_not_shared() -> None:
    engine = PlainEngine([replace(FULL, kind="mamba", state=State("mamba2", (), (), "", "cpu"))])
    request = engine.ask("session", PROMPT, resumable=True)
    assert engine.match(request) == 0
    assert not engine.half._storing._sharing.may_store(engine.half._requests["session"])
