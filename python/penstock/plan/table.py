"""The tables of a plan, the same on the command line and in the engine's log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

from rich.console import Console
from rich.table import Table

from penstock.plan.kv import tokens_in
from penstock.plan.split import Split

_LOG_WIDTH = 120


@dataclass(frozen=True)
class RankFacts:
    """What does not depend on the split; `weights` is None where nobody knows."""

    name: str
    layers: str
    block_bytes: int
    weights: int | None = None


@dataclass(frozen=True)
class Outcome:
    """A split, and what it holds."""

    name: str
    split: Split
    tokens: int
    concurrency: float
    """Requests of the greatest length that fit."""
    rank_concurrency: tuple[float | None, ...]
    """Those that each rank's bytes would hold if no other rank held fewer; None where a rank keeps
    no KV."""
    starts: bool
    """Whether that is enough for vLLM to start: one such request, and the block it keeps back."""

    @classmethod
    def of(
        cls,
        name: str,
        split: Split,
        block_bytes: Sequence[int],
        request_blocks: int,
        max_length: int,
    ) -> Outcome:
        """What a split holds.

        Args:
            block_bytes: bytes of a block on each rank.
            request_blocks: blocks of a request of the greatest length.
            max_length: tokens of such a request.
        """
        by_rank = tuple(
            given // need / request_blocks if need else None
            for given, need in zip(split.given, block_bytes, strict=True)
        )
        return cls(
            name,
            split,
            tokens_in(split.blocks, request_blocks, max_length),
            split.blocks / request_blocks,
            by_rank,
            split.blocks > request_blocks,
        )


def splits(ranks: Sequence[RankFacts], outcomes: Sequence[Outcome]) -> Table:
    """A row a rank, with what each split gives it and how many of the longest requests that holds;
    then a row for all ranks."""
    table = Table(box=None, pad_edge=False)
    table.add_column("rank")
    weighed = all(rank.weights is not None for rank in ranks)
    for name in ("layers", *(["weights"] if weighed else []), "KV a block"):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        table.add_column(f"{outcome.name}: KV", justify="right")
        table.add_column("idle", justify="right")
        table.add_column("requests", justify="right")
    for number, rank in enumerate(ranks):
        cells = [rank.name, rank.layers]
        cells += [size(rank.weights or 0)] if weighed else []
        cells.append(size(rank.block_bytes))
        for outcome in outcomes:
            requests = outcome.rank_concurrency[number]
            cells += [size(outcome.split.given[number]), size(outcome.split.idle[number])]
            cells.append("" if requests is None else f"{requests:.2f}x")
        table.add_row(*cells)
    cells = ["all", ""]
    cells += [size(sum(rank.weights or 0 for rank in ranks))] if weighed else []
    cells.append(size(sum(rank.block_bytes for rank in ranks)))
    held = ["tokens", *[""] * (3 if weighed else 2)]
    for outcome in outcomes:
        cells += [size(sum(outcome.split.given)), size(sum(outcome.split.idle))]
        cells.append(f"{outcome.concurrency:.2f}x" + ("" if outcome.starts else " (!)"))
        held += [f"{outcome.tokens:,}", "", ""]
    table.add_row(*cells)
    table.add_row(*held)
    table.caption = "requests: how many of the longest fit; the rank with the fewest decides"
    if not all(outcome.starts for outcome in outcomes):
        table.caption += "\n(!) less than the longest request: vLLM would not start"
    table.caption_justify = "left"
    return table


def as_text(table: Table) -> str:
    """The table for a log, without colours."""
    out = StringIO()
    Console(file=out, width=_LOG_WIDTH, no_color=True, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def size(nbytes: int) -> str:
    """Bytes in binary units, to three decimals: what differs by a block shows.

    >>> size(0), size(1536), size(10 << 30)
    ('0', '1.5 KiB', '10 GiB')
    """
    if not nbytes:
        return "0"
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3f}".rstrip("0").rstrip(".") + f" {unit}"
        value /= 1024
    return f"{value:.3f}".rstrip("0").rstrip(".") + " TiB"
