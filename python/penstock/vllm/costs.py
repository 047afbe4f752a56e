"""What loading and recomputing cost, measured while serving, and which of the two to do.

Everything here is arithmetic on numbers given to it: no clock, no engine. Times are in seconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

_STEP_DECAY = 0.9
"""Weight of a step's time, compared to that of the one after it: the last ten or so decide."""

_LOAD_DECAY = 0.5
"""The same of a load's: a network changes faster than a model."""

_EXPLAINS = 1e-7
"""Share of the observations' squares that coefficients have to explain to be preferred over earlier
ones: more than rounding does."""

_SHORT_STEP = 64
"""Tokens; of shorter steps the time counts as it is, of longer ones what it is for each token."""

_LONG_STEP = 256
"""Tokens; of shorter steps the time varies with much else."""

_WARMED_UP = 2.0
"""A long step so many times faster than expected shows that what was known does not hold any more:
an engine's first steps set up what later ones use."""

_SMALL_LOAD = 1 << 20
"""Bytes; as with steps."""

_DEVIATION_SHARE = 0.25
"""Weight of the newest load's error in their average."""

_CHANGED = 1.5
"""A load so many times faster or slower than expected, and by so many times the deviation, shows
that what was known does not hold any more."""

_SLACK = 0.03
"""Share of the recomputation that a load may be late by."""

_LEAST_SLACK = 0.005
"""Seconds; threads are not woken much more exactly."""

_FIRST_SHARE = 0.125
"""Share of the recomputation that a load gets of which nothing is known; of one that is known, the
same share of what it is expected to save."""

_RIDGE = 1e-9
"""Keeps fits to observations that are all alike from being ill-conditioned."""


class Fit:
    """A weighted least-squares fit of non-negative coefficients to a few features.

    Of all subsets of the features whose coefficients come out positive it takes the one that fits
    best (there are at most seven, for three features), so that observations which are all alike
    still predict themselves. Where several fit equally well, earlier features explain more.
    """

    def __init__(self, features: int, decay: float) -> None:
        self._decay = decay
        self._products = [[0.0] * features for _ in range(features)]
        self._targets = [0.0] * features
        self._square = 0.0
        self.coefficients: tuple[float, ...] | None = None
        """None before the first observation."""

    def observe(self, features: Sequence[float], seconds: float, size: float) -> None:
        """Takes in how long something with these features took. An error counts in proportion to
        the size, so that what is large does not drown out what is small."""
        weight = 1.0 / (size * size)
        for i, left in enumerate(features):
            self._targets[i] = self._decay * self._targets[i] + weight * left * seconds
            for j, right in enumerate(features):
                self._products[i][j] = self._decay * self._products[i][j] + weight * left * right
        self._square = self._decay * self._square + weight * seconds * seconds
        self.coefficients = self._solve()

    def forget(self) -> None:
        """As before the first observation."""
        count = len(self._targets)
        self._products = [[0.0] * count for _ in range(count)]
        self._targets, self._square = [0.0] * count, 0.0
        self.coefficients = None

    def predict(self, features: Sequence[float]) -> float | None:
        """Seconds to expect; None before the first observation."""
        if self.coefficients is None:
            return None
        return sum(c * f for c, f in zip(self.coefficients, features, strict=True))

    def _solve(self) -> tuple[float, ...]:
        count = len(self._targets)
        best, best_error = (0.0,) * count, self._square
        for size in range(1, count + 1):
            for chosen in itertools.combinations(range(count), size):
                solution = _solve(
                    [[self._products[i][j] for j in chosen] for i in chosen],
                    [self._targets[i] for i in chosen],
                )
                if solution is None or min(solution) < 0:
                    continue
                error = self._square - sum(
                    c * self._targets[i] for c, i in zip(solution, chosen, strict=True)
                )
                # Others, or more of them, have to explain something.
                if error < best_error - _EXPLAINS * self._square:
                    full = [0.0] * count
                    for c, i in zip(solution, chosen, strict=True):
                        full[i] = c
                    best, best_error = tuple(full), error
        return best


