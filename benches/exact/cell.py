"""A cell of the matrix: a family of models, a pool, and what happens to them."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benches.exact.families import ROOT_BLOCKS, Family
from benches.exact.pools import Pool
from benches.exact.reference import ANSWER_TOKENS, Reference
from lab.engines.forks import Fork
from lab.engines.node import Answer, Node

EXAMPLES = 3
"""Differing answers that a result shows in full."""


@dataclass(frozen=True)
class Looked:
    """A prompt that was asked for alone, and what came of it."""

    prompt: tuple[int, ...]
    answer: Answer
    loaded: int
    """Its tokens that vLLM counts as coming from the connector."""
    failed: int
    """Blocks that were to be loaded and could not be."""


_COUNTED = {
    "num_preemptions": "num_preemptions",
    "rejected_objects": "rejected_objects",
    "load_failed_blocks": "load_failed_blocks",
    "spec_decode_num_draft_tokens": "drafted_tokens",
    "spec_decode_num_accepted_tokens": "accepted_tokens",
}
"""Counters of an engine that a cell shows, and their names there."""


class Engines:
    """The engine processes with a pool, one at a time. The last one goes on with the next fault if
    its options are the same: to start is most of the time."""

    def __init__(self, family: Family, model: Path, pool: Pool, folder: Path) -> None:
        self.family = family
        self._model = model
        self.pool = pool
        self._folder = folder
        self.started = 0
        self._node: Node | None = None
        self._options: dict[str, Any] = {}

    def get(self, **options: Any) -> Node:
        """The engine, which is a new one if there is none with these options."""
        if self._node is None or options != self._options:
            self.close()
            self.started += 1
            self._options = options
            log = self._folder / f"engine-{self.started}.log"
            every = {"launch": Fork, **self.family.engine, **self.pool.options(), **options}
            self._node = Node(self._model, log, **every)
            self._node.wait_ready()
        return self._node

    def kill(self) -> None:
        """Ends it at once, whatever it is doing."""
        if self._node is not None:
            self._node.kill()
            self._node = None

    def close(self) -> None:
        """Ends it as vLLM would."""
        if self._node is not None:
            self._node.stop()
            self._node = None


@dataclass
class Cell:
    """What engines answered while a fault happened."""

    engines: Engines
    goal: int
    """Hits that are wanted."""
    seconds: float
    """It gives up after so long."""
    looked: list[Looked] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    """What shows that the fault happened."""
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self._began = time.monotonic()

    @property
    def family(self) -> Family:
        """The kind of model."""
        return self.engines.family

    @contextlib.contextmanager
    def engine(self, **options: Any) -> Iterator[Node]:
        """An engine with the pool."""
        node = self.engines.get(**options)
        before = node.counters()
        yield node
        after = node.counters()
        for counter, name in _COUNTED.items():
            if counter in after:
                self.seen[name] += int(after[counter] - before.get(counter, 0))

    @property
    def hits(self) -> int:
        """Loaded hits so far."""
        return sum(each.loaded > 0 and not each.failed for each in self.looked)

    @property
    def wants_more(self) -> bool:
        """Whether hits are missing, and there is time to look for them."""
        late = time.monotonic() - self._began > self.seconds
        return self.hits < self.goal and not late

    def root(self, number: int) -> list[int]:
        """A prompt to store. All cells of a family have the same."""
        count = ROOT_BLOCKS * self.family.block + 1 + number % 7
        return self.family.tokens(count, f"root {number}")

    def part(self, number: int, blocks: int) -> list[int]:
        """The beginning of a root: so many blocks, and some tokens that no block is full of."""
        rng = random.Random(f"part {number} {blocks}")
        longest = self.family.block - 1 if blocks < ROOT_BLOCKS else 1
        return self.root(number)[: blocks * self.family.block + rng.randint(1, longest)]

    def parts(self, number: int) -> list[list[int]]:
        """All beginnings of a root, the longest first. What is missing of a longer one is stored
        by it."""
        return [self.part(number, blocks) for blocks in range(ROOT_BLOCKS, 0, -1)]

    def store(self, node: Node, number: int) -> None:
        """Has a root computed, alone, and stored."""
        node.ask(self.root(number), max_tokens=1)

    def look(self, node: Node, prompt: list[int], *, forget: bool = True) -> Looked:
        """Asks for a prompt that the engine itself has forgotten, alone."""
        if forget:
            node.forget()
        before = node.counters()
        answer = node.ask(prompt, max_tokens=ANSWER_TOKENS)
        after = node.counters()

        def more(name: str) -> int:
            return int(after.get(name, 0) - before.get(name, 0))

        looked = Looked(
            tuple(prompt), answer, more("external_prefix_cache_hits"), more("load_failed_blocks")
        )
        self.looked.append(looked)
        return looked


def compare(cell: Cell, reference: Reference) -> dict[str, Any]:
    """Every answer of a cell against vLLM's own."""
    counts: Counter[str] = Counter()
    lengths: Counter[int] = Counter()
    examples: list[dict[str, Any]] = []
    for each in cell.looked:
        prompt, cached = list(each.prompt), each.answer.cached
        if not each.answer.tokens:
            # What vLLM does by default with a request whose load fails: it ends with an error.
            counts["unanswered"] += 1
            continue
        kind = "rejected" if each.failed else "hits" if each.loaded else "computed"
        counts[kind] += 1
        if kind == "hits":
            lengths[cached] += 1
        length = cached - cached % cell.family.block
        counts["no_own_hit"] += length != cached
        own = reference.own_hit(prompt, length)
        if each.answer.text == own.text:
            continue
        # What was rejected could be used in part; nobody says how far.
        if each.failed and any(
            each.answer.text == reference.own_hit(prompt, shorter).text
            for shorter in range(length - cell.family.block, -1, -cell.family.block)
        ):
            continue
        counts[f"{kind}_differ"] += 1
        counts[f"{kind}_differ_in_tokens"] += each.answer.tokens != own.tokens
        if len(examples) < EXAMPLES:
            examples.append(
                {
                    "kind": kind,
                    "prompt_tokens": len(prompt),
                    "cached": cached,
                    "loaded": each.loaded,
                    "tokens": each.answer.tokens,
                    "own_tokens": own.tokens,
                    "logprobs": each.answer.logprobs,
                    "own_logprobs": own.logprobs,
                }
            )
    kinds = ("hits", "rejected", "computed")
    wanted = [*(name for kind in kinds for name in (kind, f"{kind}_differ")), "unanswered"]
    return {
        **{name: counts[name] for name in wanted},
        **{name: count for name, count in sorted(counts.items()) if name not in wanted},
        "hits_by_cached_tokens": {str(length): lengths[length] for length in sorted(lengths)},
        "seen": dict(cell.seen),
        "examples": examples,
    }
