"""Hits under load: two servers behind round-robin, one of them busy, by `vllm bench serve`.

The requests are turns of conversations. Conversations of one kind begin with the same text, and
each turn repeats all turns before it. A router sends them to the two servers in turn, so a server
has computed only half of what a conversation repeats. Somebody else keeps the second server busy.

`vllm bench serve` sends requests at random moments (Poisson), whether or not earlier ones are
answered. Rates are shares of what the baseline can answer. The baseline is vLLM alone: two private
caches. Systems are measured in groups, all servers of a group alive at once. For each rate and
round they take turns, with the same requests. Run it as ``scripts/vllm-router.sh .venv 0.1.17
.venv-bench/bin/python -m benches.under_load``, after `benches/setup_peers.sh`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benches import connectors, quiet, report
from benches.connectors import Connector
from benches.report import MIB, progress
from lab.demo.engine import Engine
from lab.demo.page import picture
from lab.demo.servers import Servers, shares_of_cores, wait_until_ready
from lab.models.chat import BEGIN, VOCABULARY, model_folder
from lab.processes import Interruption, Processes, ServerFailed, free_port
from penstock.chart import Bar, grouped_bars
from penstock.programs import cache_folder

BASELINE = "none"
KV_BYTES = 288 * MIB
"""Of a server: nine conversations at their end."""
SEQUENCES = 8
KINDS, KIND_TOKENS = 3, 768
"""Texts that conversations begin with."""
TURNS, TURN_TOKENS, ANSWER_TOKENS = 4, 256, 16
BUSY_TOKENS, BUSY_ANSWER = 512, 32
"""Of the requests that keep the second server busy, one after the other."""
GROUP = 2
"""Systems beside the baseline that are measured together: each has two servers in memory."""
ROUTER = "PENSTOCK_TEST_VLLM_ROUTER"
FIGURES = ("request_throughput", "median_ttft_ms", "p99_ttft_ms")


def write_requests(path: Path, seed: int, sessions: int) -> int:
    """Writes the turns of some conversations for `vllm bench serve`, in the order in which they are
    sent. Returns how many they are.

    Each turn of all conversations comes before their next one. A token is a byte, so texts are
    random letters.
    """
    rng = random.Random(seed)

    def text(tokens: int) -> str:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=tokens))

    kinds = [text(KIND_TOKENS) for _ in range(KINDS)]
    talks = [kinds[number % KINDS] for number in range(sessions)]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(TURNS):
            for number in range(sessions):
                talks[number] += text(TURN_TOKENS)
                line = {"prompt": talks[number], "output_tokens": ANSWER_TOKENS}
                file.write(json.dumps(line) + "\n")
                talks[number] += text(ANSWER_TOKENS)
    return sessions * TURNS


@dataclass
class System:
    """Two servers of one kind, and the router before them."""

    name: str
    connector: Connector
    engines: list[Engine] = field(default_factory=list)
    port: int = 0
    failure: str | None = None
    runs: dict[float, list[dict[str, Any]]] = field(default_factory=dict)
    """What `vllm bench serve` said, by the share of the load."""

    def start(self, model: Path, folder: Path, servers: Servers) -> None:
        """Starts the servers."""
        own = folder / self.name
        own.mkdir()
        self.connector.start(own)
        for number, cores in enumerate(shares_of_cores()):
            command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
            command += ["--served-model-name", "bench"]
            if (transfer := self.connector.transfer()) is not None:
                command += ["--kv-transfer-config", json.dumps(transfer)]
            engine = servers.start(
                f"{self.name} {number}",
                cores,
                command,
                sequences=SEQUENCES,
                kv_bytes=KV_BYTES,
                environment=self.connector.environment(),
            )
            self.engines.append(engine)

    def route(self, processes: Processes, folder: Path) -> None:
        """Starts the router."""
        self.port = free_port()
        command = [os.environ[ROUTER], "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--policy", "round_robin", "--prometheus-port", str(free_port())]
        command += ["--worker-urls", *(engine.url for engine in self.engines)]
        log = folder / f"{self.name}-router.log"
        # Nothing of this environment is the router's.
        server = processes.start(f"{self.name} router", command, log, {"PYTHONPATH": ""})
        wait_until_ready([Engine("router", server, self.port)], lambda ready: None)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Keeps the second server busy with prompts that nobody else sends."""
        over = threading.Event()

        def ask() -> None:
            rng = random.Random(self.name)
            while not over.is_set():
                prompt = [BEGIN, *(rng.randrange(VOCABULARY) for _ in range(BUSY_TOKENS))]
                self.engines[1].complete(prompt, BUSY_ANSWER)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def serve(system: System, model: Path, folder: Path, sent: Path, count: int, rate: float) -> Any:
    """Runs `vllm bench serve` once, and returns its result."""
    result = folder / "result.json"
    options = {
        "backend": "openai",
        "base-url": f"http://127.0.0.1:{system.port}",
        "model": "bench",
        "tokenizer": model,
        "dataset-name": "custom",
        "dataset-path": sent,
        "custom-output-len": ANSWER_TOKENS,
        "num-prompts": count,
        "request-rate": rate,
        "seed": 1,
        "percentile-metrics": "ttft",
        "result-dir": folder,
        "result-filename": result.name,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    command += ["--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]
    command += ["--skip-chat-template", "--disable-shuffle"]
    for option, value in options.items():
        command += [f"--{option}", str(value)]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    quiet.wait(timeout=3)
    with system.busy():
        said = subprocess.run(command, capture_output=True, text=True, env=os.environ | offline)
    if said.returncode != 0:
        raise RuntimeError(f"vllm bench serve failed: {said.stderr[-3000:]}")
    found = json.loads(result.read_text())
    if found["completed"] != count:
        raise RuntimeError(f"only {found['completed']} of {count} requests were answered")
    kept = {figure: found[figure] for figure in FIGURES}
    return kept | {"ttfts": found["ttfts"], "duration": found["duration"]}


def measure(group: Sequence[System], args: argparse.Namespace, rate: float | None) -> float:
    """Measures some systems together. Returns the rate that the baseline can answer, in requests a
    second, measured if it is not given."""
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as name,
        contextlib.ExitStack() as ends,
        Interruption() as interruption,
        Processes(interruption) as processes,
    ):
        folder = Path(name)
        model = model_folder(cache_folder() / "demo")
        servers = Servers(model, folder, processes)
        running = []
        for system in group:
            ends.callback(system.connector.stop)
            try:
                system.start(model, folder, servers)
                wait_until_ready(system.engines, lambda ready: None)
                system.route(processes, folder)
                running.append(system)
                progress(f"{system.name} is ready")
            except (ServerFailed, RuntimeError) as error:
                system.failure = report.cause(str(error))
                progress(f"{system.name}: {error}")
        sent = folder / "requests.jsonl"
        # Each server uses its memory and code once.
        for system in running:
            count = write_requests(sent, args.seed, 6)
            warm = serve(system, model, folder, sent, count, float("inf"))
            if rate is None and system.name == BASELINE:
                # The second time with texts that no cache has.
                count = write_requests(sent, args.seed + 1, args.sessions)
                warm = serve(system, model, folder, sent, count, float("inf"))
                rate = warm["request_throughput"]
                progress(f"saturated: {rate:.2f} requests/s")
        assert rate is not None, "the baseline is not running"
        for number in range(args.rounds):
            for share in args.loads:
                # Nobody has seen these texts before.
                seed = args.seed + 100 * (number + 1) + round(10 * share)
                count = write_requests(sent, seed, args.sessions)
                for system in random.Random(seed).sample(running, len(running)):
                    progress(f"round {number + 1} of {args.rounds}, {share} of it: {system.name}")
                    run = serve(system, model, folder, sent, count, share * rate)
                    system.runs.setdefault(share, []).append(run)
        return rate


def figures(system: System, baseline: System) -> dict[str, Any]:
    """Over all rounds, by the share of the load."""
    found: dict[str, Any] = {}
    for share, runs in system.runs.items():
        firsts = sorted(seconds for run in runs for seconds in run["ttfts"])
        others = baseline.runs[share]
        found[str(share)] = {
            "requests_per_second": statistics.median(run["request_throughput"] for run in runs),
            "first_token_p50": statistics.median(firsts),
            "first_token_p99": firsts[int(0.99 * (len(firsts) - 1))],
            "to_baseline": {
                figure: report.median_ratio(
                    [run[figure] for run in runs], [run[figure] for run in others]
                )
                for figure in FIGURES
            },
            "runs": runs,
        }
    return found


def table(groups: Sequence[dict[str, Any]]) -> str:
    """A line for each load and system."""
    heads = ["load", "system", "requests/s", "to the baseline", "first token p50, ms"]
    heads += ["to the baseline", "p99, ms", "to the baseline"]
    lines = []
    for group in groups:
        for share in group["systems"][BASELINE]:
            for name, found in group["systems"].items():
                of = found[share]
                to = [f"{of['to_baseline'][figure]:.2f}" for figure in FIGURES]
                lines.append(
                    [
                        share,
                        name,
                        *(f"{of['requests_per_second']:.2f}", to[0]),
                        *(f"{of['first_token_p50'] * 1e3:,.0f}", to[1]),
                        *(f"{of['first_token_p99'] * 1e3:,.0f}", to[2]),
                    ]
                )
        lines += [["", name, "failed", *[""] * 5] for name in group["failures"]]
    return report.table(heads, lines)


def draw(group: dict[str, Any]) -> str:
    """Bars of each system's median first token, with lines to their 99th percentiles."""
    kinds = {BASELINE: "plain"}
    groups = []
    for share in group["systems"][BASELINE]:
        bars = [
            Bar(kinds.get(name, "pool"), of["first_token_p50"], of["first_token_p99"], name)
            for name, found in group["systems"].items()
            for of in (found[share],)
        ]
        groups.append((f"{share} of saturation", bars))
    return picture(
        grouped_bars(groups, "s"),
        (("plain", "vLLM alone, two private caches"), ("pool", "with a connector")),
    )


def main() -> None:
    """Measures, prints a table and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.under_load", description=__doc__)
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=[name for name in connectors.every() if name != BASELINE],
        default=["penstock-file", "penstock-shm", "penstock-valkey"],
    )
    parser.add_argument("--loads", nargs="+", type=float, default=[0.5, 0.8, 1.0])
    parser.add_argument("--sessions", type=int, default=15, help="conversations of a run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the first group as SVG")
    args = report.begin(parser)
    if ROUTER not in os.environ:
        parser.error("no router: run this by scripts/vllm-router.sh")
    rows = connectors.every()
    groups = []
    rate: float | None = None
    for begin in range(0, len(args.systems), GROUP):
        names = [BASELINE, *args.systems[begin : begin + GROUP]]
        group = [
            System(name, connectors.every()[BASELINE] if name == BASELINE else rows[name])
            for name in names
        ]
        began = time.time()
        rate = measure(group, args, rate)
        running = [system for system in group if system.failure is None]
        groups.append(
            {
                "seconds": time.time() - began,
                "systems": {system.name: figures(system, group[0]) for system in running},
                "failures": {s.name: s.failure for s in group if s.failure is not None},
            }
        )
        if args.plot and begin == 0:
            args.plot.write_text(draw(groups[0]), encoding="utf-8")
    settings = {"saturation": rate, "loads": args.loads, "sessions": args.sessions}
    report.finish(args, table(groups), {**settings, "rounds": args.rounds, "groups": groups})


if __name__ == "__main__":
    main()
