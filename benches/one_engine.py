"""What one engine gains and pays: first tokens of hits, and decoding, on a device or a CPU.

There are three engines with the same model: vLLM alone, vLLM with its own OffloadingConnector, and
vLLM with Penstock. All are alive at once and are asked in turn. First they decode batches. Then
each prompt is computed, forgotten, and loaded from host memory. At last another engine with
Penstock loads the same prompts from the pool. The floor is vLLM's own prefix-cache hit, and the
ceiling is to compute the prompt.

The model has the shape of a Llama-3 8B and weights that mean nothing, as only times are wanted. Its
answers are compared all the same. Run it as ``python -m benches.one_engine --device cuda``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benches import quiet, report
from benches.connectors import ENGINE_ENVIRONMENT
from benches.report import GIB, progress
from benches.trained.conditions import settle
from lab.engines.node import Answer, Node, StartError
from lab.models.saved import COMMON, VOCABULARY

PLAIN, OFFLOADING, PENSTOCK, OTHER = "vllm", "offloading", "penstock", "penstock, another process"
LABELS = {
    PLAIN: "vLLM alone",
    OFFLOADING: "OffloadingConnector",
    PENSTOCK: "Penstock",
    OTHER: "Penstock, another process",
}
SHAPES: dict[str, dict[str, int]] = {
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
START_TIMEOUT = 900.0
"""Seconds. The first engine with a connector compiles what another without one has compiled."""
SHARED_MEMORY = Path("/dev/shm")
DECODED_PROMPT = 512
"""Tokens of each prompt of a batch that is decoded."""
SHOWN = (
    "stored_blocks",
    "stores_dropped",
    "stores_failed",
    "load_failed_blocks",
    "load_late_blocks",
    "rejected_objects",
    "unpinned_bytes",
)
"""Counters of Penstock that belong to the result."""


@dataclass
class Seen:
    """Seconds of one engine with prompts of one length, one for each prompt."""

    cold: list[float] = field(default_factory=list)
    hit: list[float] = field(default_factory=list)
    """From vLLM's own prefix cache for vLLM alone, else loaded."""
    answers: list[Answer] = field(default_factory=list, repr=False)


def save_shape(folder: Path, shape: str) -> Path:
    """A model of which there is only the configuration."""
    from transformers import LlamaConfig

    config = LlamaConfig(**COMMON | SHAPES[shape] | {"max_position_embeddings": 1 << 17})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


class Engines:
    """The engines, by name. One that does not start is left out, and said in `failures`."""

    def __init__(self, model: Path, folder: Path, args: argparse.Namespace) -> None:
        self._model, self._folder, self._args = model, folder, args
        self._segment = f"bench-one-{os.getpid()}"
        self.alive: dict[str, Node] = {}
        self.failures: dict[str, str] = {}
        self.counters: dict[str, dict[str, float]] = {}
        """Penstock's, of the engines that have ended."""

    def start(self, *names: str) -> None:
        """Starts engines, one after the other: each takes its share of the device's memory."""
        for name in names:
            node = Node(
                self._model,
                self._folder / f"{name.replace(', ', '-').replace(' ', '-')}.log",
                env=ENGINE_ENVIRONMENT,
                **self._options(name),
            )
            try:
                node.wait_ready(START_TIMEOUT)
            except (StartError, queue.Empty) as error:
                node.kill()
                if name == PLAIN:
                    raise
                self.failures[name] = report.cause(str(error) or "TimeoutError: it takes too long")
                progress(f"{name} does not start: {self.failures[name]}")
            else:
                self.alive[name] = node
                progress(f"{name} serves")

    def stop(self, *names: str) -> None:
        """Ends engines, those of these names that there are."""
        for name in names:
            if (node := self.alive.pop(name, None)) is not None:
                if name in (PENSTOCK, OTHER):
                    found = node.counters()
                    self.counters[name] = {key: found.get(key, 0.0) for key in SHOWN}
                node.stop()

    def close(self) -> None:
        """Ends all, whatever they are doing, and gives the pool's memory back."""
        for node in self.alive.values():
            node.kill()
        (SHARED_MEMORY / f"penstock-{self._segment}").unlink(missing_ok=True)

    def turns(self, number: int) -> Iterator[tuple[str, Node]]:
        """All engines, each time beginning with another one."""
        names = list(self.alive)
        start = number % len(names)
        return ((name, self.alive[name]) for name in names[start:] + names[:start])

    def _options(self, name: str) -> dict[str, Any]:
        args = self._args
        on_device = args.device == "cuda"
        options: dict[str, Any] = {
            "load_format": "dummy",
            "dtype": "bfloat16" if on_device else "float32",
            "enforce_eager": not on_device,
            "max_model_len": max(args.lengths) + 64,
            "max_num_seqs": args.batch,
            "max_num_batched_tokens": args.step_tokens,
            "kv_cache_memory_bytes": args.kv_bytes,
        }
        if on_device:
            # Each engine would want nearly all of the device's memory to be free.
            options["gpu_memory_utilization"] = 0.25
        if name == OFFLOADING:
            options["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": args.host_bytes},
            }
        elif name != PLAIN:
            options["pool"] = f"shm://{self._segment}?size={args.host_bytes}"
            options["settings"] = {
                "penstock.host_bytes": args.host_bytes,
                "penstock.host_tier": True,
                # What a load takes is wanted, also where Penstock would rather recompute.
                "penstock.load_policy": "always",
            }
        return options | dict(args.engine)


