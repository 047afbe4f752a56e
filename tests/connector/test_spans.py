"""Spans of the scheduler half, sent by the real SDK to a collector."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.vllm.groups import Group
from penstock.vllm.scheduler.facts import Arrival
from penstock.vllm.scheduler.spans import ATTRIBUTES, LOAD_BEGINS, OUTCOMES, SPAN
from tests.collector import Collector, Received
from tests.connector.engine import Asked, PlainEngine

FULL = Group(0, "full_attention", 4, None, "bfloat16", ())
ROOT = Path(__file__).parents[2]
PROMPT = list(range(100, 121))
"""Five blocks and a token."""

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


def engine(collector: Collector, policy: str = "always") -> PlainEngine:
    return PlainEngine([FULL], policy=policy, otlp_endpoint=collector.url)


def load(engine: PlainEngine, request: Asked) -> None:
    """Takes all of the offer; the load is under way."""
    tokens = engine.match(request)
    assert tokens
    engine.load(request, 0, tokens)
    engine.step({})


def only_span(engine: PlainEngine, collector: Collector) -> Received:
    """What has come once the engine is shut down: one span, with known attributes."""
    engine.half.shutdown()
    [span] = collector.spans(SPAN)
    known = {f"penstock.{name}" for name in ATTRIBUTES}
    assert set(span.attributes) <= known
    assert span.attributes["penstock.outcome"] in OUTCOMES
    return span


def test_a_load_is_a_span_of_the_request_s_trace(collector: Collector) -> None:
    plain = engine(collector)
    plain.put_prompt(PROMPT)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    request = plain.ask("r", PROMPT, {"penstock.tenant": "red"}, headers)
    load(plain, request)
    plain.settle()
    # What it does later is no part of the span.
    request.num_computed_tokens = 20
    plain.step({"r": 1})
    plain.settle()
    plain.finish(request)
    span = only_span(plain, collector)
    assert (span.service, span.name) == ("penstock", "penstock.load")
    assert (span.trace_id, span.parent_id) == (TRACE, PARENT)
    assert span.began < span.events[LOAD_BEGINS] < span.ended
    found = span.attributes
    seconds = (span.ended - span.began) / 1e9
    assert 0 < found.pop("penstock.waited_seconds") <= seconds + 0.01
    assert found == {
        "penstock.request_id": "r",
        "penstock.tenant": "red",
        "penstock.outcome": "loaded",
        "penstock.prompt_tokens": 21,
        "penstock.cached_tokens": 0,
        "penstock.found_tokens": 20,
        "penstock.loaded_tokens": 20,
        "penstock.loaded_blocks": 5,
        "penstock.tier": "pool",
        "penstock.pool_bytes": 5 * 1024,
        "penstock.host_bytes": 0,
        "penstock.load_seconds": 0.001,
    }


def test_without_a_trace_the_span_begins_one(collector: Collector) -> None:
    plain = engine(collector)
    request = plain.ask("r", PROMPT)
    assert plain.match(request) == 0
    plain.step({"r": 21})
    span = only_span(plain, collector)
    assert span.trace_id != TRACE
    assert span.parent_id == ""
    assert span.attributes["penstock.outcome"] == "missed"
    assert span.attributes["penstock.found_tokens"] == 0
    assert "penstock.tenant" not in span.attributes
    assert span.events == {}


def test_what_could_be_loaded_and_is_computed_is_told(collector: Collector) -> None:
    plain = engine(collector, policy="never")
    plain.put_prompt(PROMPT)
    plain.ask("r", PROMPT)
    # This policy waits for no look-up.
    while plain.half._catalogue.is_asked("r"):
        assert plain.half.match("r", 0) == 0
    assert plain.half.match("r", 0) == 0
    plain.step({"r": 21})
    span = only_span(plain, collector)
    assert span.attributes["penstock.outcome"] == "recomputed"
    assert span.attributes["penstock.found_tokens"] == 20


def test_what_is_computed_before_its_look_up_is_answered(collector: Collector) -> None:
    plain = engine(collector)
    request = plain.ask("r", PROMPT)
    assert plain.match(request) == 0
    plain.half._probing.note_unawaited(plain.half._requests["r"], 0)
    plain.step({"r": 21})
    span = only_span(plain, collector)
    assert span.attributes["penstock.outcome"] == "recomputed"
    assert "penstock.found_tokens" not in span.attributes


@pytest.mark.parametrize(
    ("missing", "late", "outcome"),
    [([2], [3, 4], "failed"), ([], [2, 3, 4], "given_up")],
)
def test_a_load_that_did_not_bring_everything_says_why(
    collector: Collector, missing: list[int], late: list[int], outcome: str
) -> None:
    plain = engine(collector)
    plain.put_prompt(PROMPT)
    request = plain.ask("r", PROMPT)
    load(plain, request)
    [part] = plain.parts
    plain.end(part, missing=missing, late=late)
    request.num_computed_tokens = 8
    plain.step({"r": 13})
    span = only_span(plain, collector)
    assert span.attributes["penstock.outcome"] == outcome
    assert span.attributes["penstock.loaded_blocks"] == 2
    assert "penstock.loaded_tokens" not in span.attributes


@pytest.mark.parametrize("is_loading", [False, True])
def test_a_request_that_goes_before_it_is_computed(collector: Collector, is_loading: bool) -> None:
    plain = engine(collector)
    plain.put_prompt(PROMPT)
    request = plain.ask("r", PROMPT)
    if is_loading:
        load(plain, request)
    plain.finish(request)
    plain.settle()
    span = only_span(plain, collector)
    assert span.attributes["penstock.outcome"] == "aborted"
    assert (LOAD_BEGINS in span.events) == is_loading


def test_a_preempted_request_has_a_span_for_each_time(collector: Collector) -> None:
    plain = engine(collector)
    request = plain.ask("r", PROMPT)
    assert plain.match(request) == 0
    plain.step({"r": 21})
    plain.settle()
    plain.step({}, preempted=["r"])
    load(plain, request)
    plain.settle()
    plain.half.shutdown()
    outcomes = [span.attributes["penstock.outcome"] for span in collector.spans(SPAN)]
    assert outcomes == ["missed", "loaded"]


def test_a_request_that_can_load_nothing_has_no_span(collector: Collector) -> None:
    plain = engine(collector)
    short = plain.ask("short", PROMPT[:4])
    whole = Asked("whole", PROMPT, len(PROMPT), skip_reading_prefix_cache=True)
    plain.requests["whole"] = whole
    plain.half.on_new_request(Arrival(whole, None))
    other = plain.ask("other", PROMPT)
    for request in (short, whole, other):
        assert plain.match(request) == 0
    plain.step({"short": 4, "whole": 21, "other": 21})
    assert only_span(plain, collector).attributes["penstock.request_id"] == "other"


@pytest.mark.long
def test_a_collector_that_does_not_answer_is_waited_for_by_nobody(collector: Collector) -> None:
    collector.answers.clear()
    plain = engine(collector)
    # More than the SDK sends at once, and more than it queues.
    for number in range(3_000):
        request = plain.ask(f"r{number}", PROMPT[:6])
        plain.match(request)
        plain.step({f"r{number}": 6})
    plain.half.shutdown()
    assert not collector.answers.is_set()


def test_off_nothing_of_it_is_imported() -> None:
    program = (
        "import sys; from penstock.vllm.groups import Group; "
        "from tests.connector.engine import PlainEngine; "
        "PlainEngine([Group(0, 'full_attention', 4, None, 'bfloat16', ())]); "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, cwd=ROOT)
    assert run.stdout == b"[]\n"


def test_without_the_sdk_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[tracing\]'"):
        PlainEngine([FULL], otlp_endpoint="http://127.0.0.1:4318")
