"""Probing: what is not loaded is counted, and now and then some of it is fetched all the same, for
nobody: of a pool from which nothing is loaded nobody would know when it has become faster."""

from __future__ import annotations

import time

from penstock.vllm.advisor import AUTO
from penstock.vllm.scheduler.common import Common
from penstock.vllm.scheduler.lookups import Lookups
from penstock.vllm.scheduler.prefetching import Prefetching
from penstock.vllm.scheduler.requests import Phase, Tracked


class Probing:
    """What was declined, and measurements in its stead."""

    def __init__(self, common: Common, lookups: Lookups, prefetching: Prefetching) -> None:
        self._common = common
        self._catalogue = common.catalogue
        self._lookups = lookups
        self._prefetching = prefetching
        self._unawaited: dict[str, tuple[Tracked, int]] = {}
        """Requests that are computed without their look-up's answer, and where their loads end at
        the latest."""

    def note_unawaited(self, tracked: Tracked, first: int) -> None:
        """The request is computed from the token `first`, though its look-up is under way."""
        if tracked.unawaited_from is None:
            self._common.counters.count("lookups_not_awaited")
        tracked.unawaited_from = first
        self._unawaited[tracked.id] = tracked, self._common.last(tracked)

    def decline_unawaited(self) -> None:
        """Once the answer has come for which a request did not wait, before it was computed, it is
        known what was declined."""
        over = [
            request_id
            for request_id, (tracked, _) in self._unawaited.items()
            if tracked.phase in (Phase.RUNNING, Phase.ENDED)
            and not self._lookups.is_under_way(tracked)
        ]
        for request_id in over:
            tracked, last = self._unawaited.pop(request_id)
            first, tracked.unawaited_from = tracked.unawaited_from, None
            if first is not None and (reaches := self._catalogue.reaches(request_id, first, last)):
                self.decline(tracked, first, reaches[-1].end)

    def forget(self, tracked: Tracked) -> None:
        """The request is gone, begins anew, or has its answer in time after all."""
        if self._unawaited.pop(tracked.id, None) is not None:
            tracked.unawaited_from = None

    def decline(self, tracked: Tracked, first: int, end: int) -> None:
        """Tokens are computed that could be loaded: once a request, they are counted, and some of
        them are got all the same, if the pool was not measured for long."""
        if tracked.is_declined or end <= first:
            return
        tracked.is_declined = True
        self._common.counters.count("declined_tokens", end - first)
        group = self._catalogue.lacking(tracked.id, first, end)
        if group is None or tracked.policy != AUTO:
            return
        agreement = self._common.agreement
        wanted = self._common.advisor.wants_probe(
            time.monotonic(),
            first,
            self._catalogue.whole(tracked.id, first, end),
            tracked.request.num_tokens,
            (agreement.block_bytes[group], agreement.block_objects[group]),
        )
        if wanted and self._prefetching.probe(tracked, first, end, wanted):
            self._common.counters.count("probes")
