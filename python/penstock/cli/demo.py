"""`penstock demo`: two vLLM servers over one pool, measured against one without it."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock._native import Store
from penstock.cli import serve
from penstock.demo import report, workload
from penstock.demo.engine import Counters, Engine
from penstock.demo.figures import Figures, summarise
from penstock.demo.model import CONTEXT_TOKENS, model_folder
from penstock.demo.processes import (
    Interrupted,
    Interruption,
    Processes,
    free_port,
    start_pool_server,
)
from penstock.demo.replay import BLOCK_TOKENS, compare, replay, warm_up
from penstock.vllm.settings import POOL_VARIABLE

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_KV_BYTES = 1 << 30
_HOST_BYTES = 256 << 20


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to `penstock`'s parser."""
    parser = subparsers.add_parser(
        "demo",
        help="show two vLLM servers share a pool, on this machine",
        description="Starts two vLLM servers on this machine's CPU over one pool, replays "
        "conversations that change servers with every turn, then sends the same prompts to a "
        "vLLM server without Penstock, and shows times and whether every output is the same. "
        "Exits with 1 if an output differs or if nothing was loaded.",
    )
    pool = parser.add_mutually_exclusive_group()
    pool.add_argument(
        "--pool", metavar="URL", help="pool to use (default: a directory that is removed after)"
    )
    pool.add_argument(
        "--pool-server",
        choices=("valkey", "redis"),
        help="start such a server for the demo, and use it",
    )
    material = parser.add_mutually_exclusive_group()
    material.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="replay an agent's requests (JSON lines, may be gzipped) in place of conversations",
    )
    material.add_argument(
        "--conversations", type=int, default=8, help="how many (default: %(default)s)"
    )
    parser.add_argument("--report", metavar="FILE", type=Path, help="write an HTML report there")
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON in place of the table"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the demo; 0 if all outputs are equal and blocks were loaded, else 1."""
    console = Console(stderr=args.json)
    material = workload.trace(args.trace) if args.trace else workload.documents(args.conversations)
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder,
            Interruption() as interruption,
            Processes(interruption) as processes,
        ):
            figures = _measure(args, material, Path(folder), processes, console)
    except Interrupted as signal:
        console.print(f"{signal}: stopped, no server is left", style="yellow")
        return 128 + signal.number
    if args.json:
        print(json.dumps(figures.as_json(), indent=2))
    else:
        _show(figures, console)
    if args.report:
        args.report.write_text(report.render(figures), encoding="utf-8")
        console.print(f"report: {args.report.resolve().as_uri()}", soft_wrap=True)
    for failure in figures.failures:
        console.print(f"FAILED: {failure}", style="bold red")
    return 1 if figures.failures else 0


