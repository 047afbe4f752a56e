"""Weighs loading against recomputing, by what this engine's own steps and loads took.

It watches and answers; what is done is the scheduler half's. Times are given to it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.vllm.costs import Choice, Prefill, Tier, choose, patience

logger = logging.getLogger("vllm.penstock")

ALWAYS, NEVER, AUTO = "always", "never", "auto"
POLICIES = (AUTO, ALWAYS, NEVER)
"""Whether to load what can be loaded: where it is expected to pay, always, or never."""

_PROBE_SECONDS = 5.0
"""How long a pool from which nothing is loaded is left alone before its speed is measured again."""

_PROBE_SHARE, _LONGEST_PAUSE = 0.1, 30.0
"""Share of the time in which the pool is busy with such measurements, unless it would be left alone
for longer than so many seconds."""

_PROBE_BYTES = 4 << 20
"""As large as every other measurement is. In turn with it comes one of as little as keeps all
lanes at work, so that what each load takes is told from what each byte does."""

_FIRST_WHOLE, _LAST_WHOLE = 4, 256
"""Loads in a row that are declined before a measurement is as large as a load would have been: what
one takes may not follow from what little ones do. Each time doubles it up to the second."""

_CLEARLY = 0.5
"""A load that takes no more of the recomputation, with what is left to compute, is worth it
whatever a new measurement of that would show."""

_FIRST_CHECK, _LAST_CHECK = 4, 256
"""Loads that are not clearly worth it, in a row, before a prompt is recomputed instead, to know how
long that takes; each time doubles it up to the second."""

_HOPELESS = 8
"""Times the recomputation: what is expected to take longer is not measured whole."""


@dataclass
class _Transfer:
    """A load or a prefetch under way."""

    host_bytes: int
    pool_bytes: int
    pool_ahead: int
    """Bytes of the pool's up to the end of this one's, from when it began."""
    patience: float | None
    is_probe: bool


@dataclass(frozen=True)
class Reach:
    """Where loads of a run may end, from the nearest, and what is to be moved up to there."""

    end: int
    host_bytes: int
    pool_bytes: int


class Advisor:
    """What steps and loads take, and what follows from it for the next request."""

    def __init__(self, tokens_per_step: int, lanes: int = 1) -> None:
        """`lanes` objects of a load are fetched at a time."""
        self._lanes = lanes
        self._prefill = Prefill(tokens_per_step)
        self._host = Tier()
        self._pool = Tier()
        self._steps: dict[int, tuple[float, int, int]] = {}
        self._last_output = 0.0
        self._transfers: dict[int, _Transfer] = {}
        self._pool_seen = float("-inf")
        """When the pool's speed was last measured, or a measurement was last begun."""
        self._probe_pause = _PROBE_SECONDS
        self._probes = 0
        self._is_whole = False
        """Whether the last such measurement was as large as a load. These are rare enough."""
        self._is_silent = False
        """Whether the last such measurement brought nothing."""
        self._declined = 0
        """Loads since a measurement was last as large as one, or one was worth it."""
        self._whole_after = _FIRST_WHOLE
        self._unchecked = 0
        """Loads not clearly worth it since a step last told what recomputing takes."""
        self._check_after = _FIRST_CHECK
        self._step_tokens = 0
        """Tokens of the step that would have told."""

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
            if 2 * tokens >= self._step_tokens:
                self._unchecked = 0
        self._last_output = now

    def on_begin(
        self,
        now: float,
        number: int,
        host_bytes: int,
        pool_bytes: int,
        *,
        patience: float | None = None,
        is_probe: bool = False,
    ) -> None:
        """A load, prefetch or probe begins, with so many bytes from either tier. It is given up
        after `patience` seconds if nothing comes."""
        ahead = self._pool.begin(pool_bytes)
        self._transfers[number] = _Transfer(host_bytes, pool_bytes, ahead, patience, is_probe)
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
        self._pool.end(transfer.pool_bytes)
        # What was ahead of it has come if anything of its own has.
        arrived = transfer.pool_ahead - missing_bytes
        if missing_bytes >= transfer.pool_bytes:
            arrived = 0
        if transfer.is_probe:
            logger.debug("Penstock: of a probe %d bytes came in %s s", max(arrived, 0), seconds)
            if not self._is_whole:
                pause = max(_PROBE_SECONDS, seconds / _PROBE_SHARE)
                self._probe_pause = min(pause, _LONGEST_PAUSE)
            self._is_silent = not arrived
        if missing_bytes and transfer.patience is not None and seconds >= transfer.patience:
            self._pool.doubt()
        # What came took so long; what did not is not known to have been about to come.
        if arrived:
            seconds -= self._host.seconds(transfer.host_bytes) or 0.0
            self._pool.observe(arrived, max(seconds, 0.0))

    # --- what follows ---------------------------------------------------------------------

    def advise(
        self,
        first: int,
        reaches: Sequence[Reach],
        prompt: int,
        policy: str = AUTO,
        *,
        may_check: bool = False,
    ) -> Choice:
        """How far to load a prompt of `prompt` tokens, of which `first` are computed; not at all
        now and then, if it `may_check` whether that pays."""
        furthest = reaches[-1]
        if policy == NEVER:
            return Choice(first, None, None)
        ends = [(reach.end, self._load_seconds(reach)) for reach in reaches]
        if policy == ALWAYS:
            return Choice(furthest.end, None, None)
        choice = choose(first, ends, prompt, self._prefill)
        if choice.end == furthest.end:
            self._declined, self._whole_after = 0, _FIRST_WHOLE
        if may_check and self._checks(first, choice, prompt):
            choice = Choice(first, None, choice.recompute)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "Penstock: of tokens %d to %d load up to %d: recomputing %s s, loading %s",
                first,
                furthest.end,
                choice.end,
                choice.recompute,
                ", ".join(f"to {end} {seconds} s" for end, seconds in ends),
            )
        return choice

    def awaits_lookup(
        self, first: int, reach: Reach, prompt: int, latency: float | None, policy: str = AUTO
    ) -> bool:
        """Whether a request waits for its look-up; else it is computed, and the answer is for the
        next one.

        `reach` is what it would load if the pool had all that is asked for, and `latency` what the
        last look-up took, infinite if it failed: load and look-up together are to pay. Nor does it
        wait when it is time to see what computing takes.
        """
        if policy == NEVER:
            return False
        recompute = self._prefill.seconds(first, prompt)
        if policy == ALWAYS or recompute is None:
            return True
        load = self._load_seconds(reach) or 0.0
        total = load + (self._prefill.seconds(reach.end, prompt) or 0.0)
        if total + (latency or 0.0) > recompute:
            return False
        return total <= _CLEARLY * recompute or not self._is_check_due()

    def _checks(self, first: int, choice: Choice, prompt: int) -> bool:
        """Whether it is time to recompute what could be loaded: of an engine that only loads nobody
        knows what recomputing takes, and a load that was worth it once may not be any more."""
        if choice.end == first:
            self._check_after = _FIRST_CHECK
            return False
        if choice.recompute is None or choice.load is None:
            return False
        total = choice.load + (self._prefill.seconds(choice.end, prompt) or 0.0)
        if total <= _CLEARLY * choice.recompute:
            return False
        self._step_tokens = self._prefill.step_tokens(prompt - first)
        if self._is_check_due():
            return True
        self._unchecked += 1
        return False

    def _is_check_due(self) -> bool:
        if self._unchecked < self._check_after:
            return False
        self._unchecked, self._check_after = 0, min(2 * self._check_after, _LAST_CHECK)
        return True

    def _load_seconds(self, reach: Reach) -> float | None:
        host = self._host.seconds(reach.host_bytes) if reach.host_bytes else 0.0
        pool = self._pool.seconds(reach.pool_bytes) if reach.pool_bytes else 0.0
        if reach.host_bytes and host is None:
            # Memory of this machine: no slower than anything else that is loaded.
            host = 0.0
        return None if pool is None or host is None else host + pool

    def patience(
        self, choice: Choice, host_bytes: int, pool_bytes: int, objects: int
    ) -> float | None:
        """Seconds after which to give up a load of so many objects that begins now, as advised, if
        nothing of it comes; None for no reason to."""
        load = self._load_seconds(Reach(choice.end, host_bytes, pool_bytes))
        first = None
        # Infinite if the pool has been doubted since.
        if load is not None and load < math.inf:
            least = (self._pool.seconds(0) or 0.0) if pool_bytes else 0.0
            # Lanes fetch one each at first.
            first = least + min(self._lanes / objects, 1.0) * max(load - least, 0.0)
        return patience(choice, first, self._pool.deviation)

    def wants_probe(
        self, now: float, first: int, reach: Reach, prompt: int, block: tuple[int, int]
    ) -> int:
        """Blocks to get from the pool now, for nobody, only to measure it; 0 as a rule.

        A prompt of `prompt` tokens is computed from `first` on, of which `reach` could have been
        loaded, of blocks of so many bytes and objects.
        """
        self._declined += 1
        pause = self._probe_pause if self._pool.observed >= 2 or self._is_silent else 0.0
        if now - self._pool_seen < pause:
            return 0
        if any(transfer.is_probe for transfer in self._transfers.values()):
            return 0
        block_bytes, block_objects = block
        is_due = self._declined >= self._whole_after
        self._is_whole = is_due and not self._is_hopeless(first, reach, prompt)
        if self._is_whole:
            self._declined, self._whole_after = 0, min(2 * self._whole_after, _LAST_WHOLE)
            return -(-reach.pool_bytes // block_bytes)
        self._probes += 1
        least = -(-self._lanes // block_objects)
        return least if self._probes % 2 else max(2 * least, _PROBE_BYTES // block_bytes)

    def _is_hopeless(self, first: int, reach: Reach, prompt: int) -> bool:
        recompute, load = self._prefill.seconds(first, prompt), self._load_seconds(reach)
        return recompute is None or load is None or load > _HOPELESS * recompute
