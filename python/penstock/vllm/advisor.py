"""Weighs loading against recomputing, by what this engine's own steps and loads took.

It watches and answers; what is done is the scheduler half's. Times are given to it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.vllm.costs import Choice, Prefill, Tier, choose, patience

logger = logging.getLogger("vllm.penstock")

ALWAYS, NEVER, AUTO = "always", "never", "auto"
POLICIES = (AUTO, ALWAYS, NEVER)
"""Whether to load what can be loaded: where it is expected to pay, always, or never."""

_SLACK = 0.04
"""What a load that turns out late may cost, of the time to recompute what it would have brought."""

_PROBE_SECONDS = 5.0
"""How long a pool from which nothing is loaded is left alone before its speed is measured again."""

_PROBE_BYTES = 4 << 20
"""As large as such a measurement is at most, if that is a block."""


@dataclass
class _Transfer:
    """A load or a prefetch under way."""

    host_bytes: int
    pool_bytes: int
    pool_ahead: int
    """Bytes of the pool's up to the end of this one's, from when it began."""
    blocks: int


@dataclass(frozen=True)
class Reach:
    """Where loads of a run may end, from the nearest, and what is to be moved up to there."""

    end: int
    host_bytes: int
    pool_bytes: int


class Advisor:
    """What steps and loads take, and what follows from it for the next request."""

    def __init__(self, policy: str, tokens_per_step: int) -> None:
        self._policy = policy
        self._prefill = Prefill(tokens_per_step)
        self._host = Tier()
        self._pool = Tier()
        self._steps: dict[int, tuple[float, int, int]] = {}
        self._last_output = 0.0
        self._transfers: dict[int, _Transfer] = {}
        self._pool_seen = float("-inf")
        """When the pool's speed was last measured, or a measurement was last begun."""

    # --- what is watched ------------------------------------------------------------------

    def on_step(self, now: float, step: int, tokens: int, pairs: int) -> None:
        """A step goes to the workers that computes so many tokens of prompts, which attend to
        `pairs` tokens in sum."""
        self._steps[step] = now, tokens, pairs

    def on_output(self, now: float, steps: Iterable[int]) -> None:
        """A step is done; `steps` names it if it computed prompts."""
        for step in steps:
            began, tokens, pairs = self._steps.pop(step)
            # Steps that were ordered ahead wait for the one before.
            self._prefill.observe(tokens, pairs, now - max(began, self._last_output))
        self._last_output = now

    def on_begin(
        self, now: float, number: int, blocks: int, host_bytes: int, pool_bytes: int
    ) -> None:
        """A load or prefetch of so many blocks begins, with so many bytes from either tier."""
        ahead = self._pool.begin(pool_bytes)
        self._transfers[number] = _Transfer(host_bytes, pool_bytes, ahead, blocks)
        if pool_bytes:
            self._pool_seen = now

    def on_end(self, number: int, seconds: float, missing_bytes: int) -> None:
        """It is over: it took so long, and `missing_bytes` of it did not come."""
        transfer = self._transfers.pop(number, None)
        if transfer is None:
            return
        if not transfer.pool_bytes:
            if not missing_bytes:
                self._host.observe(transfer.host_bytes, seconds)
            return
        seconds = max(seconds - (self._host.seconds(transfer.host_bytes) or 0.0), 0.0)
        if missing_bytes:
            # Had it gone on as it did, and the next block had been about to come.
            block = (transfer.host_bytes + transfer.pool_bytes) / transfer.blocks
            arrived = max(transfer.pool_ahead - missing_bytes, block)
            seconds *= transfer.pool_ahead / arrived
        self._pool.end(transfer.pool_bytes, transfer.pool_ahead, seconds)

    # --- what follows ---------------------------------------------------------------------

    def advise(self, first: int, reaches: Sequence[Reach], prompt: int) -> Choice:
        """How far to load a prompt of `prompt` tokens, of which `first` are computed."""
        furthest = reaches[-1].end
        if self._policy == NEVER:
            return Choice(first, None, None)
        ends = [(reach.end, self._load_seconds(reach)) for reach in reaches]
        if self._policy == ALWAYS:
            return Choice(furthest, None, None)
        choice = choose(first, ends, prompt, self._prefill)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "Penstock: of tokens %d to %d load up to %d: recomputing %s s, loading %s",
                first,
                furthest,
                choice.end,
                choice.recompute,
                ", ".join(f"to {end} {seconds} s" for end, seconds in ends),
            )
        return choice

    def _load_seconds(self, reach: Reach) -> float | None:
        host = self._host.seconds(reach.host_bytes) if reach.host_bytes else 0.0
        pool = self._pool.seconds(reach.pool_bytes) if reach.pool_bytes else 0.0
        if reach.host_bytes and host is None:
            # Memory of this machine: no slower than anything else that is loaded.
            host = 0.0
        return None if pool is None or host is None else host + pool

    def patience(self, choice: Choice) -> float | None:
        """Seconds after which to give up a load that was advised; None for no reason to."""
        return patience(choice, _SLACK)

    def wants_probe(self, now: float, block_bytes: int) -> int:
        """Blocks of so many bytes to get from the pool now, for nobody, only to measure it; 0 as
        a rule."""
        if self._policy != AUTO or now - self._pool_seen < _PROBE_SECONDS:
            return 0
        return max(1, _PROBE_BYTES // max(1, block_bytes))
