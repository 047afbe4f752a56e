"""vLLM's decode latency while Penstock moves data at full rate in the same process.

A vLLM engine in this process, with Penstock as its connector, decodes a batch. Three kinds of
windows take turns. In the first kind nothing else happens. In the second kind another engine of
Penstock's stores and loads blocks of 1 MiB as fast as it can, on native threads of this process. In
the third kind another process does the same.

Between vLLM's steps, vLLM's thread polls the moving engine and submits new work, as the connector
does. That time is part of the step. Both kinds of moving show the cost of shared cores and a shared
memory bus. The difference between them is the cost of a shared interpreter. Run it as
``python -m benches.decode_latency``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benches.shared import report
from benches.shared.engines import save_model
from benches.shared.mover import Mover, OtherProcess
from benches.shared.report import progress
from benches.shared.rows import turns
from lab.latency import percentile
from lab.models.prompts import tokens

ALONE, BESIDE, OTHER = KINDS = ("alone", "beside the engine", "beside another process")
LAST_STEPS = 8
"""Of a batch: they do not count, so no window sees its end."""
COLUMNS = [
    ("vLLM decodes", "{while}"),
    ("steps", "{steps}"),
    ("step p50, ms (to alone)", "{p50!m:.2f} ({p50_to_alone:.3f})"),
    ("p99, ms (to alone)", "{p99!m:.2f} ({p99_to_alone:.3f})"),
    ("p99 to that beside another process", "{p99_to_other:.3f}"),
    ("GiB/s moved", "{moved_bytes_per_second!G:.2f}"),
]


def open_engine(model: Path, pool: str, args: argparse.Namespace) -> Any:
    """vLLM's engine, in this process, on the cores of this thread."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(min(os.sched_getaffinity(0)))
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    transfer = KVTransferConfig(
        kv_connector="PenstockConnector",
        kv_connector_module_path="penstock.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"penstock.pool": pool, "penstock.host_bytes": "128MiB"},
    )
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=4096,
            max_num_seqs=args.batch,
            kv_cache_memory_bytes=512 << 20,
            dtype="float32",
            kv_transfer_config=transfer,
        )
    )


class Decoding:
    """Decodes batches of requests, one batch after the other."""

    def __init__(self, engine: Any, args: argparse.Namespace) -> None:
        self._engine = engine
        self._batch, self._prompt, self._output = args.batch, args.prompt, args.output
        self._numbers = itertools.count()

    def fill(self) -> None:
        """Starts the requests of a whole batch, and computes their prompts."""
        from vllm import SamplingParams

        assert not self._engine.has_unfinished_requests()
        params = SamplingParams(max_tokens=self._output, ignore_eos=True, detokenize=False)
        for _ in range(self._batch):
            number = str(next(self._numbers))
            prompt = {"prompt_token_ids": tokens(self._prompt, number)}
            self._engine.add_request(number, prompt, params)
        decoding = 0
        while decoding < self._batch:
            decoding = sum(bool(out.outputs[0].token_ids) for out in self._engine.step())

    def steps(self, count: int, between: Callable[[], float] | None) -> list[float]:
        """Seconds of each of `count` steps.

        `between` is called after each step. It returns the seconds of its own that do not count.
        """
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            self._engine.step()
            uncounted = between() if between is not None else 0.0
            seconds.append(time.perf_counter() - began - uncounted)
        return seconds

    def drain(self) -> None:
        """Runs the rest of the batch to its end."""
        while self._engine.has_unfinished_requests():
            self._engine.step()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all windows. Those of the first round are warm-up."""
    cores = sorted(os.sched_getaffinity(0))
    # torch has one thread, from its first import on. It would wait in every operation for a second
    # thread on a core that moves blocks.
    os.environ["OMP_NUM_THREADS"] = "1"
    windows: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pool = args.pool or f"file://{folder}/pool?size=2GiB"
        # The moving threads and the other process stay on the cores on which they are started.
        os.sched_setaffinity(0, cores[1:])
        with Mover(pool, 60.0) as mover, OtherProcess(pool, 60.0) as other:
            # All of vLLM's threads are on another core.
            os.sched_setaffinity(0, cores[:1])
            engine = open_engine(save_model(folder), f"file://{folder}/connector?size=1GiB", args)
            decoding = Decoding(engine, args)
            movers: dict[str, Mover | OtherProcess] = {BESIDE: mover, OTHER: other}
            for number, kind in turns(KINDS, args.rounds):
                progress(f"round {number + 1} of {args.rounds}: {kind}")
                decoding.fill()
                if (moving := movers.get(kind)) is not None:
                    moving.go()
                between = mover.step if kind == BESIDE else None
                seconds = decoding.steps(args.output - LAST_STEPS, between)
                rate = moving.rest() if moving is not None else 0.0
                decoding.drain()
                if number >= 0:
                    windows[kind].append(seconds)
                    rates[kind].append(rate)
    return {"rows": [row(kind, windows, rates[kind]) for kind in KINDS]}


def row(kind: str, windows: dict[str, list[list[float]]], rates: list[float]) -> dict[str, Any]:
    """One row: times over all its windows, and medians of the ratios round by round."""
    every = [second for window in windows[kind] for second in window]
    shares = {
        (name, share): [percentile(window, share) for window in found]
        for name, found in windows.items()
        for share in (0.5, 0.99)
    }
    return {
        "while": kind,
        "steps": len(every),
        "p50": statistics.median(every),
        "p99": percentile(every, 0.99),
        "p50_to_alone": report.median_ratio(shares[kind, 0.5], shares[ALONE, 0.5]),
        "p99_to_alone": report.median_ratio(shares[kind, 0.99], shares[ALONE, 0.99]),
        "p99_to_other": report.median_ratio(shares[kind, 0.99], shares[OTHER, 0.99]),
        "moved_bytes_per_second": statistics.median(rates),
    }


def main() -> None:
    """Measures, prints a table and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.decode_latency", description=__doc__)
    parser.add_argument("--pool", help="that blocks are moved to and from (default: a directory)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=4, help="requests decoded at once")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=200, help="tokens of each answer")
    args = report.begin(parser)
    found = run(args)
    report.finish(args, report.listing(found["rows"], COLUMNS), found)


if __name__ == "__main__":
    main()
