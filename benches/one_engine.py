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
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benches.shared import quiet, report
from benches.shared.engines import first_token
from benches.shared.report import GIB, progress
from benches.shared.rows import Times, rotated, turns
from benches.shared.several import (
    LABELS,
    OFFLOADING,
    OTHER,
    PENSTOCK,
    PLAIN,
    SHAPES,
    Engines,
    check_room,
    save_shape,
)
from benches.trained.conditions import settle
from lab.engines.node import Answer, Node
from lab.models.prompts import tokens

BESIDE = (OFFLOADING, PENSTOCK)
DECODED_PROMPT = 512
"""Tokens of each prompt of a batch that is decoded."""
DECODING = "decoding"
FAULTS = ("stores_dropped", "stores_failed", "load_failed_blocks")
"""Counters that must be 0."""
HITS = [
    ("hit, ms", "{hit!m:.1f}"),
    ("to the floor", "{hit_to_floor:.2f}"),
    ("times as fast as computing", "{recompute_to_hit:.1f}"),
    ("computed, ms", "{cold!m:.1f}"),
    ("to vLLM alone", "{cold_to_plain:.3f}"),
    ("least tokens cached", "{least_cached}"),
    ("same bits as vLLM's own hit", "{same_bits} of {answers}"),
]
DECODED = [
    ("decoding", "{label}"),
    ("ms a token", "{seconds!m:.2f}"),
    ("to vLLM alone", "{to_plain:.3f}"),
]


class FirstTokens:
    """Times and answers of all engines with prompts of several lengths."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._times = Times()
        self._answers: dict[tuple[str, int], list[Answer]] = defaultdict(list)

    def measure(self, engines: Engines) -> None:
        """Asks for every prompt in one process and, after it, in another."""
        self._each(engines, self._in_one_process)
        progress("first tokens in one process: done")
        if not self._args.other_process or PENSTOCK not in engines.alive:
            return
        engines.stop(PENSTOCK, OFFLOADING)
        engines.start(OTHER)
        # What vLLM alone has already measured stays.
        engines.stop(PLAIN)
        if engines.alive:
            self._each(engines, self._hit)

    def _each(self, engines: Engines, measure: Callable[[int, str, Node, list[int]], None]) -> None:
        lengths = self._args.lengths
        # The first prompts of each length warm up.
        for number in range(-1, self._args.repetitions):
            for at, length in enumerate(lengths):
                prompt = tokens(length, f"{length}/{number}")
                for name in rotated(list(engines.alive), (number + 1) * len(lengths) + at):
                    measure(number, name, engines.alive[name], prompt)

    def _in_one_process(self, number: int, name: str, node: Node, prompt: list[int]) -> None:
        seconds = first_token(node, prompt, self._args.rest).seconds
        self._times.add(number, name, f"cold {len(prompt)}", seconds)
        if name != PLAIN:
            settle(node)
            node.forget()
        self._hit(number, name, node, prompt)

    def _hit(self, number: int, name: str, node: Node, prompt: list[int]) -> None:
        answer = first_token(node, prompt, self._args.rest)
        self._times.add(number, name, f"hit {len(prompt)}", answer.seconds)
        if number >= 0:
            self._answers[name, len(prompt)].append(answer)

    def result(self) -> dict[str, dict[str, Any]]:
        """By engine and length: medians, and ratios to vLLM alone, prompt by prompt."""
        measured = dict.fromkeys(name for name, _ in self._answers)
        return {
            name: {str(length): self._figures(name, length) for length in self._args.lengths}
            for name in measured
        }

    def _figures(self, name: str, length: int) -> dict[str, Any]:
        times, cold, hit = self._times, f"cold {length}", f"hit {length}"
        answers, own = self._answers[name, length], self._answers[PLAIN, length]
        hits, computed = times.each(name, hit), times.each(PLAIN, cold)
        found: dict[str, Any] = {
            "hit": times.median(name, hit),
            "hit_to_floor": times.ratio(name, PLAIN, hit),
            "recompute_to_hit": report.median_ratio(computed, hits),
            "least_cached": min(answer.cached for answer in answers),
            "same_bits": sum(a.text == b.text for a, b in zip(answers, own, strict=True)),
            "answers": len(answers),
            "each": {"cold": times.each(name, cold), "hit": hits},
        }
        if times.each(name, cold):
            found["cold"] = times.median(name, cold)
            found["cold_to_plain"] = times.ratio(name, PLAIN, cold)
        return found


def decoding(engines: Engines, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Seconds for a token of each request of a batch, round by round. Every block that a request
    fills is stored. The prompts were computed before, so only decoding is timed."""
    times = Times()
    for number, name in turns(list(engines.alive), args.rounds):
        node = engines.alive[name]
        batch = [tokens(DECODED_PROMPT, f"decoded {number}/{each}") for each in range(args.batch)]
        together(node, batch, 1)
        quiet.wait(timeout=3, at_least=args.rest)
        began = time.perf_counter()
        answers = together(node, batch, args.output)
        times.add(number, name, DECODING, (time.perf_counter() - began) / args.output)
        assert all(len(answer.tokens) == args.output for answer in answers)
    progress("decoding: done")
    return {
        name: {
            "seconds": times.median(name, DECODING),
            "to_plain": times.ratio(name, PLAIN, DECODING),
            "each": times.each(name, DECODING),
        }
        for name in engines.alive
    }


