"""Prefill and decode apart: the load, the figures, and the report made of them."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from lab.demo.engine import Counters
from lab.demo.pd import load
from lab.demo.pd.figures import Figures, row
from lab.demo.pd.load import LONGEST, SHORTEST, Prompt, Timed, prompts
from lab.demo.pd.report import render
from lab.demo.pd.systems import Apart, RoundRobin
from lab.demo.program import show_apart
from lab.demo.replay import BLOCK_TOKENS
from lab.models.chat import CONTEXT_TOKENS
from lab.processes import ServerFailed
from penstock.completions import Answer
from tests.clock import Clock
from tests.pictures import faults

STEADY, SLOW = 0.02, 1.5


def timed(number: int, *, pause: float, token: int = 7) -> Timed:
    arrivals = (1.0, 1.0 + STEADY, 1.0 + STEADY + pause)
    prompt = Prompt(number, tuple(range(3 * BLOCK_TOKENS + 1)), 3, number / 2)
    answer = Answer((token, 8, 9), arrivals[0], arrivals[-1], 0, len(prompt.tokens), arrivals)
    return Timed(prompt, number / 2, answer)


def figures(*, token: int = 7, loaded: int = 6 * 3 * BLOCK_TOKENS) -> Figures:
    return Figures(
        row("apart", [[timed(n, pause=STEADY) for n in range(3)]] * 2),
        row("both <alike>", [[timed(n, pause=SLOW, token=token) for n in range(3)]] * 2),
        0.5,
        0.6,
        "valkey://cache.example:6379",
        {"vLLM": "0.32.0"},
        Counters(loaded, loaded * 16384, 0),
    )


def test_no_prompt_shares_a_block_with_another() -> None:
    found = [*prompts(30, 8, 2.0, seed=1), *prompts(30, 8, 2.0, seed=2)]
    assert len({prompt.tokens[:BLOCK_TOKENS] for prompt in found}) == 60
    assert all(SHORTEST <= len(prompt.tokens) < LONGEST < CONTEXT_TOKENS for prompt in found)
    assert found[:30] == prompts(30, 8, 2.0, seed=1)


def test_prompts_come_at_the_rate_that_was_asked_for() -> None:
    last = [prompts(400, 8, rate, seed=3)[-1].at for rate in (1.0, 4.0)]
    assert last[0] == pytest.approx(400, rel=0.2)
    assert last[0] / last[1] == pytest.approx(4.0)


def test_a_prompt_is_sent_at_its_time_whether_or_not_others_are_answered() -> None:
    both = threading.Barrier(2, timeout=120)

    def ask(prompt: Prompt) -> Answer:
        both.wait()
        return Answer((1,), 0.0, 0.0, 0)

    waiting = [Prompt(0, (1,), 1, 0.0), Prompt(1, (1,), 1, 0.05)]
    done: list[int] = []
    answers = load.run(ask, waiting, lambda: done.append(1))
    assert [each.prompt.number for each in answers] == [0, 1]
    assert answers[0].sent >= 0.0
    assert answers[1].sent >= 0.05
    assert len(done) == 2


def test_a_server_that_fails_ends_the_round_at_once() -> None:
    asked = []

    def ask(prompt: Prompt) -> Answer:
        asked.append(prompt.number)
        raise ServerFailed("gone")

    # It would wait for an hour otherwise.
    with pytest.raises(ServerFailed, match="gone"):
        load.run(ask, [Prompt(0, (1,), 1, 0.0), Prompt(1, (1,), 1, 3600.0)], lambda: None)
    assert asked == [0]


class Recorder:
    """Stands where a server does, and notes what it is asked."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.asked: list[tuple[str, Any]] = []
        self._clock = clock

    def prefill(self, prompt: Sequence[int], params: Mapping[str, Any]) -> dict[str, Any]:
        self.asked.append(("prefill", params["do_remote_decode"]))
        assert self._clock is not None
        self._clock.sleep(0.1)
        return {"promise": len(prompt)}

    def complete(
        self, prompt: Sequence[int], max_tokens: int, params: Mapping[str, Any] | None = None
    ) -> Answer:
        self.asked.append(("complete", params))
        return Answer((1, 2), 0.25, 0.5, 0, len(prompt), (0.25, 0.5))


