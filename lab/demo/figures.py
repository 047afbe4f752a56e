"""The demo's figures. Its table, its JSON and its report all come from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.demo.engine import Counters
from lab.demo.replay import Comparison, Situation
from lab.latency import Latency


@dataclass(frozen=True)
class Row:
    """The figures of all requests in one situation."""

    situation: Situation
    requests: int
    prompt_tokens: int
    loaded_tokens: int
    local_tokens: int
    penstock: Latency
    recomputed: Latency
    """Times of the same prompts without Penstock and without a prefix cache."""


@dataclass(frozen=True)
class Hits:
    """Shares of the prompts' whole blocks that the nodes did not have to compute."""

    found: float
    declined: float
    """The share that the pool had, and that the nodes computed as this seemed faster."""
    late: float
    """The share that was computed since a load broke off, as it had become slower than that."""
    expected: float
    """The share that `penstock simulate` expects to be found. It takes every load to be worth its
    time, so `found`, `declined` and `late` together should be as much."""


@dataclass(frozen=True)
class Figures:
    """The figures of one run of the demo."""

    workload: str
    cuts: tuple[str, ...]
    pool: str
    """The pool's URL, without secrets."""
    environment: dict[str, str]
    rows: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]
    moved: Counters
    """Tokens and bytes that both nodes together loaded and stored."""
    hits: Hits | None = None
    """Only for a trace, where no prompt contains an earlier answer: the simulator knows only
    prompts."""

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(row.prompt_tokens for row in self.rows)

    @property
    def differing(self) -> tuple[Comparison, ...]:
        """The requests whose output differs from the output without Penstock."""
        return tuple(comparison for comparison in self.comparisons if not comparison.equal)

    @property
    def failures(self) -> tuple[str, ...]:
        """Why the demo failed, in words; empty if it did not fail."""
        found = []
        if self.differing:
            found.append(
                f"{len(self.differing)} of {len(self.comparisons)} outputs differ from those of "
                "the run without Penstock"
            )
        if self.moved.loaded_tokens == 0:
            found.append("nothing was loaded from the pool")
        return tuple(found)

    def row(self, situation: Situation) -> Row | None:
        """The row of a situation, if any request met it."""
        return next((row for row in self.rows if row.situation is situation), None)

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values; times in seconds, sizes in bytes."""
        return {
            "workload": self.workload,
            "cuts": list(self.cuts),
            "pool": self.pool,
            "environment": self.environment,
            "requests": len(self.comparisons),
            "prompt_tokens": self.prompt_tokens,
            "loaded_tokens": self.moved.loaded_tokens,
            "loaded_bytes": self.moved.loaded_bytes,
            "stored_bytes": self.moved.stored_bytes,
            "outputs_equal": len(self.comparisons) - len(self.differing),
            "failures": list(self.failures),
            "hit_ratio": self.hits
            and {
                "found": self.hits.found,
                "declined": self.hits.declined,
                "late": self.hits.late,
                "simulated": self.hits.expected,
            },
            "time_to_first_token": {
                row.situation.value: {
                    "requests": row.requests,
                    "prompt_tokens": row.prompt_tokens,
                    "loaded_tokens": row.loaded_tokens,
                    "local_tokens": row.local_tokens,
                    "penstock_p50": row.penstock.p50,
                    "penstock_p99": row.penstock.p99,
                    "recomputed_p50": row.recomputed.p50,
                    "recomputed_p99": row.recomputed.p99,
                }
                for row in self.rows
            },
        }


def summarise(
    workload: str,
    cuts: Sequence[str],
    pool: str,
    environment: dict[str, str],
    comparisons: Sequence[Comparison],
    moved: Counters,
    hits: Hits | None = None,
) -> Figures:
    """The figures of a run."""
    rows = []
    for situation in Situation:
        met = [each for each in comparisons if each.exchange.situation is situation]
        if met:
            rows.append(
                Row(
                    situation,
                    len(met),
                    sum(len(each.exchange.prompt) for each in met),
                    sum(each.exchange.loaded_tokens for each in met),
                    sum(each.exchange.local_tokens for each in met),
                    Latency.of([each.exchange.answer.first_token for each in met]),
                    Latency.of([each.reference.first_token for each in met]),
                )
            )
    return Figures(
        workload, tuple(cuts), pool, environment, tuple(rows), tuple(comparisons), moved, hits
    )
