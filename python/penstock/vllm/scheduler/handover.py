"""Hand-over: a decode engine takes over prompts that a prefill engine computes.

The blocks go through the pool. The decode engine may look before they are there. So it looks again
until they have come, or until waiting pays no more. Then it loads what is there, and computes the
rest.

Who tells that blocks are on their way depends on the proxy:

- The prefill engine's answer has a promise, which the proxy hands on (family A). It says how many
  tokens to expect.
- The proxy announces the prompt, perhaps before the prefill engine has begun (family C).
- Nobody does; but a consumer's prompts are always computed elsewhere first (family B).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any

from penstock._native import Catalogue
from penstock.vllm.advisor import NEVER
from penstock.vllm.counters import Counters
from penstock.vllm.roles import Role
from penstock.vllm.scheduler.lookups import Lookups
from penstock.vllm.scheduler.patience import Patience
from penstock.vllm.scheduler.prefetching import Prefetching
from penstock.vllm.scheduler.promises import Promises, is_announced
from penstock.vllm.scheduler.requests import Client, Expected, Phase, RequestState

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05
"""Seconds between a look-up's answer and the next look-up of the same request. The pause grows
while nothing comes."""
_GROWTH = 1.5
_LATENCIES = 2.0
"""A pause is so many times what a look-up takes, at least: most of the time nobody asks."""


class Handover:
    """The requests of a decode engine that wait for blocks of another engine."""

    def __init__(
        self,
        catalogue: Catalogue,
        role: Role,
        lookups: Lookups,
        prefetching: Prefetching,
        promises: Promises,
        patience: Patience,
        counters: Counters,
    ) -> None:
        self._catalogue = catalogue
        self._role = role
        self._lookups = lookups
        self._prefetching = prefetching
        self._promises = promises
        self._patience = patience
        self._counters = counters
        self._waiting: dict[str, RequestState] = {}

    @property
    def waits(self) -> bool:
        """Whether some request waits for another engine's blocks."""
        return bool(self._waiting)

    def is_waiting(self, state: RequestState) -> bool:
        """Whether the request waits for another engine's blocks."""
        return state.expected is not None

    def note_arrival(self, state: RequestState, params: Mapping[str, Any] | None) -> None:
        """A request has come. Finds out which of its blocks are on their way to the pool."""
        role, request = self._role, state.request
        if not role.loads or state.policy == NEVER or request.skip_reading_prefix_cache:
            return
        is_told = is_announced(params)
        if not is_told and not role.expects:
            return
        end = self._catalogue.last_end(request.num_tokens)
        if is_told and (promised := self._promises.end(state, params)) is not None:
            end = min(end, promised)
        if end > 0:
            client = _client(state, is_told)
            state.expected, state.is_taken_over = Expected(end, client), True
            self._waiting[state.id] = state
            self._counters.count("handovers")

    def awaits(self, state: RequestState, first: int) -> bool:
        """Whether a request that could be computed from the token `first` waits for blocks of
        another engine."""
        expected = state.expected
        if expected is None:
            return False
        now = time.monotonic()
        # The engine asks in each step, so what an answer tells is looked at once.
        if expected.seen_from != first and not self._lookups.is_under_way(state):
            expected.seen_from = first
            last = self._catalogue.last_end(state.request.num_tokens)
            reaches = self._catalogue.reaches(state.id, first, last)
            found = max(first, reaches[-1].end if reaches else 0)
            if found >= expected.end:
                self._patience.note_waited(expected, in_vain=False)
                self.forget(state)
                return False
            if found > expected.found:
                self._patience.note_waited(expected, in_vain=False)
                expected.found, expected.until, expected.pause = found, None, _FIRST_PAUSE
        if expected.until is None:
            expected.until = now + self._patience.seconds(state, expected)
        if now < expected.until:
            return True
        self._counters.count("handovers_given_up")
        if not expected.found:
            self._patience.note_waited(expected, in_vain=True)
        self.forget(state)
        return False

    def look_again(self) -> None:
        """Asks the pool again for requests that wait. Prefetches what has come for them."""
        now = time.monotonic()
        for state in list(self._waiting.values()):
            expected = state.expected
            if expected is None or state.phase is not Phase.WAITING:
                self.forget(state)
            elif self._lookups.is_under_way(state):
                continue
            elif expected.ask_at is None:
                latency = self._lookups.latency or 0.0
                expected.ask_at = now + max(expected.pause, min(_LATENCIES * latency, 1.0))
                expected.pause = min(_GROWTH * expected.pause, _LONGEST_PAUSE)
                self._prefetching.note_arrival(state)
            elif now >= expected.ask_at:
                expected.ask_at = expected.seen_from = None
                self._lookups.start(state, again=True)

    def forget(self, state: RequestState) -> None:
        """The request waits no more."""
        state.expected = None
        self._waiting.pop(state.id, None)


def _client(state: RequestState, is_told: bool) -> Client | None:
    """With whose waits in vain a request's wait is counted.

    Anybody can announce blocks that never come. So an announcement counts for its own client alone,
    and for nobody if the client cannot be told from others: then each wait lasts as long as it may.
    """
    if is_told and not state.salt:
        return None
    # A salt may be long, and is a secret.
    return state.tenant, hashlib.sha256(state.salt).digest() if state.salt else b""
