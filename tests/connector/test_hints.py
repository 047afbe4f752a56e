"""Hints, without vLLM: what is kept, let go and prefetched, for whom, and what is refused."""

from __future__ import annotations

import json
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.waiting import LIMIT, eventually
from penstock.errors import ConfigError
from penstock.vllm import compat
from penstock.vllm.groups import Group
from penstock.vllm.scheduler import keeping, next_prompts, refusals
from tests.connector.engine import Asked, PlainEngine
from tests.connector.test_scheduler import (
    COARSE,
    FULL,
    PROMPT,
    WINDOW,
    Schedule,
    computed,
    engines,
)

RED, BLUE = {"penstock.tenant": "red"}, {"penstock.tenant": "blue"}
KEEP, LET_GO, PREFETCH = "penstock.keep", "penstock.let_go", "penstock.prefetch"

OTHER = list(range(200, 221))


class Hinted(PlainEngine):
    """An engine whose counts are added up."""

    def __init__(self, groups: Sequence[Group] = (FULL,), **more: Any) -> None:
        super().__init__(groups, **more)
        self.counted: Counter[str] = Counter()

    def count(self, name: str) -> int:
        for key, value in (self.half.take_counts() or {}).items():
            if not isinstance(value, list):
                self.counted[key] += int(value)
        return self.counted[name]

    def until(self, holds: Callable[[], bool]) -> None:
        eventually(holds, lambda: self.counted, pause=0.002)

    @property
    def kept(self) -> int:
        return self.half._keeping.keeper.stats()["kept"]

    def there(self, request: Asked, tenant: str = "", group: int = 0) -> list[bool]:
        """Which of the request's blocks the pool has."""
        store = self.half._store
        return [
            all(store.contains(list(self.keys((group, name), tenant)), timeout=LIMIT))
            for name in self.names(request, group)
        ]

    def serve(self, name: str, tokens: list[int], params: Any = None, **more: Any) -> Asked:
        """Computes a request from beginning to end."""
        request = self.ask(name, tokens, params, **more)
        assert self.match(request) is not None
        computed(self, request)
        # A prefetch that is under way names blocks, too.
        self.settle()
        self.finish(request)
        self.settle()
        return request


def test_kept_blocks_are_touched_until_their_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeping, "_TOUCHES_EVERY", 0.01)
    engine = Hinted([FULL, COARSE])
    engine.serve("r", PROMPT, {KEEP: 5.0})
    # What can be loaded is a whole number of blocks in both groups: four of one, two of the other.
    engine.until(lambda: engine.count("touched_blocks") > 3 * 6)
    assert engine.kept == 6
    assert engine.count("keep_hints") == 1
    engine.until(lambda: engine.kept == 0)
    engine.half.shutdown()


def test_of_a_window_only_what_a_load_needs_is_kept() -> None:
    engine = Hinted([FULL, WINDOW])
    engine.serve("r", PROMPT, {KEEP: 60})
    # Five blocks, and the last two of the group with a window.
    engine.until(lambda: engine.kept == 7)


def test_the_limit_of_the_engine_counts_not_the_clients() -> None:
    engine = Hinted(keep_limit=3.0)
    engine.serve("r", PROMPT, {KEEP: 1e9})
    engine.until(lambda: engine.kept == 5)
    engine.until(lambda: engine.kept == 0)


def test_one_tenant_has_its_share_and_others_have_theirs() -> None:
    # A block takes 1024 bytes and what a value has besides. Ten blocks are a share.
    share = 10.5 * (1024 + 64 + 256) / (64 << 20)
    engine = Hinted(keep_share=2.4 * share, keep_share_of_one=share)
    for n in range(4):
        tokens = list(range(100 * n, 100 * n + 21))
        engine.serve(f"red {n}", tokens, {**RED, KEEP: 60}, salt=b"salt")
    engine.until(lambda: engine.count("keep_refused_blocks") == 10)
    assert engine.kept == 10
    engine.serve("blue", PROMPT, {**BLUE, KEEP: 60}, salt=b"salt")
    engine.until(lambda: engine.kept == 15)
    # A salt without a name is somebody, too; and so are all others together.
    engine.serve("salted", OTHER, {KEEP: 60}, salt=b"its own")
    engine.until(lambda: engine.kept == 20)
    engine.serve("nobody", OTHER[1:], {KEEP: 60})
    engine.until(lambda: engine.kept == 25)
    for n in range(2):
        engine.serve(f"late {n}", [n] * 21, {**BLUE, KEEP: 60}, salt=b"salt")
    engine.until(lambda: engine.count("keep_refused_blocks") == 20)