def first_tokens(engines: Engines, args: argparse.Namespace) -> dict[str, dict[int, Seen]]:
    """Times of all engines, by prompt length."""
    seen = {name: {length: Seen() for length in args.lengths} for name in (*engines.alive, OTHER)}

    def ask(node: Node, prompt: list[int]) -> Answer:
        quiet.wait(timeout=3, at_least=args.rest)
        return node.ask(prompt, max_tokens=1)

    def each(measure: Callable[[str, Node, Seen, list[int]], None]) -> None:
        for number, (repetition, length, prompt) in enumerate(prompts(args)):
            for name, node in engines.turns(number):
                # The first repetition warms up.
                measured = seen[name][length] if repetition else Seen()
                measure(name, node, measured, prompt)

    def in_one_process(name: str, node: Node, seen: Seen, prompt: list[int]) -> None:
        seen.cold.append(ask(node, prompt).seconds)
        if name != PLAIN:
            settle(node)
            node.forget()
        seen.answers.append(ask(node, prompt))
        seen.hit.append(seen.answers[-1].seconds)

    each(in_one_process)
    progress("first tokens in one process: done")
    if not args.other_process or PENSTOCK not in engines.alive:
        return seen
    engines.stop(PENSTOCK, OFFLOADING)
    engines.start(OTHER)
    # What vLLM alone has already measured stays.
    engines.stop(PLAIN)

    def in_another(name: str, node: Node, seen: Seen, prompt: list[int]) -> None:
        seen.answers.append(ask(node, prompt))
        seen.hit.append(seen.answers[-1].seconds)

    if engines.alive:
        each(in_another)
    return seen


def prompts(args: argparse.Namespace) -> Iterator[tuple[int, int, list[int]]]:
    """Repetition, length and tokens of every prompt, the same each time."""
    for repetition in range(args.repetitions + 1):
        for length in args.lengths:
            yield repetition, length, tokens(length, f"{length}/{repetition}")


def tokens(count: int, seed: str) -> list[int]:
    """So many random tokens, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


def decoding(engines: Engines, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds for a token of each request of a batch, round by round. Every block that a request
    fills is stored. The prompts were computed before, so only decoding is timed."""
    found: dict[str, list[float]] = {name: [] for name in engines.alive}
    for number in range(args.rounds + 1):
        batch = [tokens(DECODED_PROMPT, f"decoded {number}/{each}") for each in range(args.batch)]
        for name, node in engines.turns(number):
            for _ in together(node, batch, 1):
                pass
            quiet.wait(timeout=3, at_least=args.rest)
            began = time.perf_counter()
            answers = list(together(node, batch, args.output))
            taken = time.perf_counter() - began
            assert all(len(answer.tokens) == args.output for answer in answers)
            if number:
                found[name].append(taken / args.output)
    progress("decoding: done")
    return found


def together(node: Node, batch: Sequence[list[int]], count: int) -> Iterator[Answer]:
    """The answers to prompts that are asked at once."""
    yield from [node.answer(number) for number in [node.start(each, count) for each in batch]]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures everything."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        engines = Engines(save_shape(folder / "model", args.shape), folder, args)
        with contextlib.closing(engines):
            try:
                engines.start(PLAIN, *args.rows)
                times = decoding(engines, args)
                seen = first_tokens(engines, args)
                engines.stop(*engines.alive)
            finally:
                if args.logs is not None:
                    report.keep_logs(folder, args.logs)
    return {
        "shape": args.shape,
        "failures": engines.failures,
        "counters": engines.counters,
        "decoding": {name: of_decoding(times, name) for name in times},
        "first_tokens": {
            name: {str(length): of_hits(seen, name, length) for length in args.lengths}
            for name in seen
            if all(seen[name][length].hit for length in args.lengths)
        },
    }


def of_decoding(times: Mapping[str, list[float]], name: str) -> dict[str, Any]:
    """Decoding of one engine: seconds for a token, and the ratio round by round."""
    return {
        "seconds": statistics.median(times[name]),
        "to_plain": report.median_ratio(times[name], times[PLAIN]),
        "each": times[name],
    }


