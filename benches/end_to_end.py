"""Time to first token on the real vLLM, with every connector.

The first process computes a prompt and stores it. The second process loads it. All engines of a
phase are alive at once. They are asked in turn, one request at a time, and each prompt begins with
another engine. Between two requests the machine comes to rest. Before a load, its files are brought
into the page cache.

The floor is vLLM's own prefix-cache hit. The result says for how many outputs tokens and logprobs
are those of that hit. Run it as ``python -m benches.end_to_end``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benches import connectors, quiet, report
from benches.connectors import ENGINE_ENVIRONMENT, Connector
from benches.report import progress
from lab.engines.node import Answer, Node
from lab.models import attention
from lab.models.saved import VOCABULARY

BASELINE = "none"
BLOCK = 128
"""vLLM's default block size on CPU."""
CHECKED_TOKENS = 8
MODELS: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4},
    "mid": {"hidden": 1024, "layers": 16, "heads": 16, "kv_heads": 8},
}
KV_BYTES = 288 << 20
"""KV cache of every engine. One request of the longest length fits, in the larger data type."""
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
    outputs: list[tuple[Answer, Answer]] = field(default_factory=list, repr=False)
    """The timed answer, and the next answer, which uses the same blocks."""


@dataclass
class Row:
    """A connector, and its times by prompt length."""

    connector: Connector
    seen: dict[int, Seen]
    failure: str | None = None