def test_what_is_let_go_is_not_stored_and_what_was_stored_is_removed() -> None:
    engine = Hinted([FULL, COARSE])
    first = engine.serve("first", PROMPT)
    assert engine.there(first) == [True] * 5
    # The next turn: it keeps the first block. The second block has its tenth token.
    again = engine.ask("again", [*PROMPT, *range(30)], {LET_GO: 9})
    engine.match(again)
    assert computed(engine, again) == []
    engine.settle()
    engine.finish(again)
    engine.until(lambda: engine.count("let_go_blocks") == 4)
    assert engine.there(again) == [True, True, *[False] * 11]
    assert engine.there(again, group=1) == [True, *[False] * 5]
    # Nobody believes that they are there.
    assert engine.match(engine.ask("third", PROMPT)) == 8


def test_others_blocks_are_not_let_go() -> None:
    engine = Hinted()
    salts = {"red": b"salt", "blue": b"salt"}
    for name, salt in salts.items():
        engine.serve(name, PROMPT, {"penstock.tenant": name}, salt=salt)
    everybodys = engine.serve("everybody", PROMPT)
    # Put by another engine.
    engine.put_prompt(OTHER)
    # Still being computed, here.
    running = engine.ask("running", [*PROMPT[:9], 7])
    engine.serve("red goes", PROMPT, {**RED, LET_GO: True}, salt=b"salt")
    engine.until(lambda: engine.count("let_go_blocks") == 5)
    assert engine.there(everybodys, "red") == [False] * 5
    assert engine.there(everybodys, "blue") == [True] * 5
    assert engine.there(everybodys) == [True] * 5
    other = engine.serve("other goes", OTHER, {LET_GO: True})
    engine.serve("everybody goes", PROMPT, {LET_GO: True})
    engine.until(lambda: engine.count("let_go_blocks") == 8)
    assert engine.there(other) == [True] * 5
    assert engine.there(running) == [True, True]
    assert engine.there(everybodys) == [True, True, False, False, False]


def test_what_is_let_go_is_kept_no_more() -> None:
    engine = Hinted()
    engine.serve("r", PROMPT, {KEEP: 60})
    engine.until(lambda: engine.kept == 5)
    engine.serve("again", PROMPT, {KEEP: 60, LET_GO: 8})
    engine.until(lambda: engine.kept == 2)


def prefetched(engine: Hinted) -> list[Any]:
    """The jobs that the next steps order for a prompt that comes next."""
    jobs: list[Any] = []

    def ordered() -> bool:
        jobs.extend(engine.step({}).prefetches)
        return not engine.half._next_prompts.waits

    engine.until(ordered)
    return jobs


def test_a_prompt_that_comes_next_is_fetched_for_its_owner() -> None:
    engine = Hinted(has_hashes=True)
    engine.put_prompt(OTHER, tenant="red")
    engine.put_prompt(OTHER[:8])
    engine.ask("red", PROMPT, {**RED, PREFETCH: OTHER}, salt=b"salt")
    [job] = prefetched(engine)
    assert (job.tenant, job.salt, len(job.blocks)) == ("red", b"salt", 5)
    [part] = engine.parts
    engine.end(part)
    assert engine.step({}).release == [job.job]
    # A name without a salt owns nothing: it gets what everybody shares.
    engine.ask("everybody", PROMPT, {**RED, PREFETCH: OTHER})
    [job] = prefetched(engine)
    assert (job.tenant, job.salt, len(job.blocks)) == ("", b"", 2)
    engine.settle()
    assert engine.count("prefetch_hints") == 2
    # Of the prompts, only those blocks are remembered that the pool has.
    assert len(engine.half._catalogue) == 5 + 5 + 5 + 2


def test_prompts_that_come_next_take_half_the_room_one_at_a_time() -> None:
    engine = Hinted(has_hashes=True)
    # 64 blocks are in host memory; half of them may be prefetched.
    tokens = list(range(200, 200 + 4 * 40))
    engine.put_prompt(tokens)
    engine.put_prompt(OTHER)
    engine.ask("r", PROMPT, {PREFETCH: tokens})
    engine.ask("s", PROMPT, {PREFETCH: OTHER})
    jobs: list[Any] = []
    engine.until(lambda: bool(jobs) or bool(jobs.extend(engine.step({}).prefetches)))
    assert [len(job.blocks) for job in jobs] == [16]
    [other] = engine.half._next_prompts._prompts

    def is_answered() -> bool:
        assert not engine.step({}).prefetches
        return other.is_asked and not engine.half._lookups.is_asked(other.name)

    engine.until(is_answered)
    # What the pool has of the other one is known, and yet it is not brought.
    assert not engine.step({}).prefetches
    engine.settle()
    assert [len(job.blocks) for job in prefetched(engine)] == [5]
    engine.settle()


