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
    """The facts about a rank that do not depend on the split. `weights` is None if unknown."""

    name: str
    layers: str
    block_bytes: int
    weights: int | None = None


@dataclass(frozen=True)
class Outcome:
    """A split, with the tokens and requests that it holds."""

    name: str
    split: Split
    tokens: int
    concurrency: float
    """How many requests of the greatest length fit."""
    rank_concurrency: tuple[float | None, ...]
    """By rank: how many such requests would fit if only this rank's bytes counted. None for a rank
    that keeps no KV."""
    starts: bool
    """Whether the blocks are enough for vLLM to start. It needs one such request, and the block
    that it keeps back."""

    @classmethod
    def of(
        cls,
        name: str,
        split: Split,
        block_bytes: Sequence[int],
        request_blocks: int,
        max_length: int,
    ) -> Outcome:
        """The outcome of a split.

        Args:
            block_bytes: bytes of a block on each rank.
            request_blocks: blocks of a request of the greatest length.
            max_length: tokens of a request of the greatest length.
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
    """The table of splits: a row for each rank, then rows for all ranks together.

    A row has, for each split, the bytes that the rank gets and how many of the longest requests
    these bytes hold."""
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
    """The table as text for a log, without colours."""
    out = StringIO()
    Console(file=out, width=_LOG_WIDTH, no_color=True, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def size(nbytes: int) -> str:
    """Bytes in binary units, with up to three decimals, so that a difference of one block shows.

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
