"""What one vLLM process stores and another one loads: times of both, connector by connector.

All engines of a phase are alive at once. They are asked in turn, one request at a time, and each
prompt begins with another engine. Between two requests the machine comes to rest.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benches.shared import quiet
from benches.shared.connectors import Connector
from benches.shared.engines import KV_BYTES, connected
from benches.shared.report import median_ratio, progress
from benches.shared.rows import groups, rotated
from benches.shared.systems import BASELINE
from lab.engines.node import Answer, Node
from lab.models.prompts import tokens

CHECKED_TOKENS = 8
LEAST_MEMORY = 1 << 30
"""Bytes that must stay available. Figures of a machine that swaps mean nothing."""


@dataclass
class Seen:
    """Times of one row with prompts of one length, in seconds, one for each prompt."""

    cold: list[float] = field(default_factory=list)
    """First process: the prompt is not stored yet."""
    after: list[float] = field(default_factory=list)
    """First process: the same prompt again, at once."""
    load: list[float] = field(default_factory=list)
    """Second process, which has not seen the prompt."""
    hit: list[float] = field(default_factory=list)
    """Second process, baseline only: its own prefix cache."""
    loaded: list[int] = field(default_factory=list)
    """Prompt tokens that vLLM counts as cached in `load`."""
    outputs: list[Answer] = field(default_factory=list, repr=False)
    """The timed answer, and the next answer, which uses the same blocks: two for each prompt."""


class Row:
    """A connector, and its times by prompt length."""

    def __init__(self, connector: Connector, lengths: Sequence[int]) -> None:
        self.connector = connector
        self.seen = {length: Seen() for length in lengths}
        self.failure: str | None = None

    def fail(self, error: Exception) -> None:
        """Leaves the row out from now on."""
        self.failure = f"{type(error).__name__}: {str(error)[-2000:]}"
        progress(f"{self.connector.label} failed: {self.failure}")


@dataclass(frozen=True)
class Prompt:
    """A prompt that no engine has seen before."""

    tokens: list[int]
    counts: bool
    """Whether it is measured, or warms up."""


def prompts(lengths: Sequence[int], repetitions: int, seed: int, token_bytes: int) -> list[Prompt]:
    """Prompts of all lengths.

    The first ones are warm-up. They use the whole KV cache of an engine. The system supplies its
    pages at their first use, slowly. An engine that has served for a while has them.
    """
    warm_ups = -(-KV_BYTES // (token_bytes * sum(lengths)))
    return [
        Prompt(tokens(length, f"{seed}/{length}/{number}"), number >= warm_ups)
        for number in range(warm_ups + repetitions)
        for length in lengths
    ]


class Group:
    """Rows that are measured together. The baseline is one of them."""

    def __init__(self, model: Path, dtype: str, rows: dict[str, Row], folder: Path) -> None:
        self._model = model
        self._dtype = dtype
        self.rows = rows
        self._folder = folder
        self.restless = 0
        """Number of requests before which the machine did not come to rest in time."""

    def run(self, prompts: Sequence[Prompt]) -> None:
        """Measures both processes of every row."""
        with contextlib.ExitStack() as servers:
            for name, row in self.rows.items():
                servers.callback(row.connector.stop)
                with self._failing(name):
                    row.connector.start(self._folder)
            with self._engines("first") as nodes:
                self._each("first", nodes, prompts, self._first)
                quiet.wait(at_least=3)
            for name in self._running():
                self.rows[name].connector.between()
            with self._engines("second") as nodes:
                self._each("second", nodes, prompts, self._second)

    def _running(self) -> list[str]:
        return [name for name, row in self.rows.items() if row.failure is None]

    def _each(
        self,
        which: str,
        nodes: dict[str, Node],
        prompts: Sequence[Prompt],
        measure: Callable[[Node, Row, Prompt], None],
    ) -> None:
        for number, prompt in enumerate(prompts):
            for name in rotated(self._running(), number):
                with self._failing(name):
                    measure(nodes[name], self.rows[name], prompt)
            progress(f"{which} process: prompt {number}, {len(prompt.tokens)} tokens")

    def _first(self, node: Node, row: Row, prompt: Prompt) -> None:
        self._rest()
        cold, after = (node.ask(prompt.tokens, max_tokens=1).seconds for _ in range(2))
        if prompt.counts:
            seen = row.seen[len(prompt.tokens)]
            seen.cold.append(cold)
            seen.after.append(after)

    def _second(self, node: Node, row: Row, prompt: Prompt) -> None:
        row.connector.warm()
        self._rest()
        load = timed = node.ask(prompt.tokens, max_tokens=1)
        if is_baseline := row is self.rows[BASELINE]:
            self._rest()
            timed = node.ask(prompt.tokens, max_tokens=1)
        follow = node.ask(prompt.tokens, max_tokens=CHECKED_TOKENS)
        if prompt.counts:
            seen = row.seen[len(prompt.tokens)]
            seen.load.append(load.seconds)
            seen.loaded.append(load.cached)
            seen.outputs += [timed, follow]
            if is_baseline:
                seen.hit.append(timed.seconds)

    def _rest(self) -> None:
        self.restless += not quiet.wait(timeout=3)

    @contextlib.contextmanager
    def _engines(self, which: str) -> Iterator[dict[str, Node]]:
        """Starts an engine for every row that has not failed, two at a time."""
        nodes: dict[str, Node] = {}
        with contextlib.ExitStack() as ending:
            for pair in groups(self._running(), 2):
                for name in pair:
                    log = self._folder / f"{name}-{which}.log"
                    connector = self.rows[name].connector
                    nodes[name] = connected(self._model, log, connector, self._dtype)
                    ending.callback(nodes[name].stop)
                for name in pair:
                    with self._failing(name):
                        nodes[name].wait_ready()
                left = available_bytes()
                progress(f"{which} process of {', '.join(pair)}: {left >> 20} MiB left")
                if left < LEAST_MEMORY:
                    raise MemoryError("too many engines at once: measure fewer rows together")
            yield nodes

    @contextlib.contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        """A row that fails is reported and left out. If the baseline fails, the bench ends."""
        try:
            yield
        except Exception as error:
            if name == BASELINE:
                raise
            self.rows[name].fail(error)


def available_bytes() -> int:
    """Memory that programs can still get without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def summary(name: str, rows: dict[str, Row]) -> dict[str, Any]:
    """A row's medians in seconds, and ratios to the baseline, prompt by prompt."""
    row = rows[name]
    found: dict[str, Any] = {"row": name, "label": row.connector.label, "failure": row.failure}
    if row.failure is not None:
        return found
    for length, seen in row.seen.items():
        base = rows[BASELINE].seen[length]
        outputs = list(zip(seen.outputs, base.outputs, strict=True))
        found[str(length)] = {
            "load": statistics.median(seen.load),
            "hit": statistics.median(base.hit),
            "load_to_floor": median_ratio(seen.load, base.hit),
            "recompute_to_load": median_ratio(base.load, seen.load),
            "cold_to_plain": median_ratio(seen.cold, base.cold),
            "after_to_plain": median_ratio(seen.after, base.after),
            "cold": statistics.median(seen.cold),
            "after": statistics.median(seen.after),
            "least_loaded_tokens": min(seen.loaded),
            "outputs": len(outputs),
            "same_tokens": sum(own.tokens == theirs.tokens for own, theirs in outputs),
            "same_bits": sum(own.text == theirs.text for own, theirs in outputs),
            "largest_logprob_difference": max(
                abs(a - b)
                for own, theirs in outputs
                for a, b in zip(own.logprobs, theirs.logprobs, strict=True)
            ),
            "each": {of: getattr(seen, of) for of in ("cold", "after", "load", "hit")},
        }
    return found
