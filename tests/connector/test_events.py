"""What the scheduler half tells routers of the pool, without vLLM."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lab.waiting import LIMIT, eventually
from penstock.vllm.groups import Group
from penstock.vllm.scheduler import events
from penstock.vllm.scheduler.events import Removed, Stored
from tests.connector.engine import Asked, PlainEngine

FULL = Group(0, "full_attention", 4, None, "bfloat16", ())
COARSE = Group(1, "full_attention", 8, None, "bfloat16", ())

PROMPT = list(range(100, 121))
"""Five blocks and a token."""


def announcing(*groups: Group, **more: Any) -> PlainEngine:
    return PlainEngine(groups or [FULL], announces=True, **more)


def compute(engine: PlainEngine, name: str = "r", tokens: list[int] = PROMPT) -> Asked:
    """Has a request computed, and its stores begun."""
    request = engine.ask(name, tokens)
    assert engine.match(request) is not None
    engine.step({name: len(tokens)})
    return request


def taken_until(engine: PlainEngine, is_there: Callable[[list[Any]], bool]) -> list[Any]:
    """Events of steps until something is among them."""
    found: list[Any] = []

    def has_come() -> bool:
        engine.step({})
        found.extend(engine.half.take_events())
        return is_there(found)

    eventually(has_come, lambda: found, pause=0.001)
    return found


def test_blocks_are_announced_once_all_ranks_have_stored_them() -> None:
    engine = announcing(ranks=2)
    request = compute(engine)
    [first, second] = engine.parts
    engine.end(first)
    assert engine.half.take_events() == []
    engine.end(second)
    hashes = tuple(request.block_hashes)
    assert engine.half.take_events() == [Stored(request, FULL, hashes, None, 0)]
    assert engine.half.take_events() == []


def test_what_was_not_stored_is_not_announced() -> None:
    engine = announcing()
    request = compute(engine)
    engine.end(engine.parts[0], missing=[2])
    one, two, _, four, five = request.block_hashes
    assert engine.half.take_events() == [
        Stored(request, FULL, (one, two), None, 0),
        Stored(request, FULL, (four, five), request.block_hashes[2], 12),
    ]


def test_each_group_has_its_own() -> None:
    engine = announcing(FULL, COARSE)
    request = compute(engine, tokens=PROMPT[:17])
    engine.settle()
    told = engine.half.take_events()
    hashes = request.block_hashes
    assert Stored(request, FULL, tuple(hashes), None, 0) in told
    assert Stored(request, COARSE, (hashes[1], hashes[3]), None, 0) in told
    assert len(told) == 2


def test_what_a_load_does_not_find_is_gone() -> None:
    engine = announcing()
    request = compute(engine)
    engine.settle()
    engine.half.take_events()
    again = engine.ask("again", PROMPT)
    assert engine.match(again) == 20
    engine.load(again, 0, 20)
    engine.step({})
    [part] = engine.parts
    engine.end(part, missing=[1, 3])
    gone = request.block_hashes[1], request.block_hashes[3]
    assert engine.half.take_events() == [Removed(FULL, gone)]


def test_what_a_pool_evicts_is_told_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: now))
    engine = announcing(event_check=30.0)
    request = compute(engine)
    engine.settle()
    engine.half.take_events()
    store = engine.half._store
    gone = request.block_hashes[3:]
    for block_hash in gone:
        assert store.remove(list(engine.keys((0, block_hash))), timeout=LIMIT)
    engine.step({})
    assert not engine.half._events._asked
    now += 31.0
    assert taken_until(engine, bool) == [Removed(FULL, tuple(gone))]
    # The others are there, and are asked for again only later.
    assert len(engine.half._events) == 3
    engine.step({})
    assert not engine.half._events._asked


def test_no_more_are_vouched_for_than_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MOST_WATCHED", 7)
    engine = announcing()
    first = compute(engine)
    engine.settle()
    second = compute(engine, "s", [token + 1000 for token in PROMPT])
    engine.settle()
    told = engine.half.take_events()
    assert Stored(second, FULL, tuple(second.block_hashes), None, 0) in told
    assert told[-1] == Removed(FULL, tuple(first.block_hashes[:3]))


def documented(salt: str, key: str) -> str:
    """What docs/guides/routing.md has routers compute."""
    text = b"penstock event salt 1\n" + salt.encode()
    return "salt-" + hmac.new(key.encode(), text, hashlib.sha256).hexdigest()[:32]


@pytest.mark.parametrize("key", ["", "a key that engines and routers share"])
def test_in_place_of_a_salt_stands_what_tells_it_from_others(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_EVENT_KEY", key)
    shown = []
    for salt in (b"red's secret", b"red's secret", b"blue's secret"):
        engine = announcing()
        request = engine.ask("r", PROMPT, salt=salt)
        assert engine.match(request) is not None
        engine.step({"r": len(PROMPT)})
        engine.settle()
        [told] = engine.half.take_events()
        shown.append(told.salt)
    assert shown == [documented(name, key) for name in ("red's secret",) * 2 + ("blue's secret",)]
    assert documented("red's secret", "another key") not in shown


def test_without_events_nothing_is_kept() -> None:
    engine = PlainEngine([FULL])
    compute(engine)
    engine.settle()
    assert engine.half.take_events() == []
    assert all(store.blocks is None for store in engine.half._stores._under_way.values())