def test_what_host_memory_has_is_not_fetched() -> None:
    engine = Hinted(has_hashes=True)
    engine.put_prompt(OTHER)
    ahead = Asked("", OTHER, len(OTHER))
    ahead.hash_blocks()
    for chunk in engine.names(ahead, 0):
        engine.half._catalogue.change_host(b"\0\0\1" + bytes(5) + chunk)
    engine.ask("r", PROMPT, {PREFETCH: OTHER})
    assert prefetched(engine) == []


@pytest.mark.parametrize(
    "params",
    [
        {KEEP: "60"},
        {KEEP: True},
        {KEEP: 0},
        {KEEP: -1},
        {KEEP: float("nan")},
        {KEEP: float("inf")},
        {KEEP: [60]},
        {LET_GO: -1},
        {LET_GO: 3.5},
        {LET_GO: "all"},
        {LET_GO: True, "do_remote_decode": True},
        {PREFETCH: True},
        {PREFETCH: []},
        {PREFETCH: "next"},
        {PREFETCH: [1] * 300_000},
        {PREFETCH: [1, "2", 3, 4, 5]},
        {PREFETCH: [True, 1, 2, 3, 4]},
        {PREFETCH: [1, -2, 3, 4, 5]},
        {PREFETCH: OTHER, "penstock.load_policy": "never"},
    ],
)
def test_a_wrong_hint_is_told_once_and_the_request_is_served(
    params: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    refusals.warn.cache_clear()
    engine = Hinted(has_hashes=True)
    with caplog.at_level(logging.WARNING):
        for name in ("one", "two"):
            request = engine.serve(name, [*PROMPT, len(name)], params)
            prefetched(engine)
            engine.settle()
    assert engine.there(request)[:5] == [True] * 5
    assert engine.count("hints_refused") == 2
    told = [record for record in caplog.records if "hint" in record.message]
    assert len(told) == 1
    assert engine.half._keeping._keeper is None


def test_numbers_of_any_size_are_numbers() -> None:
    engine = Hinted(keep_limit=60)
    request = engine.serve("r", PROMPT, {KEEP: 10**400, LET_GO: 10**400})
    engine.until(lambda: engine.kept == 5)
    assert engine.there(request)[:5] == [True] * 5
    engine.serve("s", OTHER, {KEEP: 1e-300})
    assert engine.count("keep_hints") == 2
    assert engine.count("hints_refused") == 0


def test_a_prompt_that_cannot_be_hashed_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(request: Asked, tokens: list[int]) -> list[bytes]:
        raise UnicodeEncodeError("utf-8", "a salt", 0, 1, "no text")

    monkeypatch.setattr("tests.connector.engine.hashes_of", fail)
    engine = Hinted(has_hashes=True)
    engine.serve("r", PROMPT, {PREFETCH: OTHER})
    assert prefetched(engine) == []
    assert engine.count("hints_refused") == 1


def test_too_many_prompts_of_one_tenant_are_refused() -> None:
    engine = Hinted(has_hashes=True)
    for n in range(next_prompts._MOST_PROMPTS_OF_ONE + 3):
        engine.ask(f"red {n}", PROMPT, {**RED, PREFETCH: OTHER}, salt=b"salt")
    assert engine.count("hints_refused") == 3
    engine.ask("blue", PROMPT, {**BLUE, PREFETCH: OTHER}, salt=b"salt")
    assert engine.count("hints_refused") == 3


def test_what_an_engine_does_not_do_is_refused() -> None:
    keeps_nothing = Hinted(keep_share=0.0)
    keeps_nothing.serve("r", PROMPT, {KEEP: 60})
    assert keeps_nothing.count("hints_refused") == 1
    loads_nothing = Hinted(role="kv_producer", has_hashes=True)
    loads_nothing.serve("r", PROMPT, {PREFETCH: OTHER, KEEP: 60})
    assert loads_nothing.count("hints_refused") == 1
    loads_nothing.until(lambda: loads_nothing.kept == 5)


def test_without_hints_there_is_no_thread() -> None:
    engine = Hinted()
    engine.serve("r", PROMPT, {**RED, "penstock.load_policy": "always", LET_GO: False})
    assert engine.half._keeping._keeper is None
    assert engine.half._next_prompts._hashing is None


def test_hints_that_an_orchestrator_attaches_count_and_the_clients_count_more() -> None:
    def action(name: str, value: Any, version: str = "1") -> Any:
        return SimpleNamespace(action_type=name, action_version=version, payload={"value": value})

    actions = [
        action(KEEP, 60),
        action(LET_GO, 0, version="2"),
        action("another.hint", 1),
        SimpleNamespace(action_type=PREFETCH, action_version="1", payload={}),
    ]
    request = SimpleNamespace(kv_hints=SimpleNamespace(actions=actions))
    assert compat.kv_hints(request) == {KEEP: 60, PREFETCH: None}
    assert compat.kv_hints(SimpleNamespace()) is None
    engine = Hinted()
    engine.serve("r", PROMPT, hints={KEEP: 60})
    engine.until(lambda: engine.kept == 5)
    engine.serve("s", OTHER, {KEEP: -1}, hints={KEEP: 60})
    assert engine.count("hints_refused") == 1


def test_shares_are_checked() -> None:
    from penstock.vllm.settings import Settings

    extra = {"penstock.pool": "memory://"}
    for name in ("keep_share", "keep_share_of_one"):
        for wrong in (-0.1, 1.1, "much"):
            with pytest.raises(ConfigError, match=name):
                Settings.parse({**extra, f"penstock.{name}": wrong})


class HintedSchedule(Schedule):
    """A random schedule of requests with hints."""

    def __init__(self, engine: PlainEngine, chance: random.Random) -> None:
        super().__init__(engine, chance)
        self.limits: dict[str, int] = {}
        """Request → the tokens that it does not let go."""

    def params(self, tokens: list[int]) -> dict[str, Any]:
        params: dict[str, Any] = {}
        if self.chance.random() < 0.4:
            params[KEEP] = self.chance.choice([0.001, 60, -1])
        if self.chance.random() < 0.4:
            limit = self.chance.randrange(30)
            params[LET_GO] = limit or True
            self.limits[f"r{self.numbers}"] = limit
        if self.chance.random() < 0.4:
            params[PREFETCH] = [*tokens[: self.chance.randrange(1, 17)], *tokens[::-1]]
        return params

    def stored_tokens(self, request: Asked) -> int:
        limit = self.limits.get(request.request_id, request.num_computed_tokens)
        return min(limit, request.num_computed_tokens)

    def check_unstored(self) -> None:
        """Of a request that lets go of its end, nothing of the end was stored for it."""
        for orders in self.engine.orders:
            for job in orders.stores:
                limit = self.limits.get(job.request_id)
                for group, first in job.blocks.places if limit is not None else ():
                    assert first + self.engine.groups[group].block_size <= limit


@settings(max_examples=100)
@given(engines(has_hashes=True), st.integers(0, 1 << 32), st.integers(5, 60))
def test_random_schedules_with_hints_leave_nothing_behind(
    engine: PlainEngine, seed: int, moves: int
) -> None:
    schedule = HintedSchedule(engine, random.Random(seed))
    schedule.play(moves)
    schedule.check_unstored()

    def none_waits() -> bool:
        engine.step({})
        engine.settle()
        return not engine.half._next_prompts.waits

    eventually(none_waits, pause=0.0)
    engine.step({})
    engine.settle()
    assert engine.half._requests == {}
    assert engine.half._catalogue.prefetched == 0
    assert engine.half._prefetches._open == {}
    engine.half.forget_presence()
    assert len(engine.half._catalogue) == 0
    engine.half.shutdown()


def test_the_guides_examples_are_followed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "hints.md").read_text()
    bodies = re.findall(r"-d '(\{.*?\})'", page, re.DOTALL)
    bodies += re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    told = [json.loads(body)["kv_transfer_params"] for body in bodies]
    rows = re.findall(r"^\| `(\"penstock\..*?)` \|", page, re.MULTILINE)
    told += [json.loads(f"{{{row}}}") for row in rows]
    assert {name for params in told for name in params} == {KEEP, LET_GO, PREFETCH}
    engine = Hinted(has_hashes=True)
    for number, params in enumerate(told):
        engine.serve(str(number), PROMPT, params)
    kinds = ("keep_hints", "let_go_hints", "prefetch_hints")
    assert sum(engine.count(kind) for kind in kinds) == len(told) == 7
    assert engine.count("hints_refused") == 0
