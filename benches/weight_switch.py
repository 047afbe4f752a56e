"""What it costs that weights change in a running engine: with Penstock, and with vLLM alone.

A trainer pushes the weights of another model, in several calls, while a request runs. Then a new
request comes. Penstock wants to know then which weights these are: by all their bytes, or by the
name that the trainer gave and a sample. So the times of the update, of the new request's first
token, and the longest gap between two tokens of the request that runs are those to compare. vLLM
itself computes nothing while a call of the update runs. The rows take turns. The model's linear
layers compute with their tensors, as on a GPU. Run it as ``python -m benches.weight_switch``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benches.shared import quiet, report
from benches.shared.connectors import ENGINE_ENVIRONMENT, Connector, Penstock, read_all
from benches.shared.report import progress
from benches.shared.rows import Times, turns
from lab.engines.node import Node
from lab.engines.trainer import PUSHED, push
from lab.models import attention
from lab.models.prompts import tokens
from lab.waiting import eventually

ALONE, BYTES, NAME = ROWS = ("vLLM alone", "Penstock, by all bytes", "Penstock, by name and sample")
UPDATE, GAP, FIRST, READ = ("update", "longest gap", "first token", "read")
STEP = "token"
SHAPE = {"hidden": 2048, "heads": 16, "kv_heads": 8, "dtype": "bfloat16"}
AROUND = 8
"""So many tokens of the running request come before the update, and so many after the new request,
at least."""
PROMPT = 8
"""Tokens of a prompt. More would take longer to compute than the weights take to read."""
MOST = 3000
COLUMNS = [
    ("weights change", "{row}"),
    ("update, s (to alone)", "{update:.3f} ({update_to_alone:.3f})"),
    ("longest gap, ms (to alone)", "{longest_gap!m:.0f} ({longest_gap_to_alone:.3f})"),
    ("gap at the new request, ms (to alone)", "{new_gap!m:.0f} ({new_gap_to_alone:.3f})"),
    ("its first token, ms (to alone)", "{first_token!m:.0f} ({first_token_to_alone:.3f})"),
    ("all bytes read, s", "{read:.3f}"),
    ("a token at rest, ms", "{token!m:.0f}"),
]
NEW = "gap at the new request"

_is_stopped = False


async def stream(engine: Any, prompt: list[int], name: str) -> list[float]:
    """When each token of a request came, until :func:`stop`. Runs in the engine's process."""
    global _is_stopped
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    _is_stopped, times = False, []
    params = SamplingParams(
        max_tokens=MOST, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    outputs = engine.generate({"prompt_token_ids": prompt}, params, name)
    # An end before its last token aborts it.
    async with contextlib.aclosing(outputs):
        async for _ in outputs:
            times.append(time.monotonic())
            if _is_stopped:
                break
    return times


async def stop(_engine: Any, _prompt: list[int], _name: str) -> None:
    """Ends the request that runs."""
    global _is_stopped
    _is_stopped = True


class Engine:
    """An engine, and which of two models it has."""

    def __init__(self, node: Node, models: list[Path], chunks: int) -> None:
        self._node, self._models, self._chunks = node, models, chunks
        self._updates = self._prompts = 0

    def switch(self, *, is_named: bool) -> dict[str, float]:
        """Updates the engine to the other model while a request runs, and starts a new one then.
        Returns what took how long."""
        node = self._node
        self._updates += 1
        place = self._updates % 2
        quiet.wait(timeout=3)
        log = node.log.stat().st_size
        running = node.send("way", way="benches.weight_switch:stream", prompt=self._prompt())
        self._wait()
        began = time.monotonic()
        push(
            node,
            self._models[place],
            name=f"weights {place}" if is_named else None,
            chunks=self._chunks,
            in_place=True,
            connect=self._updates == 1,
        )
        updated = time.monotonic()
        first = node.ask(self._prompt(), max_tokens=1).seconds
        asked = time.monotonic()
        self._wait()
        node.way("benches.weight_switch:stop", [])
        times: list[float] = node.result(running)
        with node.log.open("rb") as file:
            file.seek(log)
            read = re.findall(rb"read all weights in memory, in ([0-9.]+) s", file.read())
        gaps = list(itertools.pairwise(times))

        def longest(start: float, end: float) -> float:
            return max(after - before for before, after in gaps if after > start and before < end)

        return {
            UPDATE: updated - began,
            GAP: longest(began, asked),
            NEW: longest(updated, asked),
            FIRST: first,
            READ: sum(map(float, read)),
            STEP: statistics.median(after - before for before, after in gaps if after < began),
        }

    def _prompt(self) -> list[int]:
        self._prompts += 1
        return tokens(PROMPT, str(self._prompts))

    def _wait(self) -> None:
        """Waits until some tokens more have come."""
        node, name = self._node, "generation_tokens"
        before = node.counters().get(name, 0)
        eventually(lambda: node.counters().get(name, 0) >= before + AROUND, pause=0.05)


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measures all rows. The first pass is warm-up: in it Penstock also reads the weights that the
    engine was started with."""
    models = [
        attention.llama(folder / str(seed), seed=seed, layers=args.layers, **SHAPE)
        for seed in range(2)
    ]
    nbytes = sum(file.stat().st_size for file in models[0].glob("*.safetensors"))
    for model in models:
        read_all(model)
    times = Times()
    start: dict[str, float] = {}
    with ExitStack() as ending:
        engines = {}
        for connector in (Connector(), Penstock("file")):
            connector.start(folder)
            ending.callback(connector.stop)
            options: dict[str, Any] = dict(PUSHED)
            if (transfer := connector.transfer()) is not None:
                options["kv_transfer_config"] = transfer
            node = Node(
                models[0],
                folder / f"{connector.label}.log",
                env=ENGINE_ENVIRONMENT | connector.environment(),
                dtype=SHAPE["dtype"],
                **options,
            )
            engines[connector.label] = Engine(ending.enter_context(node), models, args.chunks)
        alone, ours = engines.values()
        for number, row in turns(ROWS, args.passes):
            progress(f"{row}: pass {number + 1} of {args.passes}")
            took = (alone if row == ALONE else ours).switch(is_named=row == NAME)
            for what, seconds in took.items():
                times.add(number, row, what, seconds)
            if row != ALONE and not start:
                start = took
    rows = [_row(times, row) for row in ROWS]
    return {"weights_bytes": nbytes, "chunks": args.chunks, "rows": rows, "first_update": start}


def _row(times: Times, row: str) -> dict[str, Any]:
    found: dict[str, Any] = {"row": row}
    for key, what in (
        ("update", UPDATE),
        ("longest_gap", GAP),
        ("new_gap", NEW),
        ("first_token", FIRST),
    ):
        found[key] = times.median(row, what)
        found[f"{key}_to_alone"] = times.ratio(row, ALONE, what)
        found[f"{key}_each"] = times.each(row, what)
    return found | {"read": times.median(row, READ), "token": times.median(row, STEP)}


def main() -> None:
    """Measures, prints a table and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.weight_switch", description=__doc__)
    parser.add_argument("--passes", type=int, default=7, help="of each row (default: 7)")
    parser.add_argument("--chunks", type=int, default=8, help="calls of an update (default: 8)")
    parser.add_argument("--layers", type=int, default=7, help="of 75 MB each (default: 7)")
    args = report.begin(parser)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        found = run(args, Path(name))
    text = f"{found['weights_bytes'] / 1e6:.0f} MB of weights, {args.chunks} calls\n\n"
    report.finish(args, text + report.listing(found["rows"], COLUMNS), found)


if __name__ == "__main__":
    main()
