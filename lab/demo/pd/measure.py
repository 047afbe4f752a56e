"""One run of the demo with `--pd`: starts servers, loads both systems in turn, ends the servers."""

from __future__ import annotations

import secrets
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lab.demo.engine import Engine
from lab.demo.pd import load
from lab.demo.pd.figures import Figures, row
from lab.demo.pd.load import Prompt, Timed
from lab.demo.pd.systems import Apart, RoundRobin, System
from lab.demo.replay import REST_SECONDS
from lab.demo.servers import Servers, environment, shares_of_cores, wait_until_ready
from lab.models.chat import BEGIN, VOCABULARY, model_folder
from lab.processes import Interruption, Processes
from lab.servers import start_pool_server
from penstock._native import Store
from penstock.pool import POOL_VARIABLE
from penstock.programs import cache_folder

APART, ROUND_ROBIN = "prefill and decode apart", "two servers, round-robin"

_KV_BYTES = 512 << 20
_HOST_BYTES = 256 << 20
_SEQUENCES = 16
_ANSWER_TOKENS = 96
_ROUNDS = 3


def measure(
    count: int, share: float, pool: str | None, pool_server: str | None, console: Console
) -> Figures:
    """Sends `count` prompts to both systems, at `share` of what the prefill server can compute.

    The pool is as for the other demo. No process is left when this function returns or raises.

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
        return _run(count, share, pool or (folder / "pool").as_uri(), folder, processes, console)


def _run(
    count: int, share: float, pool: str, folder: Path, processes: Processes, console: Console
) -> Figures:
    shown_pool = Store.open(pool).url
    console.print(
        f"[bold]{count} prompts to a prefill and a decode server, and to two servers behind "
        f"round-robin[/]\npool: {shown_pool}",
        highlight=False,
        soft_wrap=True,
    )
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

        bar = progress.add_task("start of four vLLM servers", total=4)
        prefill, decode, both = _start(Servers(model, folder, processes), pool)
        engines = [prefill, decode, *both]
        wait_until_ready(engines, lambda ready: progress.update(bar, completed=ready))
        systems: dict[str, System] = {
            APART: Apart([prefill], [decode]),
            ROUND_ROBIN: RoundRobin(both),
        }
        speed = _warm_up(systems, prefill)
        progress.update(bar, completed=4)
        rate = share * speed / load.mean_tokens()

        bar = progress.add_task(f"each prompt to both, {rate:.2f} a second", total=2 * count)
        before = decode.counters()
        answers: dict[str, list[list[Timed]]] = {name: [] for name in systems}
        for number in range(min(_ROUNDS, count)):
            some = load.prompts(
                len(range(number, count, _ROUNDS)), _ANSWER_TOKENS, rate, seed=number
            )
            # Each system goes first as often as the other, as far as the rounds allow it.
            names = list(systems) if number % 2 == 0 else list(reversed(systems))
            for name in names:
                time.sleep(REST_SECONDS)
                answers[name].append(
                    load.run(systems[name].ask, some, lambda: progress.advance(bar))
                )
        moved = decode.counters() - before
    first, second = shares_of_cores()
    cores = f"prefill server on core {first}, decode on {second}; round-robin on {first} and on "
    return Figures(
        row(APART, answers[APART]),
        row(ROUND_ROBIN, answers[ROUND_ROBIN]),
        rate,
        share,
        shown_pool,
        environment(model, cores + second),
        moved,
    )


def _start(servers: Servers, pool: str) -> tuple[Engine, Engine, list[Engine]]:
    # A pool that was used before may hold the same blocks. A salt gives this run a fresh namespace.
    salt = secrets.token_hex(8)
    first, second = shares_of_cores()
    sharing = servers.sharing("--host-bytes", str(_HOST_BYTES), "--set", f"salt={salt}")

    def start(name: str, cores: str, command: list[str], **environment: str) -> Engine:
        return servers.start(
            name,
            cores,
            command,
            sequences=_SEQUENCES,
            kv_bytes=_KV_BYTES,
            environment=environment,
        )

    shared = {POOL_VARIABLE: pool}
    return (
        start("prefill server", first, [*sharing, "--role", "producer"], **shared),
        start("decode server", second, [*sharing, "--role", "consumer"], **shared),
        [
            start(f"plain server {number}", cores, servers.plain())
            for number, cores in enumerate((first, second), start=1)
        ],
    )


def _warm_up(systems: dict[str, System], prefill: Engine) -> float:
    """Has every server use its memory and code once. Returns how many tokens of prompts the prefill
    server computes in a second."""
    seconds = []
    for number in range(4):
        tokens = [
            BEGIN,
            *((7 * number + 3 * token) % VOCABULARY for token in range(1, load.LONGEST)),
        ]
        for system in systems.values():
            system.ask(Prompt(number, tuple(tokens), 2, 0.0))
        time.sleep(REST_SECONDS)
        tokens[1] = (tokens[1] + 1) % VOCABULARY
        begin = time.perf_counter()
        prefill.complete(tokens, 1)
        seconds.append(time.perf_counter() - begin)
    return load.LONGEST / min(seconds)
