"""One run: starts the servers, replays the workload, and ends the servers again."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import secrets
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import penstock
from penstock._native import Store
from penstock.demo.engine import Counters, Engine
from penstock.demo.figures import Figures, Hits, summarise
from penstock.demo.forecast import expected_hit_ratio, found_hit_ratio
from penstock.demo.model import CONTEXT_TOKENS, model_folder
from penstock.demo.processes import (
    Interruption,
    Processes,
    free_port,
    start_pool_server,
)
from penstock.demo.replay import BLOCK_TOKENS, replay, warm_up
from penstock.demo.workload import Workload
from penstock.programs import cache_folder, installed_program, vllm_program
from penstock.vllm.names import POOL_VARIABLE

_KV_BYTES = 1 << 30
_HOST_BYTES = 256 << 20


def measure(
    workload: Workload, pool: str | None, pool_server: str | None, console: Console
) -> Figures:
    """Runs `workload` over a pool, and measures it.

    With `pool_server` ("valkey" or "redis"), the pool is such a server, started for this run.
    Otherwise it is the pool at the URL `pool`. Without either, it is a directory that is removed
    afterwards. No process is left when this function returns or raises.

    Raises:
        ServerFailed: a server did not start, ended, or broke off.
        Interrupted: a signal asked to stop.
    """
    with (
        tempfile.TemporaryDirectory(prefix="penstock-demo-") as name,
        Interruption() as interruption,
        Processes(interruption) as processes,
    ):
        folder = Path(name)
        if pool_server:
            pool = start_pool_server(processes, pool_server, folder)
        return _run(workload, pool or (folder / "pool").as_uri(), folder, processes, console)


def _run(
    workload: Workload, pool: str, folder: Path, processes: Processes, console: Console
) -> Figures:
    shown_pool = Store.open(pool).url
    console.print(f"[bold]{workload.title}[/]\npool: {shown_pool}", highlight=False, soft_wrap=True)
    for cut in workload.cuts:
        console.print(f"  {cut}", style="dim", highlight=False)

    with Progress(
        TextColumn("{task.description:<44}"),
        BarColumn(30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        bar = progress.add_task("model with random weights", total=1)
        model = model_folder(cache_folder() / "demo")
        progress.update(bar, completed=1)

        # Start all servers at once, as most of a start is imports on one core.
        bar = progress.add_task("start of three vLLM servers", total=3)
        nodes, reference = _start_engines(model, pool, folder, processes)
        engines = [*nodes, reference]
        while (ready := sum(engine.is_ready() for engine in engines)) < len(engines):
            progress.update(bar, completed=ready)
            time.sleep(0.25)
        warm_up(nodes, reference, max(len(step.tokens) for step in workload.steps))
        progress.update(bar, completed=len(engines))

        bar = progress.add_task("each prompt with and without a pool", total=len(workload.steps))
        before = _sum_of(nodes)
        comparisons = replay(workload, nodes, reference, lambda: progress.advance(bar))

    moved = _sum_of(nodes) - before
    hits = None
    if not any(step.follows for step in workload.steps):
        exchanges = [each.exchange for each in comparisons]
        hits = Hits(found_hit_ratio(exchanges), expected_hit_ratio(exchanges))
    return summarise(
        workload.title, workload.cuts, shown_pool, _environment(model), comparisons, moved, hits
    )


def _sum_of(nodes: Sequence[Engine]) -> Counters:
    return sum((node.counters() for node in nodes), Counters())


def _start_engines(
    model: Path, pool: str, folder: Path, processes: Processes
) -> tuple[list[Engine], Engine]:
    # A pool that was used before may hold the same blocks. A salt gives this run a fresh namespace.
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
                # Sockets that vLLM leaves behind are removed with the folder.
                "TMPDIR": str(folder),
                "VLLM_CPU_OMP_THREADS_BIND": cores,
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                **environment,
            },
        )
        return Engine(name, server, port)

    sharing = [installed_program("penstock"), "serve", str(model)]
    sharing += ["--host-bytes", str(_HOST_BYTES), "--set", f"salt={salt}"]
    plain = [vllm_program(), "serve", str(model), "--no-enable-prefix-caching"]
    nodes = [
        start(name, cores, sharing, {POOL_VARIABLE: pool})
        for name, cores in (("server A", first), ("server B", second))
    ]
    return nodes, start("server without Penstock", first, plain, {})


def _shares_of_cores() -> tuple[str, str]:
    """This process's cores in two equal halves, written as vLLM's CPU build reads them."""
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
        "Penstock": penstock.__version__,
        "Python": platform.python_version(),
        "processor": f"{processor}; server A on core {first}, B on {second}, the one without "
        f"Penstock on {first}",
    }
