"""The figures of the demo with `--pd`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.demo.engine import Counters
from lab.demo.pd.load import Timed
from lab.demo.replay import BLOCK_TOKENS
from lab.latency import Latency, percentile


@dataclass(frozen=True)
class Row:
    """One system's figures, over all rounds."""

    name: str
    rounds: tuple[tuple[Timed, ...], ...]

    @property
    def answers(self) -> list[Timed]:
        """All answers, in the order of the prompts."""
        return [timed for some in self.rounds for timed in some]

    @property
    def first_token(self) -> Latency:
        """Times to the first token."""
        return Latency.of([timed.answer.first_token for timed in self.answers])

    @property
    def hand_over(self) -> Latency:
        """Times to the first token on the server that answers: without the prefill server's time,
        if prefill and decode are apart."""
        answers = [timed.answer for timed in self.answers]
        return Latency.of([answer.first_token - answer.waited for answer in answers])

    @property
    def between_tokens(self) -> Latency:
        """Times between two tokens of an answer."""
        return Latency.of(self._gaps)

    @property
    def longest_gap(self) -> float:
        """The longest time between two tokens of an answer."""
        return max(self._gaps)

    @property
    def whole_answer(self) -> Latency:
        """Times to the last token."""
        return Latency.of([timed.answer.seconds for timed in self.answers])

    def share_of_long_gaps(self, seconds: float) -> float:
        """The share of answers that stood still for more than `seconds` at least once."""
        answers = self.answers
        still = sum(max(gap for _, gap in timed.gaps) > seconds for timed in answers)
        return still / len(answers)

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """When each token but an answer's first came in its round, in seconds, and how long after
        the token before, in milliseconds."""
        return [(at, gap * 1e3) for timed in self.answers for at, gap in timed.gaps]

    @property
    def _gaps(self) -> list[float]:
        return [gap for timed in self.answers for _, gap in timed.gaps]

    def as_json(self) -> dict[str, Any]:
        """Plain values, in seconds."""
        gaps = self._gaps
        return {
            "requests": len(self.answers),
            "first_token_p50": self.first_token.p50,
            "first_token_p99": self.first_token.p99,
            "hand_over_p50": self.hand_over.p50,
            "hand_over_p99": self.hand_over.p99,
            "between_tokens_p50": self.between_tokens.p50,
            "between_tokens_p95": percentile(gaps, 0.95),
            "between_tokens_p99": self.between_tokens.p99,
            "between_tokens_max": self.longest_gap,
            "whole_answer_p50": self.whole_answer.p50,
            "whole_answer_p99": self.whole_answer.p99,
        }


@dataclass(frozen=True)
class Figures:
    """The figures of one run."""

    apart: Row
    round_robin: Row
    rate: float
    """Prompts a second."""
    prefill_share: float
    """The share of what the prefill servers can compute that this rate is."""
    pool: str
    environment: dict[str, str]
    moved: Counters
    """What the decode servers loaded, and what they stored."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(timed.prompt.tokens) for timed in self.apart.answers)

    @property
    def loadable_tokens(self) -> int:
        """Tokens in whole blocks before a prompt's last token: what a decode server can load."""
        return sum(
            (len(timed.prompt.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            for timed in self.apart.answers
        )

    @property
    def loaded_share(self) -> float:
        """The share of the prompts' whole blocks that the decode servers loaded."""
        return self.moved.loaded_tokens / max(1, self.loadable_tokens)

    @property
    def declined_share(self) -> float:
        """The share of those blocks that they computed, since that seemed faster."""
        return self.moved.declined_tokens / max(1, self.loadable_tokens)

    @property
    def late_share(self) -> float:
        """The share of those blocks that they began to load and then computed, since the load
        became slower than computing."""
        return self.moved.late_blocks * BLOCK_TOKENS / max(1, self.loadable_tokens)

    @property
    def differing(self) -> int:
        """Number of outputs that are not the same in both systems."""
        return sum(
            here.answer.tokens != there.answer.tokens
            for here, there in zip(self.apart.answers, self.round_robin.answers, strict=True)
        )

    @property
    def failures(self) -> tuple[str, ...]:
        """Why the demo failed, in words; empty if it did not fail."""
        found = []
        if self.differing:
            found.append(
                f"{self.differing} of {len(self.apart.answers)} outputs differ from those of the "
                "servers without Penstock"
            )
        if not self.moved.loaded_tokens:
            found.append("the decode server loaded nothing")
        return tuple(found)

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values; times in seconds, sizes in bytes."""
        return {
            "pool": self.pool,
            "environment": self.environment,
            "rate": self.rate,
            "prefill_share": self.prefill_share,
            "prompt_tokens": self.prompt_tokens,
            "loaded_tokens": self.moved.loaded_tokens,
            "loaded_bytes": self.moved.loaded_bytes,
            "loaded_share": self.loaded_share,
            "declined_share": self.declined_share,
            "late_share": self.late_share,
            "handovers_given_up": self.moved.handovers_given_up,
            "outputs_equal": len(self.apart.answers) - self.differing,
            "failures": list(self.failures),
            "systems": {row.name: row.as_json() for row in (self.apart, self.round_robin)},
        }


def row(name: str, rounds: Sequence[Sequence[Timed]]) -> Row:
    """One system's figures."""
    return Row(name, tuple(tuple(some) for some in rounds))
