"""One run: starts the servers, replays the workload, and ends the servers again."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lab.demo.engine import Counters, Engine
from lab.demo.figures import Figures, summarise
from lab.demo.forecast import hits_of
from lab.demo.replay import replay, warm_up
from lab.demo.servers import Servers, environment, shares_of_cores, wait_until_ready
from lab.demo.workload import Workload
from lab.models.chat import model_folder
from lab.processes import (
    Interruption,
    Processes,
)
from lab.servers import start_pool_server
from penstock._native import Store
from penstock.pool import POOL_VARIABLE
from penstock.programs import cache_folder

_KV_BYTES = 1 << 30
_HOST_BYTES = 256 << 20
_SEQUENCES = 4


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
        wait_until_ready(engines, lambda ready: progress.update(bar, completed=ready))
        warm_up(nodes, reference, max(len(step.tokens) for step in workload.steps))
        progress.update(bar, completed=len(engines))

        bar = progress.add_task("each prompt with and without a pool", total=len(workload.steps))
        before = _sum_of(nodes)
        comparisons = replay(workload, nodes, reference, lambda: progress.advance(bar))

    moved = _sum_of(nodes) - before
    hits = None
    if not any(step.follows for step in workload.steps):
        hits = hits_of([each.exchange for each in comparisons])
    first, second = shares_of_cores()
    cores = f"server A on core {first}, B on {second}, the one without Penstock on {first}"
    facts = environment(model, cores)
    return summarise(workload.title, workload.cuts, shown_pool, facts, comparisons, moved, hits)


def _sum_of(nodes: Sequence[Engine]) -> Counters:
    return sum((node.counters() for node in nodes), Counters())


def _start_engines(
    model: Path, pool: str, folder: Path, processes: Processes
) -> tuple[list[Engine], Engine]:
    # A pool that was used before may hold the same blocks. A salt gives this run a fresh namespace.
    salt = secrets.token_hex(8)
    first, second = shares_of_cores()
    servers = Servers(model, folder, processes)
    sharing = servers.sharing("--host-bytes", str(_HOST_BYTES), "--set", f"salt={salt}")
    nodes = [
        servers.start(
            name,
            cores,
            sharing,
            sequences=_SEQUENCES,
            kv_bytes=_KV_BYTES,
            environment={POOL_VARIABLE: pool},
        )
        for name, cores in (("server A", first), ("server B", second))
    ]
    reference = servers.start(
        "server without Penstock",
        first,
        servers.plain("--no-enable-prefix-caching"),
        sequences=_SEQUENCES,
        kv_bytes=_KV_BYTES,
    )
    return nodes, reference
