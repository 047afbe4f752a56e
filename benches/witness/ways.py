"""Ways to compute the same KV: each is an engine that stores into a pool of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benches.witness import payloads
from benches.witness.families import Family
from benches.witness.payloads import Payloads
from lab.engines.forks import Fork
from lab.engines.node import Node, new_process

THREADS = {"launch": new_process, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0,1"}}

DECODED, LONG, SHORT = "decoded", "alone, long steps", "alone, short steps"
FLOAT32 = "float32 sums"


@dataclass
class Bench:
    """A family's model and prompts, and the folder where payloads are kept."""

    family: Family
    model: Path
    folder: Path
    sequences: list[list[int]]
    """Prompts with the answers that the first engine gave to them."""

    def run(self, name: str, work: Callable[[Node], Any], **options: Any) -> Payloads:
        """Starts an engine, has it work, and reads what it stored."""
        kept = self.folder / name.replace(" ", "-")
        if (kept / "index.json").exists():
            return Payloads(kept, self.family.block)
        pool = options.pop("pool", None) or self.folder / "pool"
        url = f"file://{pool}?size=4GiB"
        try:
            with self.node(kept.with_name(f"{kept.name}.log"), url, **options) as node:
                work(node)
                settle(node)
            return payloads.read(url, kept, self.family.block)
        finally:
            shutil.rmtree(pool, ignore_errors=True)

    def node(self, log: Path, url: str, **options: Any) -> Node:
        log.parent.mkdir(parents=True, exist_ok=True)
        known: dict[str, Any] = {
            "launch": Fork,
            "block_size": self.family.block,
            "max_model_len": 1024,
            "max_num_batched_tokens": self.family.steps[0],
            "kv_cache_memory_bytes": 384 << 20,
            "settings": {"penstock.host_bytes": "512MiB"},
        }
        model = options.pop("model", self.model)
        return Node(model, log, pool=url, **known | self.family.options | options)

    def prompts(self) -> list[list[int]]:
        return [
            self.family.prompt_tokens(self.model, number) for number in range(self.family.prompts)
        ]


def settle(node: Node) -> None:
    """Waits until the pool has all that was computed."""
    node.forget()
    counts = node.counters()
    assert counts["stores_failed"] == counts["stores_dropped"] == 0, counts


def decoded(bench: Bench) -> Payloads:
    """Answers are decoded, all requests beside each other. They become the sequences that all other
    ways compute."""
    prompts = bench.prompts()

    def work(node: Node) -> None:
        started = [node.start(prompt, max_tokens=bench.family.answer) for prompt in prompts]
        answers = [node.answer(each) for each in started]
        bench.sequences[:] = [
            prompt + list(answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)
        ]

    found = bench.run("decoded", work)
    kept = bench.folder / "sequences.json"
    if bench.sequences:
        kept.write_text(json.dumps(bench.sequences))
    bench.sequences[:] = json.loads(kept.read_text())
    return found


def alone(node: Node, sequences: list[list[int]]) -> None:
    """One request after the other."""
    for each in sequences:
        node.ask(each, max_tokens=1)


def together(node: Node, sequences: list[list[int]]) -> None:
    """All requests at once."""
    for number in [node.start(each, max_tokens=1) for each in sequences]:
        node.answer(number)


def all_ways(bench: Bench, threads: bool) -> dict[str, Callable[[], Payloads]]:
    """All but `decoded`, which comes first."""
    family, every = bench.family, bench.sequences
    long, short = family.steps[0], family.steps[-1]
    found: dict[str, Callable[[], Payloads]] = {
        LONG: lambda: bench.run("whole", lambda node: alone(node, every)),
        SHORT: lambda: bench.run(
            "short", lambda node: alone(node, every), max_num_batched_tokens=short
        ),
        "together": lambda: bench.run(
            "together",
            lambda node: together(node, every),
            max_num_batched_tokens=max(short, long // 4),
        ),
        "prefix loaded": lambda: loaded(bench),
    }
    for name, options in other_kernels(family).items():
        found[name] = partial(kernels, bench, name, options)
    if threads:
        found["two threads"] = lambda: bench.run(
            "threads", lambda node: alone(node, every), **THREADS
        )
    return found


def kernels(bench: Bench, name: str, options: dict[str, Any]) -> Payloads:
    """One request after the other, by other kernels."""
    limit = {"max_num_batched_tokens": bench.family.steps[-1]}
    return bench.run(name, lambda node: alone(node, bench.sequences), **limit | options)


def other_kernels(family: Family) -> dict[str, dict[str, Any]]:
    """Engines that compute the same with other kernels, and their options."""
    before = "mla_" if "prepare" in family.options else ""
    prepared = {
        name: {"prepare": f"benches.witness.kernels:{before}{function}"}
        for name, function in (
            (FLOAT32, "summed_in_float32"),
            ("two parts", "summed_in_two_parts"),
        )
    }
    torch = {"compilation_config": {"custom_ops": ["none"]}}
    return prepared | {
        "torch kernels": torch,
        "both": prepared[FLOAT32] | torch,
    }


def loaded(bench: Bench) -> Payloads:
    """An engine loads the first part of each sequence, and computes the rest."""
    pool = bench.folder / "loaded-pool"
    half = bench.family.prompt // 2

    def first(node: Node) -> None:
        alone(node, [each[:half] for each in bench.sequences])

    if not (bench.folder / "loaded" / "index.json").exists():
        options = {"max_num_batched_tokens": bench.family.steps[-1]}
        log = bench.folder / "loaded-first.log"
        with bench.node(log, f"file://{pool}?size=4GiB", **options) as node:
            first(node)
            settle(node)
    return bench.run("loaded", lambda node: alone(node, bench.sequences), pool=pool)
