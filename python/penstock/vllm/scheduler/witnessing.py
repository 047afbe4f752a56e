"""Witnessing: how much of what this engine computes is compared with what the pool has of it.

Comparisons take time of the workers. So they have a budget, a share of the time that steps take. A
request whose blocks could be loaded may be chosen to be computed all the same. Without that, an
engine that loads all it can compares nothing.
"""

from __future__ import annotations

from penstock._native import Catalogue
from penstock.vllm.agreement import Agreement
from penstock.vllm.counters import Counters
from penstock.vllm.scheduler.requests import Offer, RequestState
from penstock.vllm.settings import KEEP, Settings

_FIRST_SECONDS, _MOST_SECONDS = 0.010, 0.100
"""The budget at the start, and at most."""

_LONGEST_STEP = 1.0
"""Seconds of a step that count. The engine may have rested between two steps."""

_BLOCK_SECONDS = 0.005
"""What a comparison is taken to need before the first was measured."""

_WEIGHT_OF_OLD = 0.9
"""How much the earlier measurements count with each new one."""

_MOST_BLOCKS = 8
"""The most blocks that are compared for one request in one step."""

_MOST_BLOCKS_ON_PURPOSE = 4
"""The blocks of a request that was chosen that are compared, whatever the budget has."""


class Witnessing:
    """The comparisons of one engine: what they may cost, and which requests are computed for them.

    Where KV of earlier weights is kept on purpose, nothing is compared: the pool has it under the
    same names."""

    def __init__(
        self, settings: Settings, catalogue: Catalogue, agreement: Agreement, counters: Counters
    ) -> None:
        is_on = settings.weight_updates != KEEP and settings.witness_time > 0
        self._time = settings.witness_time if is_on else 0.0
        self._share = settings.witness_share if is_on else 0.0
        self._catalogue = catalogue
        self._agreement = agreement
        self._counters = counters
        self._budget = _FIRST_SECONDS
        self._seconds = self._blocks = 0.0
        """What comparisons took, and of how many blocks; old ones count less and less."""
        self._step_at: float | None = None
        """When the last step was ordered, if it computes."""
        self._charged: dict[int, float] = {}
        """Store → seconds that its witnesses are expected to take."""
        self._due = 1.0
        """Requests to choose. The first hit is one. No other hit waits for what that says."""

    # --- the budget -----------------------------------------------------------------------

    def on_step(self, now: float, *, computes: bool) -> None:
        """A step is ordered at the time `now`."""
        if self._step_at is not None:
            self._earn(self._time * min(now - self._step_at, _LONGEST_STEP))
        self._step_at = now if computes else None

    def allowed(self, state: RequestState) -> int:
        """How many of the request's blocks may be compared in this step."""
        if not self._time:
            return 0
        # However long a block takes, the whole budget is enough for one.
        seconds = min(self._block_seconds(), _MOST_SECONDS)
        within = max(int(self._budget / seconds), 0)
        least = _MOST_BLOCKS_ON_PURPOSE - state.witnesses if state.is_recomputed else 0
        return max(least, min(within, _MOST_BLOCKS))

    def on_ordered(self, store: int, witnesses: int) -> None:
        """Some blocks of a store are to be compared."""
        if witnesses:
            self._charged[store] = seconds = witnesses * self._block_seconds()
            self._budget -= seconds

    def on_report(self, blocks: int, seconds: float) -> None:
        """Ranks have compared `blocks` blocks, each rank its own; the slowest took `seconds`."""
        self._counters.count("witnessed_blocks", blocks)
        self._budget -= seconds
        if blocks:
            self._blocks = self._blocks * _WEIGHT_OF_OLD + blocks / self._agreement.ranks
            self._seconds = self._seconds * _WEIGHT_OF_OLD + seconds

    def on_stored(self, store: int) -> None:
        """A store is over. What its comparisons took has been reported by now."""
        self._earn(self._charged.pop(store, 0.0))

    def _earn(self, seconds: float) -> None:
        self._budget = min(self._budget + seconds, _MOST_SECONDS)

    def _block_seconds(self) -> float:
        return self._seconds / self._blocks if self._seconds > 0 else _BLOCK_SECONDS

    # --- requests computed on purpose -----------------------------------------------------

    def chooses(self, state: RequestState, offer: Offer) -> bool:
        """Whether the request is computed, though this could be offered to it. That is decided once
        for each request."""
        if not self._share:
            return False
        if state.is_recomputed is None:
            state.is_recomputed = self._is_next(state, offer)
            if state.is_recomputed:
                self._counters.count("witness_tokens", offer.end - offer.first)
        return state.is_recomputed

    def _is_next(self, state: RequestState, offer: Offer) -> bool:
        # Another engine has just computed what it hands over.
        if state.is_taken_over:
            return False
        # What is computed on top of loaded blocks cannot bear witness.
        is_next = self._due >= 1.0 and self._catalogue.is_own(state.id, offer.first)
        self._due = min(self._due - is_next + self._share, 1.0)
        return is_next
