"""Loading: how much of a request comes from the pool or from host memory.

A load begins at the first token that the engine does not have. It takes the longest run of tokens
that meets three conditions:

- A look-up found the run's blocks present on all ranks. In a group with a window, only the blocks
  of the last window count.
- The run ends before the prompt's last token. So the engine is in the same state as after a hit in
  its own prefix cache.
- The run is expected to be loaded sooner than it could be computed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

from penstock._native import Choice, Reach
from penstock.vllm.advisor import ALWAYS
from penstock.vllm.scheduler.common import Common
from penstock.vllm.scheduler.facts import BlockTables
from penstock.vllm.scheduler.handover import Handover
from penstock.vllm.scheduler.lookups import Lookups
from penstock.vllm.scheduler.prefetching import Prefetching
from penstock.vllm.scheduler.probing import Probing
from penstock.vllm.scheduler.requests import Advice, Offer, Phase, Tracked
from penstock.vllm.scheduler.savings import Savings
from penstock.vllm.scheduler.transfers import Transfers

_MOMENT = 0.002
"""Seconds that an engine without work waits for look-ups in a step. Without waiting it would make a
step in vain, which takes some milliseconds. Most look-ups take less."""


class Loading:
    """Offers loads to the engine, and follows the loads that the engine takes."""

    def __init__(
        self,
        common: Common,
        lookups: Lookups,
        transfers: Transfers,
        prefetching: Prefetching,
        probing: Probing,
        savings: Savings,
        handover: Handover,
        has_time: Callable[[], bool],
    ) -> None:
        self._common = common
        self._catalogue = common.catalogue
        self._lookups = lookups
        self._transfers = transfers
        self._prefetching = prefetching
        self._probing = probing
        self._savings = savings
        self._handover = handover
        self._has_time = has_time
        self._moment_ends: float | None = None
        """When this step waits for look-ups no more, by the monotonic clock; None if it has not
        waited yet."""
        self._unloaded: dict[int, set[int]] = {}
        """Load → positions of its blocks that did not come, from the ranks' reports so far."""
        self._given_up: set[int] = set()
        """Loads whose blocks the engine took away."""

    def look_up(self, tracked: Tracked) -> None:
        """Starts the request's look-up, unless host memory has all of the request."""
        request, catalogue = tracked.request, self._catalogue
        tracked.awaits = tracked.unawaited_from = tracked.advice = None
        catalogue.extend(tracked.id, request.block_hashes)
        self._common.look_in_node(tracked.id)
        last = self._common.last(tracked)
        held = catalogue.reaches(tracked.id, 0, last)
        is_shared = self._common.is_shared(request)
        may_load = is_shared and last > 0 and not request.skip_reading_prefix_cache
        self._common.spans.begin(tracked, may_load=may_load)
        if (held and held[-1].end == last) or not is_shared:
            catalogue.do_without(tracked.id)
        else:
            self._lookups.start(tracked)

    def match(self, tracked: Tracked, first: int) -> int | None:
        """How many tokens to load from `first` on. None while this is not known, or if the tokens
        will soon be a local hit."""
        tracked.is_stale |= self._common.weights.is_stale(
            hits=first > 0, has_images=tracked.has_images
        )
        tokens = self._match(tracked, first)
        if tokens is None:
            self._savings.begin_wait(tracked)
        else:
            self._savings.end_wait(tracked)
        return tokens

    def _match(self, tracked: Tracked, first: int) -> int | None:
        request, last = tracked.request, self._common.last(tracked)
        if (
            request.skip_reading_prefix_cache
            or tracked.is_failed
            or not self._common.role.loads
            or last <= first
        ):
            return 0
        if tracked.is_stale or not self._common.is_shared(request):
            return 0
        if self._catalogue.is_asked(tracked.id) is None:
            self.look_up(tracked)
        self._lookups.take_answers()
        if self._handover.awaits(tracked, first):
            return None
        if self._lookups.is_under_way(tracked):
            if not self._awaits(tracked, first, last):
                self._probing.note_unawaited(tracked, first)
            elif not self._comes_at_once(tracked):
                return None
        else:
            self._probing.forget(tracked)
        choice = self._advise(tracked, first, last)
        if choice is None:
            return 0
        if self._catalogue.is_loading(tracked.id, first, choice.end):
            # Another request is loading the block. After that, this request has a local hit.
            return None
        tracked.offer = Offer(first, choice)
        return choice.end - first

    def _comes_at_once(self, tracked: Tracked) -> bool:
        """Whether the request's look-up is answered now, or in a moment in which the engine has
        nothing to compute."""
        self._savings.begin_wait(tracked)
        if self._moment_ends is None:
            latency = self._lookups.latency
            pays = (latency is None or latency <= _MOMENT) and self._has_time()
            self._moment_ends = time.monotonic() + (_MOMENT if pays else 0.0)
        self._lookups.wait_for(tracked, self._moment_ends)
        return not self._lookups.is_under_way(tracked)

    def end_moment(self) -> None:
        """No look-up is waited for any more in this step."""
        self._moment_ends = 0.0

    def end_step(self) -> None:
        """The engine asks no more in this step."""
        self._moment_ends = None

    def _awaits(self, tracked: Tracked, first: int, last: int) -> bool:
        """Whether a request that could be computed from the token `first` waits for its look-up."""
        if tracked.awaits is None:
            tracked.awaits = self._common.advisor.awaits_lookup(
                first,
                self._catalogue.whole(tracked.id, first, last),
                tracked.request.num_tokens,
                self._lookups.latency,
                tracked.policy,
            )
        if tracked.awaits and self._lookups.is_late(
            tracked, lambda: self._saves(tracked, first, last)
        ):
            tracked.awaits = False
        return tracked.awaits

    def _saves(self, tracked: Tracked, first: int, last: int) -> float | None:
        """Seconds that a load of all that is asked for would save, and the look-up may take; None
        if nobody knows. Whoever always loads saves any time."""
        if tracked.policy == ALWAYS:
            return math.inf
        advisor, reach = self._common.advisor, self._catalogue.whole(tracked.id, first, last)
        saved = advisor.saved_seconds(first, reach.end, tracked.request.num_tokens)
        return None if saved is None else saved - (advisor.load_seconds(reach) or 0.0)

    def advise(self, tracked: Tracked, first: int) -> Choice | None:
        """How far to load from the token `first`; None for not at all.

        The engine asks in each step until it has room. The answer stays the same while nothing
        changes.
        """
        return self._advise(tracked, first, self._common.last(tracked))

    def _advise(self, tracked: Tracked, first: int, last: int) -> Choice | None:
        reaches = tuple(self._catalogue.reaches(tracked.id, first, last))
        advice = tracked.advice
        if advice is None or (advice.first, advice.reaches) != (first, reaches):
            advice = Advice(first, reaches, self._weigh(tracked, first, reaches))
            tracked.advice = advice
        return advice.choice

    def _weigh(self, tracked: Tracked, first: int, reaches: Sequence[Reach]) -> Choice | None:
        if not reaches:
            return None
        # A trial of recomputing would do another engine's work again, in front of answers that
        # this engine computes.
        may_check = not tracked.is_declined and not tracked.is_taken_over
        choice = self._common.advisor.advise(
            first, reaches, tracked.request.num_tokens, tracked.policy, may_check=may_check
        )
        self._probing.decline(tracked, choice.end, reaches[-1].end)
        return choice if choice.end > first else None

    def begin(self, tracked: Tracked, tables: BlockTables, tokens: int) -> None:
        """The engine has allocated blocks for the first `tokens` tokens of the last offer."""
        offer = tracked.offer
        if offer is None or tokens > offer.end - offer.first:
            raise RuntimeError(f"{tokens} tokens are to be loaded, more than were offered: {offer}")
        number = self._common.orders.number()
        own = [tables[group.index] for group in self._common.facts.groups]
        end = offer.first + tokens
        blocks, moved = self._catalogue.begin_load(tracked.id, number, offer.first, end, own)
        limits = self._transfers.begin(number, moved, offer.choice)
        self._prefetching.release(tracked)
        tracked.load = self._common.orders.load(number, tracked, blocks, *limits)
        tracked.phase = Phase.LOADING
        tracked.load_bytes = (moved.host_bytes, moved.pool_bytes)
        self._savings.begin_wait(tracked)
        self._common.spans.begin_load(tracked, number, tokens, blocks, *tracked.load_bytes)
        if self._catalogue.is_reading:
            self._common.orders.flush(self._catalogue.readers(blocks.block_ids))

    def cancel(self, job: int) -> None:
        """The load's request is gone. The engine keeps the blocks until the load has ended."""
        self._common.orders.cancel_load(job)

    def give_up(self, jobs: Iterable[int]) -> None:
        """The engine took the blocks of these loads away. Their requests begin anew once every
        rank has said that its load is over."""
        self._given_up.update(jobs)

    def note_unloaded(self, unloaded: dict[int, set[int]]) -> None:
        """Notes blocks of loads that did not come on some rank."""
        for number, positions in unloaded.items():
            self._unloaded.setdefault(number, set()).update(positions)

    def end(self, tracked: Tracked) -> None:
        """The request's load is over on all ranks."""
        job, tracked.load = tracked.load, None
        assert job is not None
        assert tracked.offer is not None
        self._savings.end_wait(tracked)
        seconds = self._transfers.end(job.job)
        self._catalogue.end(job.job)
        unloaded = self._unloaded.pop(job.job, set())
        self._common.spans.end_load(tracked, job.job, seconds, len(unloaded))
        is_given_up = job.job in self._given_up
        self._given_up.discard(job.job)
        if tracked.phase is Phase.ENDED:
            return
        tracked.phase = Phase.WAITING
        if is_given_up:
            return
        tracked.is_failed = bool(unloaded)
        if not unloaded:
            self._savings.on_loaded(tracked, tracked.offer.first, tracked.offer.end)
            self._common.counters.count("loaded_tokens", tracked.offer.end - tracked.offer.first)
        elif len(self._common.facts.groups) == 1:
            loaded = len(job.blocks) - len(unloaded)
            self._common.counters.count(
                "loaded_tokens", loaded * self._common.facts.groups[0].block_size
            )
