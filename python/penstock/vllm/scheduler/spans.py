"""Spans: one for each request that looks for its blocks, from its look-up until it is decided what
is loaded and the load is over."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from penstock._native import Blocks
from penstock.vllm.scheduler.requests import LoadSpan, RequestState
from penstock.vllm.tracing import Exporter, Span

SPAN = "penstock.load"
"""The span's name."""

LOAD_BEGINS = "load begins"
"""The event at which a load begins."""

LOADED = "loaded"
MISSED = "missed"
RECOMPUTED = "recomputed"
FAILED = "failed"
GIVEN_UP = "given_up"
ABORTED = "aborted"

OUTCOMES = (LOADED, MISSED, RECOMPUTED, FAILED, GIVEN_UP, ABORTED)
"""What may come of a request that looks for its blocks."""

ATTRIBUTES = (
    "request_id",
    "tenant",
    "outcome",
    "prompt_tokens",
    "waited_seconds",
    "cached_tokens",
    "found_tokens",
    "loaded_tokens",
    "loaded_blocks",
    "tier",
    "pool_bytes",
    "host_bytes",
    "load_seconds",
    "expected_load_seconds",
    "expected_recompute_seconds",
)
"""The span's attributes, without the `penstock.` before them. docs/reference/settings.md has their
meanings."""

_Values = dict[str, "str | int | float"]


class Spans(Protocol):
    """The open spans of one engine's requests."""

    def begin(self, state: RequestState, *, may_load: bool) -> None:
        """The request looks for its blocks. If it may load none, it gets no span."""

    def begin_load(
        self,
        state: RequestState,
        number: int,
        tokens: int,
        blocks: Blocks,
        host_bytes: int,
        pool_bytes: int,
    ) -> None:
        """The load `number` of so many tokens of the request begins."""

    def note_lost(self, numbers: Iterable[int]) -> None:
        """Some block of these loads is not there as it should be."""

    def end_load(self, state: RequestState, number: int, seconds: float, unloaded: int) -> None:
        """The load `number` of the request is over. `unloaded` of its blocks did not come."""

    def end_without_load(self, state: RequestState) -> None:
        """The request is computed, and nothing was loaded."""

    def abort(self, state: RequestState) -> None:
        """The request is gone before it was computed."""

    def shutdown(self) -> None:
        """Sends what is queued, within a bounded time."""


def spans_to(endpoint: str) -> Spans:
    """The spans of an engine that sends them to this collector; none if it is empty."""
    return SentSpans(Exporter(endpoint)) if endpoint else NoSpans()


class SentSpans:
    """The spans of an engine that sends them to a collector."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._loads: dict[int, LoadSpan] = {}
        """Load under way → its request's span."""

    def begin(self, state: RequestState, *, may_load: bool) -> None:
        state.span = LoadSpan(time.time_ns()) if may_load else None

    def begin_load(
        self,
        state: RequestState,
        number: int,
        tokens: int,
        blocks: Blocks,
        host_bytes: int,
        pool_bytes: int,
    ) -> None:
        span = state.span
        if span is None:
            return
        span.load_began = time.time_ns()
        span.tokens, span.blocks = tokens, len(blocks)
        span.host_bytes, span.pool_bytes = host_bytes, pool_bytes
        self._loads[number] = span

    def note_lost(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if (span := self._loads.get(number)) is not None:
                span.is_lost = True

    def end_load(self, state: RequestState, number: int, seconds: float, unloaded: int) -> None:
        self._loads.pop(number, None)
        span = state.span
        if span is None:
            return
        values: _Values = {"load_seconds": seconds, "loaded_blocks": span.blocks - unloaded}
        if not unloaded:
            values["loaded_tokens"] = span.tokens
            self._end(state, LOADED, values)
        else:
            self._end(state, FAILED if span.is_lost else GIVEN_UP, values)

    def end_without_load(self, state: RequestState) -> None:
        advice = state.advice
        could_load = state.unawaited_from is not None or (advice is not None and advice.reaches)
        self._end(state, RECOMPUTED if could_load else MISSED, {})

    def abort(self, state: RequestState) -> None:
        self._end(state, ABORTED, {})

    def _end(self, state: RequestState, outcome: str, values: _Values) -> None:
        span, state.span = state.span, None
        if span is None:
            return
        # Still open if the request is gone while it waits.
        waits = state.waits_since
        values |= {
            "request_id": state.id,
            "outcome": outcome,
            "prompt_tokens": state.request.num_prompt_tokens,
            "waited_seconds": span.waited + (time.monotonic() - waits if waits else 0.0),
        }
        if state.label:
            values["tenant"] = state.label
        if (advice := state.advice) is not None:
            values["cached_tokens"] = advice.first
            # What is not known yet is not nothing.
            if state.unawaited_from is None:
                found = advice.reaches[-1].end - advice.first if advice.reaches else 0
                values["found_tokens"] = found
            if (choice := advice.choice) is not None:
                for name, expected in (("load", choice.load), ("recompute", choice.recompute)):
                    if expected is not None:
                        values[f"expected_{name}_seconds"] = expected
        if span.load_began is not None:
            values |= {
                "tier": "pool" if span.pool_bytes else "host",
                "pool_bytes": span.pool_bytes,
                "host_bytes": span.host_bytes,
            }
        self._exporter.export(
            Span(
                SPAN,
                span.began,
                time.time_ns(),
                {f"penstock.{name}": value for name, value in values.items()},
                {} if span.load_began is None else {LOAD_BEGINS: span.load_began},
                state.trace_headers,
            )
        )

    def shutdown(self) -> None:
        self._exporter.shutdown()


class NoSpans:
    """The spans of an engine that sends none: nothing is noted."""

    def begin(self, state: RequestState, *, may_load: bool) -> None:
        pass

    def begin_load(
        self,
        state: RequestState,
        number: int,
        tokens: int,
        blocks: Blocks,
        host_bytes: int,
        pool_bytes: int,
    ) -> None:
        pass

    def note_lost(self, numbers: Iterable[int]) -> None:
        pass

    def end_load(self, state: RequestState, number: int, seconds: float, unloaded: int) -> None:
        pass

    def end_without_load(self, state: RequestState) -> None:
        pass

    def abort(self, state: RequestState) -> None:
        pass

    def shutdown(self) -> None:
        pass