def _measure(
    args: argparse.Namespace,
    material: workload.Workload,
    folder: Path,
    processes: Processes,
    console: Console,
) -> Figures:
    pool = args.pool or (folder / "pool").as_uri()
    if args.pool_server:
        pool = start_pool_server(processes, args.pool_server, folder)
    shown_pool = Store.open(pool).url
    console.print(f"[bold]{material.title}[/], over {shown_pool}", highlight=False)
    for cut in material.cuts:
        console.print(f"  {cut}", style="dim", highlight=False)

    with Progress(
        TextColumn("{task.description:<44}"),
        BarColumn(30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        bar = progress.add_task("model with random weights", total=1)
        model = model_folder(serve.cache_folder() / "demo")
        progress.update(bar, completed=1)

        # All at once: most of a start is imports on one core.
        bar = progress.add_task("start of three vLLM servers", total=3)
        nodes, reference = _start_engines(model, pool, folder, processes)
        engines = [*nodes, reference]
        while (ready := sum(engine.is_ready() for engine in engines)) < len(engines):
            progress.update(bar, completed=ready)
            time.sleep(0.25)
        warm_up(engines)
        progress.update(bar, completed=len(engines))

        bar = progress.add_task("two servers over one pool", total=len(material.steps))
        exchanges = replay(material, nodes, lambda: progress.advance(bar))
        last = progress.add_task("the same prompts without Penstock", total=len(exchanges))
        comparisons = compare(exchanges, reference, lambda: progress.advance(last))

    moved = sum((node.counters() for node in nodes), Counters())
    return summarise(
        material.title, material.cuts, shown_pool, _environment(model), comparisons, moved
    )


def _start_engines(
    model: Path, pool: str, folder: Path, processes: Processes
) -> tuple[list[Engine], Engine]:
    # A pool that was used before may hold these very blocks; a salt makes it a fresh one.
    salt = secrets.token_hex(8)
    first, second = _shares_of_cores()
    common = [
        *("--host", "127.0.0.1"),
        *("--dtype", "float32"),
        *("--block-size", str(BLOCK_TOKENS)),
        *("--max-model-len", str(CONTEXT_TOKENS)),
        *("--max-num-seqs", "4"),
        *("--kv-cache-memory-bytes", str(_KV_BYTES)),
        "--enforce-eager",
        "--disable-uvicorn-access-log",
    ]

    def start(name: str, cores: str, command: Sequence[str], environment: dict[str, str]) -> Engine:
        port = free_port()
        server = processes.start(
            name,
            [*command, *common, "--port", str(port)],
            folder / f"{name.replace(' ', '-')}.log",
            {
                "VLLM_CPU_OMP_THREADS_BIND": cores,
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                **environment,
            },
        )
        return Engine(name, server, port)

    penstock = [sys.executable, "-m", "penstock.cli", "serve", str(model)]
    penstock += ["--host-bytes", str(_HOST_BYTES), "--set", f"salt={salt}"]
    plain = [serve.vllm_program(), "serve", str(model), "--no-enable-prefix-caching"]
    nodes = [
        start(name, cores, penstock, {POOL_VARIABLE: pool})
        for name, cores in (("server A", first), ("server B", second))
    ]
    return nodes, start("server without Penstock", first, plain, {})


def _shares_of_cores() -> tuple[str, str]:
    """This process's cores in two halves of one size, as vLLM's CPU build reads them."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    first, second = cores[:half], cores[half : 2 * half] or cores[:half]
    return ",".join(map(str, first)), ",".join(map(str, second))


def _environment(model: Path) -> dict[str, str]:
    processor = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    first, second = _shares_of_cores()
    return {
        "model": f"{model.name}: Llama, 8 layers, hidden size 512, random weights, float32",
        "vLLM": importlib.metadata.version("vllm"),
        "Penstock": importlib.metadata.version("penstock"),
        "Python": platform.python_version(),
        "processor": f"{processor}; server A on core {first}, B on {second}, the one without "
        f"Penstock on {first}",
    }


def _show(figures: Figures, console: Console) -> None:
    table = Table(title="time to first token, ms", title_justify="left", pad_edge=False)
    table.add_column("")
    for heading in (
        "requests",
        "prompt tokens",
        "from the pool",
        "own cache",
        "Penstock p50",
        "p99",
        "recomputed p50",
        "p99",
    ):
        table.add_column(heading, justify="right")
    for row in figures.rows:
        latencies = (row.penstock.p50, row.penstock.p99, row.recomputed.p50, row.recomputed.p99)
        table.add_row(
            row.situation.value,
            str(row.requests),
            f"{row.prompt_tokens:,}",
            f"{row.loaded_tokens:,}",
            f"{row.local_tokens:,}",
            *(f"{seconds * 1e3:,.0f}" for seconds in latencies),
        )
    console.print()
    console.print(table)
    equal = len(figures.comparisons) - len(figures.differing)
    console.print(
        f"loaded from the pool: {figures.moved.loaded_tokens:,} tokens, "
        f"{figures.moved.loaded_bytes / 2**20:,.0f} MiB; "
        f"stored: {figures.moved.stored_bytes / 2**20:,.0f} MiB\n"
        f"outputs equal to those without Penstock: {equal} of {len(figures.comparisons)}",
        highlight=False,
    )