def of_hits(seen: Mapping[str, Mapping[int, Seen]], name: str, length: int) -> dict[str, Any]:
    """First tokens of one engine with prompts of one length. Ratios are medians, prompt by
    prompt."""
    own, plain = seen[name][length], seen[PLAIN][length]
    found: dict[str, Any] = {
        "hit": statistics.median(own.hit),
        "hit_to_floor": report.median_ratio(own.hit, plain.hit),
        "recompute_to_hit": report.median_ratio(plain.cold, own.hit),
        "least_cached": min(answer.cached for answer in own.answers),
        "same_bits": sum(
            mine.text == theirs.text
            for mine, theirs in zip(own.answers, plain.answers, strict=True)
        ),
        "answers": len(own.answers),
        "each": {"cold": own.cold, "hit": own.hit},
    }
    if own.cold:
        found |= {
            "cold": statistics.median(own.cold),
            "cold_to_plain": report.median_ratio(own.cold, plain.cold),
        }
    return found


def tables(result: Mapping[str, Any], lengths: Sequence[int]) -> str:
    """First tokens, decoding, counters, and what did not start."""

    def cells(found: Mapping[str, Any], pattern: str, key: str, by: float = 1.0) -> str:
        each = [found[str(length)] for length in lengths]
        return " / ".join(pattern.format(row[key] * by) if key in row else "" for row in each)

    hits = [
        [
            LABELS[name] + (": own prefix-cache hit" if name == PLAIN else ""),
            cells(found, "{:.1f}", "hit", 1000),
            cells(found, "{:.2f}", "hit_to_floor"),
            cells(found, "{:.1f}", "recompute_to_hit"),
            cells(found, "{:.1f}", "cold", 1000),
            cells(found, "{:.3f}", "cold_to_plain"),
            cells(found, "{:.0f}", "least_cached"),
            cells(found, "{:.0f}", "same_bits") + f" of {found[str(lengths[0])]['answers']}",
        ]
        for name, found in result["first_tokens"].items()
    ]
    title = f"prompts of {' / '.join(map(str, lengths))} tokens"
    heads = ["hit, ms", "to the floor", "times as fast as computing", "computed, ms"]
    heads += ["to vLLM alone", "least tokens cached", "same bits as vLLM's own hit"]
    parts = [report.table([title, *heads], hits)]
    decoded = [
        [LABELS[name], f"{found['seconds'] * 1000:.2f}", f"{found['to_plain']:.3f}"]
        for name, found in result["decoding"].items()
    ]
    parts.append(report.table(["decoding", "ms a token", "to vLLM alone"], decoded))
    for name, counters in result["counters"].items():
        said = ", ".join(f"{key} {value:.0f}" for key, value in counters.items())
        parts.append(f"{LABELS[name]}: {said}")
    parts += [f"{LABELS[name]} did not start: {why}" for name, why in result["failures"].items()]
    return "\n\n".join(parts)


def main() -> None:
    """Measures, prints the tables and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.one_engine", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    rows = (OFFLOADING, PENSTOCK)
    parser.add_argument("--rows", nargs="+", choices=rows, default=list(rows), help="beside vLLM")
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[2000, 8000, 16000], help="prompt tokens"
    )
    parser.add_argument("--repetitions", type=int, default=5, help="prompts of each length")
    parser.add_argument("--rounds", type=int, default=5, help="batches that each engine decodes")
    parser.add_argument("--batch", type=int, default=32, help="requests decoded at once")
    parser.add_argument("--output", type=int, default=256, help="tokens of each of their answers")
    parser.add_argument("--step-tokens", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--kv-bytes", type=int, default=4 * GIB, help="KV cache of each engine")
    parser.add_argument("--host-bytes", type=int, default=16 * GIB, help="host memory, and pool")
    parser.add_argument("--rest", type=float, default=0.2, help="seconds before each timed request")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="exit status 1 if an engine does not start, or a store or load fails",
    )
    parser.add_argument("--no-other-process", dest="other_process", action="store_false")
    report.add_engine_options(parser, ("cpu", "cuda"))
    args = report.begin(parser)
    args.environment |= {"device": args.device, "engine": dict(args.engine)}
    check_room(args)
    result = run(args)
    report.finish(args, tables(result, args.lengths), result)
    if args.strict and (wrong := faults(result)):
        sys.exit(f"one_engine: {'; '.join(wrong)}")


def check_room(args: argparse.Namespace) -> None:
    """Ends the bench if the host memory of its engines does not fit into shared memory."""
    wanted, free = len(args.rows) * args.host_bytes, shutil.disk_usage(SHARED_MEMORY).free
    if wanted > free:
        sys.exit(
            f"one_engine: {SHARED_MEMORY} has {free >> 20} MiB left, and {', '.join(args.rows)} "
            f"take {wanted >> 20} MiB. Enlarge it (docker run --shm-size), or lower --host-bytes"
        )


def faults(result: Mapping[str, Any]) -> list[str]:
    """What must not be: engines that did not start, and blocks that were not stored or loaded."""
    found = [f"{LABELS[name]} did not start: {why}" for name, why in result["failures"].items()]
    bad = ("stores_dropped", "stores_failed", "load_failed_blocks")
    found += [
        f"{LABELS[name]}: {key} {counters[key]:.0f}"
        for name, counters in result["counters"].items()
        for key in bad
        if counters[key]
    ]
    return found


if __name__ == "__main__":
    main()