def _solve(matrix: list[list[float]], target: list[float]) -> list[float] | None:
    """Solves a small symmetric system by elimination; None where it is singular."""
    size = len(target)
    # Scaled to ones on the diagonal, so that one ridge suits tokens and bytes alike.
    scale = [matrix[i][i] ** 0.5 for i in range(size)]
    if min(scale) <= 0:
        return None
    rows = [
        [matrix[i][j] / (scale[i] * scale[j]) + (_RIDGE if i == j else 0.0) for j in range(size)]
        + [target[i] / scale[i]]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda row: abs(rows[row][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < 1e-12:
            return None
        for other in range(size):
            if other != i:
                factor = rows[other][i] / rows[i][i]
                rows[other] = [a - factor * b for a, b in zip(rows[other], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] / scale[i] for i in range(size)]


class Prefill:
    """How long the engine takes to compute tokens of prompts, under the load that it has.

    A step takes so long at all, so long for each token, and so long for each pair of a token and
    one that it attends to. What it computes for other requests is in the first of these.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens_per_step = tokens_per_step
        self._fit = Fit(3, _STEP_DECAY)

    def observe(self, tokens: int, pairs: int, seconds: float) -> None:
        """A step computed `tokens` tokens of prompts, which attended to `pairs` tokens in sum."""
        features = tokens, pairs, 1
        expected = self._fit.predict(features)
        if tokens >= _LONG_STEP and expected is not None and seconds < expected / _WARMED_UP:
            self._fit.forget()
        self._fit.observe(features, seconds, tokens + _SHORT_STEP)

    def step_tokens(self, tokens: int) -> int:
        """Tokens of the first step that computes so many."""
        return min(tokens, self._tokens_per_step)

    def seconds(self, first: int, end: int) -> float | None:
        """Time to compute a prompt's tokens from `first` to `end`; None if nothing is known yet."""
        tokens = end - first
        steps = -(-tokens // self._tokens_per_step)
        return self._fit.predict((tokens, attended(first, end), steps))


def attended(first: int, end: int) -> int:
    """Tokens that the tokens from `first` to `end` attend to, each all before it and itself.

    >>> attended(0, 3)
    6
    """
    return (end * (end + 1) - first * (first + 1)) // 2


class Tier:
    """How long loads from one tier take, queueing included."""

    def __init__(self) -> None:
        self._fit = Fit(2, _LOAD_DECAY)
        self._fitted = 0
        """Loads that it is made of."""
        self._queued = 0
        self.observed = 0
        """Loads that are known, since the tier was last doubted."""
        self.is_doubted = False
        """Whether what was known has proved wrong, and nothing is known yet instead."""
        self.deviation = 0.0
        """Seconds by which loads are off what was expected of them, on average."""

    def begin(self, num_bytes: int) -> int:
        """A load of so many bytes begins; returns the bytes up to its end, in their order."""
        self._queued += num_bytes
        return self._queued

    def end(self, num_bytes: int) -> None:
        """A load of so many bytes is over, whatever became of it."""
        self._queued -= num_bytes

    def observe(self, num_bytes: int, seconds: float) -> None:
        """So many bytes took so long; without any, that is what each load takes at least."""
        expected = self._fit.predict((num_bytes, 1))
        if expected is not None:
            if self._is_changed(expected, seconds):
                # What was before, with this, would be taken for a latency: loads of other sizes
                # would be expected to take as long as this.
                self._forget()
                if seconds < expected:
                    # It may be well again: that is measured at once.
                    self.observed = 0
            self.deviation += _DEVIATION_SHARE * (abs(seconds - expected) - self.deviation)
        self._fit.observe((num_bytes, 1), seconds, num_bytes + _SMALL_LOAD)
        self._fitted += 1
        self.observed += 1
        self.is_doubted = False

    def _is_changed(self, expected: float, seconds: float) -> bool:
        # Known of two sizes at least, or it would be latency that was taken for bandwidth.
        is_near = self._fitted < 2 or abs(seconds - expected) <= 4 * self.deviation
        return not is_near and not expected / _CHANGED <= seconds <= expected * _CHANGED

    def _forget(self) -> None:
        self._fit.forget()
        self._fitted = 0

    def doubt(self) -> None:
        """Forgets what is known: it has proved wrong."""
        self._forget()
        self.observed, self.is_doubted, self.deviation = 0, True, 0.0

    def seconds(self, num_bytes: int) -> float | None:
        """Time until a load of so many bytes ends, if it begins now, behind those under way; None
        if nothing is known yet, infinite if it is doubted."""
        if self.is_doubted:
            return math.inf
        return self._fit.predict((self._queued + num_bytes, 1))


@dataclass(frozen=True)
class Choice:
    """What to do about a run of tokens that could be loaded."""

    end: int
    """Load up to this token; the run's beginning if nothing is to be loaded."""
    load: float | None
    """Expected time of the load; None if it is not known."""
    recompute: float | None
    """Expected time to compute what is not loaded, if nothing were; None if it is not known."""


def choose(
    first: int, ends: Sequence[tuple[int, float | None]], prompt: int, prefill: Prefill
) -> Choice:
    """How much of a run of tokens to load, so that the prompt is computed soonest.

    `ends` are where loads may end, from the nearest, each with the expected time of a load from
    `first` to there. A load's time grows evenly with its length and saves ever more with each token
    (attention), so nothing between two ends of tiers is better than both of them. Where something
    is not known yet, loading is how it is found out.

    >>> prefill = Prefill(1000)
    >>> prefill.observe(1000, 0, 1.0)
    >>> choose(0, [(400, 0.1), (800, 0.7)], 1000, prefill).end
    400
    >>> choose(0, [(400, 0.5)], 1000, prefill).end
    0
    """
    recompute = prefill.seconds(first, prompt)
    furthest, load = ends[-1]
    if recompute is None or any(seconds is None for _, seconds in ends):
        return Choice(furthest, load, recompute)
    best = Choice(first, None, recompute)
    least = recompute
    for end, seconds in ends:
        total = (seconds or 0.0) + (prefill.seconds(end, prompt) or 0.0)
        if total <= least:
            best, least = Choice(end, seconds, recompute), total
    return best


def patience(choice: Choice, first: float | None, deviation: float) -> float | None:
    """How long to wait for the first of a load before all is recomputed; None if nothing is known.

    `first` is when that is expected, and `deviation` how far off such expectations are; as with
    TCP's retransmission timer (RFC 6298) four times that is waited on top. With what has come a
    load gets more time, in proportion, which the engine sees to: so this is what a load costs that
    does not pay. A load that saves much is worth waiting for even if such loads were never late:
    giving it up loses what it saves, waiting in vain a fraction of that, once, as the pool is in
    doubt then.

    >>> round(patience(Choice(100, 0.5, 2.0), 0.125, 0.01), 4)
    0.3125
    >>> round(patience(Choice(100, 1.9, 2.0), 0.125, 0.01), 3)
    0.225
    """
    if choice.recompute is None:
        return None
    if first is None:
        return max(_FIRST_SHARE * choice.recompute, _LEAST_SLACK)
    saved = choice.recompute - (choice.load or 0.0)
    late = max(_SLACK * choice.recompute, _LEAST_SLACK) + min(4 * deviation, choice.recompute / 4)
    return first + max(late, _FIRST_SHARE * saved)