class Prompts:
    """Prompts that no engine has seen before.

    The first ones, of repetition 0, are warm-up. They use the whole KV cache of an engine. The
    system supplies its pages at their first use, slowly. An engine that has served for a while has
    them.
    """

    def __init__(
        self, lengths: Sequence[int], repetitions: int, seed: int, token_bytes: int
    ) -> None:
        self.lengths = lengths
        self._seed = seed
        warm_ups = -(-KV_BYTES // (token_bytes * sum(lengths)))
        self._repetitions = [*([0] * warm_ups), *range(1, repetitions + 1)]

    def __iter__(self) -> Iterator[tuple[int, int, list[int]]]:
        for number, repetition in enumerate(self._repetitions):
            for length in self.lengths:
                rng = random.Random(f"{self._seed}/{length}/{number}")
                yield (
                    repetition,
                    length,
                    [rng.randrange(3, VOCABULARY) for _ in range(length)],
                )


class Group:
    """Rows that are measured together. The baseline is one of them."""

    def __init__(self, model: Path, dtype: str, rows: dict[str, Row], folder: Path) -> None:
        self._model = model
        self._dtype = dtype
        self.rows = rows
        self._folder = folder
        self.restless = 0
        """Number of requests before which the machine did not come to rest in time."""

    def run(self, prompts: Prompts) -> None:
        """Measures both processes of every row."""
        with contextlib.ExitStack() as servers:
            for row in self.rows.values():
                servers.callback(row.connector.stop)
                try:
                    row.connector.start(self._folder)
                except Exception as error:
                    self._fail(row, error)
            with self._engines("first") as nodes:
                for number, (repetition, length, prompt) in enumerate(prompts):
                    for name in self._turns(nodes, number):
                        with self._failing(name):
                            self._first(nodes[name], name, repetition, length, prompt)
                    progress(f"first process: prompt {number}, {length} tokens")
                quiet.wait(at_least=3)
            for row in self.rows.values():
                if row.failure is None:
                    row.connector.between()
            with self._engines("second") as nodes:
                for number, (repetition, length, prompt) in enumerate(prompts):
                    for name in self._turns(nodes, number):
                        with self._failing(name):
                            self._second(nodes[name], name, repetition, length, prompt)
                    progress(f"second process: prompt {number}, {length} tokens")

    def _turns(self, nodes: dict[str, Node], number: int) -> list[str]:
        names = [name for name in nodes if self.rows[name].failure is None]
        start = number % len(names)
        return names[start:] + names[:start]

    def _first(
        self, node: Node, name: str, repetition: int, length: int, prompt: list[int]
    ) -> None:
        self._rest()
        cold = node.ask(prompt, max_tokens=1).seconds
        after = node.ask(prompt, max_tokens=1).seconds
        if repetition:
            self.rows[name].seen[length].cold.append(cold)
            self.rows[name].seen[length].after.append(after)

    def _second(
        self, node: Node, name: str, repetition: int, length: int, prompt: list[int]
    ) -> None:
        self.rows[name].connector.warm()
        self._rest()
        load = node.ask(prompt, max_tokens=1)
        if name == BASELINE:
            self._rest()
            timed = node.ask(prompt, max_tokens=1)
        else:
            timed = load
        follow = node.ask(prompt, max_tokens=CHECKED_TOKENS)
        if repetition:
            seen = self.rows[name].seen[length]
            seen.load.append(load.seconds)
            seen.loaded.append(load.cached)
            seen.outputs.append((timed, follow))
            if name == BASELINE:
                seen.hit.append(timed.seconds)

    def _rest(self) -> None:
        self.restless += not quiet.wait(timeout=3)

    @contextlib.contextmanager
    def _engines(self, which: str) -> Iterator[dict[str, Node]]:
        """Starts an engine for every row that has not failed, two at a time."""
        nodes: dict[str, Node] = {}
        with contextlib.ExitStack() as ending:
            waiting = [name for name, row in self.rows.items() if row.failure is None]
            while waiting:
                pair, waiting = waiting[:2], waiting[2:]
                for name in pair:
                    nodes[name] = self._engine(which, name)
                    ending.callback(nodes[name].stop)
                for name in pair:
                    with self._failing(name):
                        nodes[name].wait_ready()
                left = available_bytes()
                progress(f"{which} process of {', '.join(pair)}: {left >> 20} MiB left")
                if left < LEAST_MEMORY:
                    raise MemoryError("too many engines at once: choose a smaller --together")
            yield {name: node for name, node in nodes.items() if not self.rows[name].failure}

    def _engine(self, which: str, name: str) -> Node:
        connector = self.rows[name].connector
        options: dict[str, Any] = {
            "dtype": self._dtype,
            "block_size": BLOCK,
            "kv_cache_memory_bytes": KV_BYTES,
        }
        if (transfer := connector.transfer()) is not None:
            options["kv_transfer_config"] = transfer
        log = self._folder / f"{name}-{which}.log"
        return Node(self._model, log, env=ENGINE_ENVIRONMENT | connector.environment(), **options)

    @contextlib.contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        """A row that fails is reported and left out. If the baseline fails, the bench ends."""
        try:
            yield
        except Exception as error:
            if name == BASELINE:
                raise
            self._fail(self.rows[name], error)

    def _fail(self, row: Row, error: Exception) -> None:
        row.failure = f"{type(error).__name__}: {str(error)[-2000:]}"
        progress(f"{row.connector.label} failed: {row.failure}")


def summary(name: str, row: Row, baseline: Row, lengths: Sequence[int]) -> dict[str, Any]:
    """Medians in seconds, and ratios to the baseline, prompt by prompt."""
    found: dict[str, Any] = {"row": name, "label": row.connector.label, "failure": row.failure}
    if row.failure is not None:
        return found
    for length in lengths:
        seen, base = row.seen[length], baseline.seen[length]
        pairs = [
            (own, theirs)
            for mine, base_output in zip(seen.outputs, base.outputs, strict=True)
            for own, theirs in zip(mine, base_output, strict=True)
        ]
        found[str(length)] = {
            "load": statistics.median(seen.load),
            "hit": statistics.median(base.hit),
            "load_to_floor": report.median_ratio(seen.load, base.hit),
            "recompute_to_load": report.median_ratio(base.load, seen.load),
            "cold_to_plain": report.median_ratio(seen.cold, base.cold),
            "after_to_plain": report.median_ratio(seen.after, base.after),
            "cold": statistics.median(seen.cold),
            "after": statistics.median(seen.after),
            "least_loaded_tokens": min(seen.loaded),
            "outputs": len(pairs),
            "same_tokens": sum(own.tokens == theirs.tokens for own, theirs in pairs),
            "same_bits": sum(own.text == theirs.text for own, theirs in pairs),
            "largest_logprob_difference": max(
                abs(a - b)
                for own, theirs in pairs
                for a, b in zip(own.logprobs, theirs.logprobs, strict=True)
            ),
            "each": {
                key: value
                for key, value in dataclasses.asdict(seen).items()
                if key in ("cold", "after", "load", "hit")
            },
        }
    return found


def tables(result: dict[str, Any], lengths: Sequence[int]) -> str:
    """One table for each model, in milliseconds."""
    heads = [
        "second process, ms",
        "to the floor",
        "first process, cold, to plain",
        "request right after, to plain",
        "same tokens as own hit",
        "same logprobs, bit for bit",
    ]

    def cells(row: dict[str, Any], pattern: str, key: str) -> str:
        return " / ".join(pattern.format(row[str(n)][key]) for n in lengths)

    def milliseconds(row: dict[str, Any], key: str) -> str:
        return " / ".join(f"{row[str(n)][key] * 1000:.0f}" for n in lengths)

    parts = []
    for model, rows in result["models"].items():
        lines = []
        for row in rows:
            if row["failure"] is not None:
                lines.append([row["label"], "failed", *[""] * 5])
                continue
            is_baseline = row["row"] == BASELINE
            lines.append(
                [
                    row["label"] + (": recompute" if is_baseline else ""),
                    milliseconds(row, "load"),
                    cells(row, "{:.2f}", "load_to_floor"),
                    "1" if is_baseline else cells(row, "{:.3f}", "cold_to_plain"),
                    "1" if is_baseline else cells(row, "{:.2f}", "after_to_plain"),
                    "" if is_baseline else cells(row, "{}", "same_tokens"),
                    "" if is_baseline else cells(row, "{}", "same_bits"),
                ]
            )
            if is_baseline:
                floor = "none: own prefix-cache hit (the floor)"
                lines.append([floor, milliseconds(row, "hit"), "1", *[""] * 4])
        title = f"{model}, prompts of {' / '.join(map(str, lengths))} tokens"
        parts.append(report.table([title, *heads], lines))
    return "\n\n".join(parts)


def run_model(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measures all rows with one model, in groups of `--together` engines."""
    every = connectors.every()
    others = [name for name in args.rows.split(",") if name != BASELINE]
    size = args.together - 1
    shape = MODELS[model]
    # As lab.models.attention builds it: keys and values of each layer; all heads make up hidden.
    head_size = shape["hidden"] // shape["heads"]
    values = 2 * shape["layers"] * shape["kv_heads"] * head_size
    token_bytes = values * (4 if args.dtype == "float32" else 2)
    summaries: list[dict[str, Any]] = []
    restless = 0
    for number, first in enumerate(range(0, len(others), size)):
        names = [BASELINE, *others[first : first + size]]
        rows = {name: Row(every[name], {n: Seen() for n in args.lengths}) for name in names}
        with tempfile.TemporaryDirectory() as folder:
            weights = attention.llama(Path(folder) / model, dtype=args.dtype, **shape)
            group = Group(weights, args.dtype, rows, Path(folder))
            try:
                seed = args.seed + number
                group.run(Prompts(args.lengths, args.repetitions, seed, token_bytes))
            finally:
                if args.logs is not None:
                    report.keep_logs(Path(folder), args.logs / f"{model}-{number}")
        restless += group.restless
        summaries += [
            summary(name, row, rows[BASELINE], args.lengths) | {"group": number}
            for name, row in rows.items()
        ]
    return {"rows": summaries, "restless": restless}


def available_bytes() -> int:
    """Memory that programs can still get without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def main() -> None:
    every = connectors.every()
    parser = argparse.ArgumentParser(prog="benches.end_to_end", description=__doc__)
    parser.add_argument("--models", default="mid,tiny", help=f"of {','.join(MODELS)}")
    parser.add_argument("--rows", default=",".join(every), help=f"of {','.join(every)}")
    parser.add_argument(
        "--lengths",
        type=lambda text: [int(n) for n in text.split(",")],
        default="1800,3900",
        help="prompt tokens",
    )
    parser.add_argument("--repetitions", type=int, default=5, help="prompts of each length")
    parser.add_argument(
        "--together",
        type=int,
        default=5,
        metavar="N",
        help="engines alive at once; more rows go in groups with a baseline each",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of weights and KV; without AVX-512 vLLM computes bfloat16 some ten times slower",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the engines' logs here")
    args = report.begin(parser, engines=ENGINE_ENVIRONMENT)
    result: dict[str, Any] = {
        "dtype": args.dtype,
        "models": {},
        "restless": {},
    }
    for model in args.models.split(","):
        found = run_model(model, args)
        result["models"][model] = found["rows"]
        result["restless"][model] = found["restless"]
        report.finish(args, tables({"models": {model: found["rows"]}}, args.lengths), result)


if __name__ == "__main__":
    main()