def together(node: Node, batch: Sequence[list[int]], count: int) -> list[Answer]:
    """The answers to prompts that are asked at once."""
    return [node.answer(number) for number in [node.start(each, count) for each in batch]]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures everything."""
    first_tokens = FirstTokens(args)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        engines = Engines(save_shape(folder / "model", args.shape), folder, args)
        with contextlib.closing(engines):
            try:
                engines.start(PLAIN, *args.rows)
                decoded = decoding(engines, args)
                first_tokens.measure(engines)
                engines.stop(*engines.alive)
            finally:
                if args.logs is not None:
                    report.keep_logs(folder, args.logs)
    return {
        "shape": args.shape,
        "failures": engines.failures,
        "counters": engines.counters,
        "decoding": decoded,
        "first_tokens": first_tokens.result(),
    }


def tables(result: Mapping[str, Any], lengths: Sequence[int]) -> str:
    """First tokens, decoding, counters, and what did not start."""
    title = f"prompts of {' / '.join(map(str, lengths))} tokens"
    hits = [
        [LABELS[name] + (": own prefix-cache hit" if name == PLAIN else "")]
        + [report.across(found, lengths, pattern) for _, pattern in HITS]
        for name, found in result["first_tokens"].items()
    ]
    decoded = [{"label": LABELS[name]} | found for name, found in result["decoding"].items()]
    parts = [report.table([title, *(head for head, _ in HITS)], hits)]
    parts.append(report.listing(decoded, DECODED))
    for name, counters in result["counters"].items():
        said = ", ".join(f"{key} {value:.0f}" for key, value in counters.items())
        parts.append(f"{LABELS[name]}: {said}")
    parts += not_started(result)
    return "\n\n".join(parts)


def not_started(result: Mapping[str, Any]) -> list[str]:
    """The engines that did not start, and why."""
    return [f"{LABELS[name]} did not start: {why}" for name, why in result["failures"].items()]


def faults(result: Mapping[str, Any]) -> list[str]:
    """What must not be: engines that did not start, and blocks that were not stored or loaded."""
    return not_started(result) + [
        f"{LABELS[name]}: {key} {counters[key]:.0f}"
        for name, counters in result["counters"].items()
        for key in FAULTS
        if counters[key]
    ]


def main() -> None:
    """Measures, prints the tables and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.one_engine", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument(
        "--rows", nargs="+", choices=BESIDE, default=list(BESIDE), help="beside vLLM"
    )
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


if __name__ == "__main__":
    main()
