"""The cost of Penstock when it finds nothing: `vllm bench serve`, against vLLM alone.

Two `vllm serve` processes with the same model live side by side. One of them has Penstock, with a
pool that was empty at the start. In every pass `vllm bench serve` drives one and then the other, in
changing order, with the same random prompts. No server gets a prompt twice. So every block is
looked up, computed and stored, and none is loaded. Run it as ``python -m benches.serve_cost``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benches import connectors, quiet, report
from benches.connectors import ENGINE_ENVIRONMENT, Connector
from benches.report import progress
from lab.models.chat import model_folder
from lab.processes import Server, free_port

BASELINE = "none"
START_TIMEOUT = 400.0
VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
FIGURES = {
    "request_throughput": "requests/s",
    "median_ttft_ms": "TTFT p50, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "median_tpot_ms": "TPOT p50, ms",
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


class Served:
    """A `vllm serve` process of one row."""

    def __init__(self, name: str, connector: Connector, model: Path, folder: Path) -> None:
        self.name = name
        self.connector = connector
        self.passes: list[dict[str, Any]] = []
        self._model = model
        self._folder = folder
        self._port = free_port()
        options = ["--host", "127.0.0.1", "--port", str(self._port), "--served-model-name", "bench"]
        options += ["--dtype", "float32", "--max-model-len", "4096", "--enforce-eager"]
        options += ["--kv-cache-memory-bytes", str(512 << 20)]
        connector.start(folder)
        if (transfer := connector.transfer()) is not None:
            options += ["--kv-transfer-config", json.dumps(transfer)]
        self._process = Server(
            name,
            [*VLLM, "serve", str(model), *options],
            folder / f"{name}.log",
            OFFLINE | ENGINE_ENVIRONMENT | connector.environment(),
        )

    def wait_ready(self) -> None:
        self._process.wait_for_port(self._port, START_TIMEOUT)

    def stop(self) -> None:
        self._process.stop()
        self.connector.stop()

    def drive(self, seed: int, args: argparse.Namespace) -> dict[str, Any]:
        """Runs `vllm bench serve` once, and returns its result."""
        result = self._folder / f"{self.name}-{seed}.json"
        options = {
            "backend": "openai",
            "base-url": f"http://127.0.0.1:{self._port}",
            "model": "bench",
            "tokenizer": self._model,
            "dataset-name": "random",
            "random-input-len": args.input_tokens,
            "random-output-len": args.output_tokens,
            "num-prompts": args.prompts,
            "max-concurrency": args.concurrency,
            "seed": seed,
            "percentile-metrics": "ttft,tpot",
            "result-dir": result.parent,
            "result-filename": result.name,
        }
        command = [*VLLM, "bench", "serve", "--ignore-eos", "--disable-tqdm", "--save-result"]
        for option, value in options.items():
            command += [f"--{option}", str(value)]
        quiet.wait()
        said = subprocess.run(command, capture_output=True, text=True, env=os.environ | OFFLINE)
        if said.returncode != 0:
            raise RuntimeError(f"vllm bench serve failed: {said.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(result.read_text())
        if found["completed"] != args.prompts:
            raise RuntimeError(
                f"only {found['completed']} of {args.prompts} requests were answered"
            )
        return found


def run(args: argparse.Namespace) -> list[Served]:
    """Runs all passes. The first one is warm-up and is not kept."""
    every = connectors.every()
    with tempfile.TemporaryDirectory() as name, ExitStack() as ending:
        folder = Path(name)
        model = model_folder(folder)
        servers = []
        for row in dict.fromkeys([BASELINE, *args.rows.split(",")]):
            servers.append(Served(row, every[row], model, folder))
            ending.callback(servers[-1].stop)
        for server in servers:
            server.wait_ready()
        for number in range(args.passes + 1):
            progress(f"pass {number} of {args.passes}")
            for step in range(len(servers)):
                server = servers[(number + step) % len(servers)]
                found = server.drive(args.seed + number, args)
                if number:
                    server.passes.append(found)
        return servers


def rows(servers: list[Served]) -> list[dict[str, Any]]:
    """Medians of the passes, and medians of the ratios to vLLM alone pass by pass."""
    plain = servers[0].passes
    found = []
    for server in servers:
        row: dict[str, Any] = {"row": server.name, "label": server.connector.label}
        row["input_tokens"] = [p["total_input_tokens"] for p in server.passes]
        for figure in FIGURES:
            own = [p[figure] for p in server.passes]
            row[figure] = {
                "median": statistics.median(own),
                "to_plain": report.median_ratio(own, [p[figure] for p in plain]),
                "each": own,
            }
        found.append(row)
    return found


def table(found: list[dict[str, Any]]) -> str:
    """One line for each row: medians, and their ratios to vLLM alone."""
    lines = []
    for row in found:
        cells = [row["label"]]
        for figure in FIGURES:
            cells.append(f"{row[figure]['median']:.2f} (x{row[figure]['to_plain']:.3f})")
        lines.append(cells)
    return report.table(["median (to vLLM alone)", *FIGURES.values()], lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.serve_cost", description=__doc__)
    parser.add_argument(
        "--rows", default="penstock-file", help=f"of {','.join(connectors.every())}"
    )
    parser.add_argument("--passes", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=40, help="requests of a pass")
    parser.add_argument("--input-tokens", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    args = report.begin(parser, engines=ENGINE_ENVIRONMENT)
    found = rows(run(args))
    report.finish(args, table(found), {"rows": found})


if __name__ == "__main__":
    main()
