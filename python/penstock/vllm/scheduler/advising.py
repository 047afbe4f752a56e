"""Advising: how far loading a request is expected to be faster than computing it."""

from __future__ import annotations

from collections.abc import Sequence

from penstock._native import Catalogue, Choice, Reach
from penstock.vllm.advisor import Advisor
from penstock.vllm.scheduler.probing import Probing
from penstock.vllm.scheduler.requests import Advice, RequestState


class Advising:
    """The advice for requests. It stays the same while nothing changes: the engine asks in each
    step until it has room."""

    def __init__(self, catalogue: Catalogue, advisor: Advisor, probing: Probing) -> None:
        self._catalogue = catalogue
        self._advisor = advisor
        self._probing = probing

    def advise(self, state: RequestState, first: int, last: int) -> Choice | None:
        """How far to load from the token `first`, up to the token `last`; None for not at all."""
        reaches = tuple(self._catalogue.reaches(state.id, first, last))
        advice = state.advice
        if advice is None or (advice.first, advice.reaches) != (first, reaches):
            advice = Advice(first, reaches, self._weigh(state, first, reaches))
            state.advice = advice
        return advice.choice

    def _weigh(self, state: RequestState, first: int, reaches: Sequence[Reach]) -> Choice | None:
        if not reaches:
            return None
        # A trial of recomputing would do another engine's work again, in front of answers that
        # this engine computes.
        may_check = not state.is_declined and not state.is_taken_over
        choice = self._advisor.advise(
            first, reaches, state.request.num_tokens, state.policy, may_check=may_check
        )
        self._probing.decline(state, choice.end, reaches[-1].end)
        return choice if choice.end > first else None
