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
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from penstock.vllm.advisor import ALWAYS, NEVER
from penstock.vllm.names import TENANT
from penstock.vllm.scheduler.common import Common
from penstock.vllm.scheduler.lookups import Lookups
from penstock.vllm.scheduler.prefetching import Prefetching
from penstock.vllm.scheduler.promises import (
    REMOTE_DECODE,
    REMOTE_PREFILL,
    Promise,
    is_announced,
    is_handed_over,
    read_promise,
)
from penstock.vllm.scheduler.requests import Expected, Phase, Source, Tracked

logger = logging.getLogger("vllm.penstock")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05
"""Seconds between a look-up's answer and the next look-up of the same request. The pause grows
while nothing comes."""
_GROWTH = 1.5
_LATENCIES = 2.0
"""A pause is so many times what a look-up takes, at least: most of the time nobody asks."""
_PATIENCE = 2.0
"""Nothing new may come for so many times what it takes to compute what is missing. A prefill engine
that shares its steps among several prompts is slower than this engine would be."""

_MOST_SOURCES = 1024
"""Clients whose waits in vain are counted. Of others, the longest ago are forgotten."""


class Handover:
    """The requests that wait for blocks of another engine, and the promises of this engine."""

    def __init__(self, common: Common, lookups: Lookups, prefetching: Prefetching) -> None:
        self._common = common
        self._catalogue = common.catalogue
        self._lookups = lookups
        self._prefetching = prefetching
        self._waiting: dict[str, Tracked] = {}
        self._in_vain: OrderedDict[Source, int] = OrderedDict()
        """How many waits in a row brought nothing, by whose they were."""

    @property
    def waits(self) -> bool:
        """Whether some request waits for another engine's blocks."""
        return bool(self._waiting)

    def is_waiting(self, tracked: Tracked) -> bool:
        """Whether the request waits for another engine's blocks."""
        return tracked.expected is not None

    # --- the decode engine ----------------------------------------------------------------

    def note_arrival(self, tracked: Tracked, params: Mapping[str, Any] | None) -> None:
        """A request has come. Finds out which of its blocks are on their way to the pool."""
        role, request = self._common.role, tracked.request
        tracked.is_handed_over = is_handed_over(params)
        if not role.loads or tracked.policy == NEVER or request.skip_reading_prefix_cache:
            return
        is_told = is_announced(params)
        if not is_told and not role.expects:
            return
        end = self._common.last(tracked)
        if is_told and (promise := read_promise(params)) is not None:
            end = min(end, self._promised(tracked, promise))
        if end > 0:
            source = _source(tracked, is_told)
            tracked.expected, tracked.is_taken_over = Expected(end, source), True
            self._waiting[tracked.id] = tracked
            self._common.counters.count("handovers")

    def _promised(self, tracked: Tracked, promise: Promise) -> int:
        """How many tokens a promise is good for in this engine."""
        unit = self._catalogue.alignment
        tokens = promise.tokens // unit * unit
        if tuple(promise.namespaces) != self._common.agreement.namespaces:
            self._refuse(
                "it is for another namespace: give both engines the same model, settings and "
                "penstock.pool_geometry (portable, if their parallelism differs)"
            )
            return 0
        each = self._common.facts.hash_tokens
        hashes = tracked.request.block_hashes
        if tokens and hashes[tokens // each - 1 : tokens // each] != [promise.last]:
            self._refuse("its hash is not that of this request's tokens")
            return 0
        return self._catalogue.last_end(tokens + 1)

    def _refuse(self, reason: str) -> None:
        self._common.counters.count("promises_refused")
        _warn_of_promise(reason)

    def awaits(self, tracked: Tracked, first: int) -> bool:
        """Whether a request that could be computed from the token `first` waits for blocks of
        another engine."""
        expected = tracked.expected
        if expected is None:
            return False
        now = time.monotonic()
        # The engine asks in each step, so what an answer tells is looked at once.
        if expected.seen_from != first and not self._lookups.is_under_way(tracked):
            expected.seen_from = first
            reaches = self._catalogue.reaches(tracked.id, first, self._common.last(tracked))
            found = max(first, reaches[-1].end if reaches else 0)
            if found >= expected.end:
                self._note_waited(expected, in_vain=False)
                self.forget(tracked)
                return False
            if found > expected.found:
                self._note_waited(expected, in_vain=False)
                expected.found, expected.until, expected.pause = found, None, _FIRST_PAUSE
        if expected.until is None:
            expected.until = now + self._patience(tracked, expected)
        if now < expected.until:
            return True
        self._common.counters.count("handovers_given_up")
        if not expected.found:
            self._note_waited(expected, in_vain=True)
        self.forget(tracked)
        return False

    def _note_waited(self, expected: Expected, *, in_vain: bool) -> None:
        """A wait brought something, or nothing."""
        source = expected.source
        if source is None:
            return
        before = self._in_vain.pop(source, 0)
        if in_vain:
            self._in_vain[source] = before + 1
            if len(self._in_vain) > _MOST_SOURCES:
                self._in_vain.popitem(last=False)

    def _patience(self, tracked: Tracked, expected: Expected) -> float:
        """Seconds for which nothing new may come."""
        settings, limit = self._common.settings, self._common.limit.seconds
        if not expected.found:
            # The prefill engine may have others to compute first. If nothing ever comes from there,
            # requests soon wait for moments only.
            in_vain = 0 if expected.source is None else self._in_vain.get(expected.source, 0)
            patience = settings.handover_timeout * 0.5 ** min(in_vain, 16)
            return max(patience, min(limit, settings.handover_timeout))
        missing = self._common.advisor.saved_seconds(
            expected.found, expected.end, tracked.request.num_tokens
        )
        if tracked.policy == ALWAYS or missing is None:
            return settings.handover_timeout
        return min(settings.handover_timeout, max(_PATIENCE * missing, limit))

    def look_again(self) -> None:
        """Asks the pool again for requests that wait. Prefetches what has come for them."""
        now = time.monotonic()
        for tracked in list(self._waiting.values()):
            expected = tracked.expected
            if expected is None or tracked.phase is not Phase.WAITING:
                self.forget(tracked)
            elif self._lookups.is_under_way(tracked):
                continue
            elif expected.ask_at is None:
                latency = self._lookups.latency or 0.0
                expected.ask_at = now + max(expected.pause, min(_LATENCIES * latency, 1.0))
                expected.pause = min(_GROWTH * expected.pause, _LONGEST_PAUSE)
                self._prefetching.note_arrival(tracked)
            elif now >= expected.ask_at:
                expected.ask_at = expected.seen_from = None
                self._lookups.start(tracked, again=True)

    def forget(self, tracked: Tracked) -> None:
        """The request waits no more."""
        tracked.expected = None
        self._waiting.pop(tracked.id, None)

    # --- the prefill engine ---------------------------------------------------------------

    def promise(self, tracked: Tracked) -> dict[str, Any] | None:
        """What the request's answer says to the engine that goes on with it; None if none does.

        It has the fields that proxies and routers expect, besides the promise."""
        if not tracked.is_handed_over:
            return None
        request, unit = tracked.request, self._catalogue.alignment
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens) // unit * unit
        each = self._common.facts.hash_tokens
        if not self._common.role.stores or not self._common.is_shared(request):
            tokens = 0
        promise = Promise(
            self._common.agreement.namespaces,
            tokens,
            request.block_hashes[tokens // each - 1] if tokens else b"",
        )
        self._common.counters.count("promises")
        return {
            REMOTE_PREFILL: True,
            REMOTE_DECODE: False,
            "remote_engine_id": self._common.facts.engine_id,
            "remote_request_id": tracked.id,
            # No engine is asked for the blocks: they are in the pool.
            "remote_block_ids": [],
            "remote_host": "",
            "remote_port": 0,
            "tp_size": self._common.facts.tensor_parallel,
            # A proxy may send nothing else of what the client sent to this engine.
            **({TENANT: tracked.label} if tracked.label else {}),
            **promise.as_params(),
        }


def _source(tracked: Tracked, is_told: bool) -> Source | None:
    """With whose waits in vain a request's wait is counted.

    Anybody can announce blocks that never come. So an announcement counts for its own client alone,
    and for nobody if the client cannot be told from others: then each wait lasts as long as it may.
    """
    if is_told and not tracked.salt:
        return None
    # A salt may be long, and is a secret.
    return tracked.tenant, hashlib.sha256(tracked.salt).digest() if tracked.salt else b""


@lru_cache(maxsize=16)
def _warn_of_promise(reason: str) -> None:
    # Once for each reason: a client may send such with every request.
    logger.warning("Penstock: a request's promise is not used: %s", reason)
