"""A pretended engine over a pretended network, in pretended time: what the advisor makes of it.

Arithmetic only. The real ones are in `tests/e2e/test_load_policy.py` and `benches/load_policy.py`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from penstock.vllm.advisor import Advisor, Reach, attended

TOKENS = 128
"""A block's."""

LOOKUP_TIMEOUT = 0.25
"""Seconds."""


@dataclass
class PretendedEngine:
    """It is asked for one stored prompt after the other, every few seconds."""

    seed: int = 1
    blocks: int = 12
    block_bytes: int = 2 << 20
    seconds_per_token: float = 0.0012
    seconds_per_step: float = 0.0
    noise: float = 0.15
    """All times vary up to that share."""
    lanes: int = 2
    latency: float = 0.0
    bytes_per_second: float = 1e9
    warm_up: float = 1.0
    """How many times longer the first prompt takes to compute."""
    rate_per_lane: bool = False
    """Whether each connection has that rate to itself."""
    now: float = 0.0
    last: str = ""
    """What became of the last request, for a failing test to tell."""
    lookup_seconds: float | None = None
    """What the last look-up took."""
    _numbers: int = 0
    _random: random.Random = field(init=False)
    advisor: Advisor = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.advisor = Advisor(2048, self.lanes)
        for slowness in (self.warm_up, 1.0, 1.0):
            self._compute(0, slowness)

    @property
    def recomputation(self) -> float:
        """Mean seconds that a prompt takes to compute."""
        seconds = self.seconds_per_step + self._prompt * self.seconds_per_token
        return seconds * (1 + self.noise / 2)

    @property
    def load(self) -> float:
        """Mean seconds that a look-up and a load take, and what is left to compute."""
        if self.latency > LOOKUP_TIMEOUT:
            return math.inf
        rest = (self._prompt - self.blocks * TOKENS) * self.seconds_per_token
        return self.latency + max(self._arrivals(self.blocks)) + rest

    @property
    def _prompt(self) -> int:
        return self.blocks * TOKENS + 30

    def _varied(self, seconds: float) -> float:
        return seconds * (1 + self.noise * self._random.random())

    def _arrivals(self, blocks: int) -> list[float]:
        """When each comes: lanes wait out the latency for each block."""
        seconds = []
        for block in range(blocks):
            turns = block // self.lanes + 1
            shared = 1 if self.rate_per_lane else self.lanes
            moved = min(turns * shared, blocks) * self.block_bytes
            seconds.append(self._varied(turns * self.latency + moved / self.bytes_per_second))
        return sorted(seconds)

    def _compute(self, first: int, slowness: float = 1.0) -> float:
        tokens, seconds = self._prompt - first, 0.0
        self._numbers += 1
        self.advisor.on_step(self.now, self._numbers, tokens, attended(first, self._prompt))
        seconds = self.seconds_per_step + tokens * self.seconds_per_token
        seconds = slowness * self._varied(seconds)
        self.now += seconds
        self.advisor.on_output(self.now, [self._numbers])
        return seconds

    def ask(self) -> float:
        """Seconds to the first token of a prompt that is in the pool."""
        self.now += 3.0
        load_bytes, end = self.blocks * self.block_bytes, self.blocks * TOKENS
        waited, is_answered = self._look_up(Reach(end, 0, load_bytes))
        self.now += waited
        if not is_answered:
            blocks = 0 if self.lookup_seconds == math.inf else self._probe()
            self.last = f"not waited for, {blocks} blocks probed"
            return waited + self._compute(0)
        return waited + self._answered(load_bytes, end)

    def _look_up(self, reach: Reach) -> tuple[float, bool]:
        """Seconds that were waited for the look-up's answer, and whether it came meanwhile."""
        awaits = self.advisor.awaits_lookup(0, reach, self._prompt, self.lookup_seconds)
        took = min(self._varied(self.latency), LOOKUP_TIMEOUT)
        self.lookup_seconds = took if took < LOOKUP_TIMEOUT else math.inf
        return (took, took < LOOKUP_TIMEOUT) if awaits else (0.0, False)

    def _probe(self) -> int:
        """Blocks that are fetched beside the computation."""
        reach = Reach(self.blocks * TOKENS, 0, self.blocks * self.block_bytes)
        block = self.block_bytes, 1
        blocks = self.advisor.wants_probe(self.now, 0, reach, self._prompt, block)
        blocks = min(blocks, self.blocks)
        if blocks:
            self._numbers += 1
            probed = blocks * self.block_bytes
            self.advisor.on_begin(self.now, self._numbers, 0, probed, is_probe=True)
            self.advisor.on_end(self._numbers, self._arrivals(blocks)[-1], 0)
        return blocks

    def _answered(self, load_bytes: int, end: int) -> float:
        choice = self.advisor.advise(0, [Reach(end, 0, load_bytes)], self._prompt, may_check=True)
        if not choice.end:
            self.last = f"declined, {self._probe()} blocks probed"
            return self._compute(0)
        self._numbers += 1
        number = self._numbers
        patience = self.advisor.patience(choice, 0, load_bytes, self.blocks)
        self.advisor.on_begin(self.now, number, 0, load_bytes, patience=patience)
        took, there = self._load(patience, choice.recompute or 0.0)
        self.now += took
        self.advisor.on_end(number, took, load_bytes - there * self.block_bytes)
        self.last = f"{choice}, patience {patience}: {there} blocks in {took} s"
        return took + self._compute(there * TOKENS)

    def _load(self, patience: float | None, pace: float) -> tuple[float, int]:
        """Seconds until a load ends, and how much has come: as `Deadline::paced` has it."""
        arrivals = self._arrivals(self.blocks)
        if patience is None:
            return arrivals[-1], self.blocks
        for there, arrival in enumerate(arrivals):
            deadline = patience + pace * there / self.blocks
            if arrival > deadline:
                return deadline, there
        return arrivals[-1], self.blocks