def test_apart_hands_the_promise_on_and_counts_the_whole_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, "lab.demo.pd.systems")
    engines: list[Any] = [Recorder(clock) for _ in range(4)]
    apart = Apart(engines[:2], engines[2:])
    for number in range(3):
        answer = apart.ask(Prompt(number, (1, 2, 3), 2, 0.0))
        assert answer.first_token == pytest.approx(0.35)
        assert answer.first_token - answer.waited == pytest.approx(0.25)
        assert answer.arrivals == pytest.approx((answer.first_token, answer.first_token + 0.25))
        assert answer.seconds == answer.arrivals[-1]
    assert [engine.asked for engine in engines] == [
        [("prefill", True)] * 2,
        [("prefill", True)],
        [("complete", {"promise": 3})] * 2,
        [("complete", {"promise": 3})],
    ]


def test_round_robin_takes_the_servers_in_turn() -> None:
    engines: list[Any] = [Recorder(), Recorder()]
    system = RoundRobin(engines)
    for number in range(3):
        assert system.ask(Prompt(number, (1,), 2, 0.0)).first_token == 0.25
    assert [len(engine.asked) for engine in engines] == [2, 1]


def test_figures_tell_steady_answers_from_those_that_pause() -> None:
    found = figures()
    assert found.failures == ()
    assert found.loaded_share == 1.0
    assert found.apart.between_tokens.p99 == pytest.approx(STEADY)
    assert found.round_robin.between_tokens.p50 == pytest.approx(STEADY)
    assert found.round_robin.between_tokens.p99 == pytest.approx(SLOW)
    assert found.round_robin.longest_gap == pytest.approx(SLOW)
    assert found.apart.share_of_long_gaps(1.0) == 0.0
    assert found.round_robin.share_of_long_gaps(1.0) == 1.0
    first = found.apart.answers[1]
    assert first.gaps[0] == pytest.approx((0.5 + 1.0 + STEADY, STEADY))


def test_a_run_fails_if_an_output_differs_or_nothing_was_loaded() -> None:
    assert "6 of 6 outputs differ" in figures(token=5).failures[0]
    assert figures(loaded=0).failures == ("the decode server loaded nothing",)


def test_json_has_both_systems() -> None:
    told = json.loads(json.dumps(figures().as_json()))
    assert told["systems"]["apart"]["between_tokens_p99"] == pytest.approx(STEADY)
    assert told["systems"]["both <alike>"]["between_tokens_max"] == pytest.approx(SLOW)
    assert told["outputs_equal"] == 6
    assert told["loaded_share"] == 1.0
    assert told["declined_share"] == 0.0
    assert told["late_share"] == 0.0


def test_a_load_that_broke_off_is_told_apart() -> None:
    found = figures()
    blocks = found.loadable_tokens // BLOCK_TOKENS
    moved = Counters(loaded_tokens=found.loadable_tokens // 2, late_blocks=blocks // 2)
    found = replace(found, moved=moved)
    assert found.loaded_share + found.late_share == pytest.approx(1.0, abs=1 / blocks)
    assert "since a load broke off" in render(found)
    assert "since a load broke off" not in render(figures())


@pytest.mark.parametrize("token", [7, 5])
def test_the_report_needs_nothing_else_and_escapes_what_it_shows(token: int) -> None:
    page = render(figures(token=token))
    assert not re.search(r"(src|href)\s*=|@import|url\(|<script|https?://", page)
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) == 3
    style = "".join(re.findall(r"svg text[^{]*\{[^}]*\}", page))
    for drawing in drawings:
        assert faults(drawing, style) == []
    assert "both &lt;alike&gt;" in page
    assert "both <alike>" not in page
    assert ("failed" in page) == (token == 5)


def test_the_table_fits_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=80)
    show_apart(figures(), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "100.0% of the prompts' whole blocks" in text
    assert max(map(len, text.splitlines())) <= 80
