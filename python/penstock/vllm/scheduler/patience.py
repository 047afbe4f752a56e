"""Patience: for how long a request waits for blocks of another engine while nothing comes."""

from __future__ import annotations

from collections import OrderedDict

from penstock.vllm.advisor import ALWAYS, Advisor
from penstock.vllm.lookup_limit import LookupLimit
from penstock.vllm.scheduler.requests import Client, Expected, RequestState
from penstock.vllm.settings import Settings

_TIMES = 2.0
"""Nothing new may come for so many times what it takes to compute what is missing. A prefill engine
that shares its steps among several prompts is slower than this engine would be."""

_MOST_CLIENTS = 1024
"""Clients whose waits in vain are counted. Of others, the longest ago are forgotten."""


class Patience:
    """The patience of one engine. It shrinks with each wait in vain."""

    def __init__(self, settings: Settings, limit: LookupLimit, advisor: Advisor) -> None:
        self._settings = settings
        self._limit = limit
        self._advisor = advisor
        self._in_vain: OrderedDict[Client, int] = OrderedDict()
        """How many waits in a row brought nothing, by whose they were."""

    def note_waited(self, expected: Expected, *, in_vain: bool) -> None:
        """A wait brought something, or nothing."""
        client = expected.client
        if client is None:
            return
        before = self._in_vain.pop(client, 0)
        if in_vain:
            self._in_vain[client] = before + 1
            if len(self._in_vain) > _MOST_CLIENTS:
                self._in_vain.popitem(last=False)

    def seconds(self, state: RequestState, expected: Expected) -> float:
        """Seconds for which nothing new may come."""
        longest, limit = self._settings.handover_timeout, self._limit.seconds
        if not expected.found:
            # The prefill engine may have others to compute first. If nothing ever comes from there,
            # requests soon wait for moments only.
            in_vain = 0 if expected.client is None else self._in_vain.get(expected.client, 0)
            return max(longest * 0.5 ** min(in_vain, 16), min(limit, longest))
        missing = self._advisor.saved_seconds(
            expected.found, expected.end, state.request.num_tokens
        )
        if state.policy == ALWAYS or missing is None:
            return longest
        return min(longest, max(_TIMES * missing, limit))
