"""Advising: how far loading a request is expected to be faster than computing it."""

from __future__ import annotations

from collections.abc import Sequence

from penstock._native import Catalogue, Choice, Reach
from penstock.vllm.advisor import Advisor
from penstock.vllm.scheduler.probing import Probing
from penstock.vllm.scheduler.requests import Advice, Tracked


class Advising:
    """The advice for requests. It stays the same while nothing changes: the engine asks in each
    step until it has room."""

    def __init__(self, catalogue: Catalogue, advisor: Advisor, probing: Probing) -> None:
        self._catalogue = catalogue
        self._advisor = advisor
        self._probing = probing

    def advise(self, tracked: Tracked, first: int, last: int) -> Choice | None:
        """How far to load from the token `first`, up to the token `last`; None for not at all."""
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
        choice = self._advisor.advise(
            first, reaches, tracked.request.num_tokens, tracked.policy, may_check=may_check
        )
        self._probing.decline(tracked, choice.end, reaches[-1].end)
        return choice if choice.end > first else None
