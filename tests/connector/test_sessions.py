"""Sessions (vLLM's streaming input): a request goes on after its answer, without the answer's last
token. A hash that has this token is another one then."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from penstock.vllm.compat.versions import installed
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
    state = State("mamba2", (), (), "", "cpu")
    assert is_private(PlainEngine([replace(FULL, kind="mamba", state=state)]))


def test_sessions_of_engines_that_leave_wrong_hashes_are_not_shared() -> None:
    assert not is_private(PlainEngine([FULL]))
    assert is_private(PlainEngine([FULL], names_sessions_anew=False))


def test_nothing_is_asked_of_the_pool_for_what_is_not_shared() -> None:
    for names_anew, lookups in ((True, 1), (False, 0)):
        engine = PlainEngine([FULL], names_sessions_anew=names_anew)
        engine.match(engine.ask("session", [*PROMPT, 8, 9], resumable=True))
        assert (engine.half.take_counts() or {}).get("lookups", 0) == lookups


def test_a_session_whose_hashes_leave_out_what_was_said_first_is_not_shared() -> None:
    engine = PlainEngine([FULL])
    # No block of it was full, so none has a name yet.
    request = engine.ask("session", PROMPT[:2], resumable=True)
    engine.match(request)
    engine.step({"session": 2})
    engine.step({}, preempted=["session"])
    # As vLLM 0.32 does once its last output comes then: it computes another prompt than it hashes.
    said = list(range(51, 61))
    request.tokens[:] = said
    request.num_prompt_tokens = 2 + len(said)
    request.hash_blocks()
    engine.put_prompt(said)
    assert engine.match(request) == 0
    before = stored(engine)
    engine.step({"session": len(said)})
    assert stored(engine) == before


def is_private(engine: PlainEngine) -> bool:
    request = engine.ask("session", PROMPT, resumable=True)
    assert engine.match(request) == 0
    sharing, state = engine.half._storing._sharing, engine.half._requests["session"]
    assert sharing.may_load(state) == sharing.may_store(state)
    return not sharing.may_store(state)


SAID = [51, 52, 53, 54, 55]


def asked(tokens: list[int]) -> Any:
    """A session of vLLM's."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    return Request(
        "session",
        tokens,
        SamplingParams(max_tokens=1),
        None,
        block_hasher=get_request_block_hasher(HASH_TOKENS, sha256),
        resumable=True,
    )


def gone_on(session: Any) -> Any:
    """The session, in which `SAID` was said after an answer."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import StreamingUpdate

    scheduler = SimpleNamespace(hash_block_size=HASH_TOKENS, log_stats=False)
    update = StreamingUpdate.from_request(asked(list(SAID)))
    Scheduler._update_request_as_session(scheduler, session, update)
    return session


def test_what_vllm_hashes_of_a_preempted_session_is_all_or_can_be_told() -> None:
    session = asked(list(PROMPT))
    session.append_output_token_ids(8)
    assert session.num_computed_tokens == 0
    gone_on(session)
    is_whole = list(session.all_token_ids) == PROMPT + SAID
    assert is_whole == (session.num_tokens >= session.num_prompt_tokens)


def test_vllm_takes_hashes_away_in_place() -> None:
    session = asked(list(PROMPT))
    session.append_output_token_ids(8)
    session.num_computed_tokens = len(PROMPT)
    hashes, before = session.block_hashes, list(session.block_hashes)
    gone_on(session)
    assert session.resumable
    assert session.block_hashes is hashes
    assert len(hashes) == 3
    assert hashes[0] == before[0]
    # Before 0.32, vLLM leaves the hash of the block that lost a token.
    assert (hashes[1] != before[1]) == installed().NAMES_SESSIONS_ANEW
