"""Prefill and decode apart, against two servers behind round-robin, on the real vLLM.

Every system has two servers of the same model, on the same cores, in turn. Each gets the same
prompts at the same times, whether or not earlier ones are answered. The systems are measured in
groups, each group with the two servers behind round-robin. Run it as ``python -m
benches.prefill_decode``; with peers, by ``.venv-bench/bin/python``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benches import connectors, report
from benches.connectors import Connector
from benches.report import progress
from lab.demo.engine import Engine
from lab.demo.page import picture
from lab.demo.pd import load
from lab.demo.pd.figures import Row, row
from lab.demo.pd.load import Prompt, Timed
from lab.demo.pd.systems import Apart, RoundRobin, System
from lab.demo.replay import BLOCK_TOKENS, REST_SECONDS
from lab.demo.servers import Servers, shares_of_cores, wait_until_ready
from lab.models.chat import BEGIN, VOCABULARY, model_folder
from lab.processes import Interruption, Processes, ServerFailed
from penstock.chart import scatter
from penstock.completions import Answer
from penstock.programs import cache_folder

PLAIN, SHORT_STEPS = "round-robin", "round-robin, short steps"
STEP_TOKENS = 256
"""Tokens of a short step: what operators set so that prompts hold up answers less."""
KV_BYTES = 512 << 20
SEQUENCES = 16
ANSWER_TOKENS = 96
GROUP = 2
"""Systems beside the baseline that are measured together: each has two servers in memory."""


class Blind:
    """A proxy that tells the servers nothing: the prompt to one, then to the other."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self._prefill, self._decode = prefill, decode

    def ask(self, prompt: Prompt) -> Answer:
        """The answer to `prompt`; its times count from this call on."""
        begin = time.perf_counter()
        self._prefill.complete(prompt.tokens, 1)
        waited = time.perf_counter() - begin
        return self._decode.complete(prompt.tokens, prompt.answer_tokens).later(waited)


class Pair:
    """Two servers of one system, and what they need beside them."""

    def __init__(self, name: str, connector: Connector | None) -> None:
        self.name = name
        self._connector = connector
        self.failure: str | None = None
        self.rounds: list[list[Timed]] = []
        self.engines: list[Engine] = []
        self.system: System

    def start(self, model: Path, folder: Path, servers: Servers) -> None:
        """Starts the servers."""
        options = ["--max-num-batched-tokens", str(STEP_TOKENS)] if self.name == SHORT_STEPS else []
        roles = ("kv_producer", "kv_consumer")
        if self._connector is not None:
            own = folder / self.name
            own.mkdir()
            self._connector.start(own)
        for role, cores in zip(roles, shares_of_cores(), strict=True):
            # vLLM of this environment, which may have more than the one that Penstock is in.
            command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
            command += options
            environment = {}
            if self._connector is not None:
                transfer = self._connector.transfer()
                assert transfer is not None
                # Other connectors store and load in one role only.
                if isinstance(self._connector, connectors.Penstock):
                    transfer["kv_role"] = role
                command += ["--kv-transfer-config", json.dumps(transfer)]
                environment = self._connector.environment()
            self.engines.append(
                servers.start(
                    f"{self.name} {role}",
                    cores,
                    command,
                    sequences=SEQUENCES,
                    kv_bytes=KV_BYTES,
                    environment=environment,
                )
            )
        if self._connector is None:
            self.system = RoundRobin(self.engines)
        elif isinstance(self._connector, connectors.Penstock | connectors.Nixl):
            self.system = Apart(self.engines[:1], self.engines[1:])
        else:
            self.system = Blind(*self.engines)

    def stop(self) -> None:
        """Ends what the servers needed. They end by themselves."""
        if self._connector is not None:
            self._connector.stop()

    def counters(self) -> dict[str, float]:
        """What Penstock counted on the decode server, if anything."""
        prefix = "vllm:penstock_"
        return {
            name.removeprefix(prefix).removesuffix("_total"): value
            for name, value in self.engines[-1].metrics().items()
            if name.startswith(prefix) and name.endswith("_total") and value
        }

    def external_hits(self) -> float:
        """Prompt tokens that the decode server took from outside, as vLLM counts them."""
        return self.engines[-1].metrics().get("vllm:external_prefix_cache_hits_total", 0.0)


def warm_up(pair: Pair) -> None:
    """Has both servers use their memory and code once."""
    for number in range(4):
        body = ((7 * number + 3 * token) % VOCABULARY for token in range(1, load.LONGEST))
        pair.system.ask(Prompt(number, (BEGIN, *body), 2, 0.0))


def speed(engine: Engine) -> float:
    """Tokens of prompts that a server computes in a second."""
    seconds = []
    for number in range(3):
        tokens = [BEGIN, *((11 * number + 5 * token) % VOCABULARY for token in range(load.LONGEST))]
        time.sleep(REST_SECONDS)
        begin = time.perf_counter()
        engine.complete(tokens, 1)
        seconds.append(time.perf_counter() - begin)
    return load.LONGEST / min(seconds)


def measure(group: Sequence[Pair], args: argparse.Namespace) -> dict[str, Any]:
    """Measures some systems together."""
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as name,
        contextlib.ExitStack() as ends,
        Interruption() as interruption,
        Processes(interruption) as processes,
    ):
        model = model_folder(cache_folder() / "demo")
        servers = Servers(model, Path(name), processes)
        for pair in group:
            ends.callback(pair.stop)
            pair.start(model, Path(name), servers)
        running = []
        for pair in group:
            try:
                wait_until_ready(pair.engines, lambda ready: None)
                warm_up(pair)
                running.append(pair)
            except ServerFailed as error:
                pair.failure = str(error).splitlines()[0]
                progress(f"{pair.name}: {error}")
        rate = args.load * speed(group[0].engines[0]) / load.mean_tokens()
        before = {pair.name: pair.external_hits() for pair in running}
        for number in range(args.rounds):
            prompts = load.prompts(args.prompts, ANSWER_TOKENS, rate, seed=args.seed + number)
            order = random.Random(number).sample(running, len(running))
            for pair in order:
                time.sleep(REST_SECONDS)
                progress(f"round {number + 1} of {args.rounds}: {pair.name}")
                pair.rounds.append(load.run(pair.system.ask, prompts, lambda: None))
        time.sleep(REST_SECONDS)
        hits = {pair.name: pair.external_hits() - before[pair.name] for pair in running}
        counters = {pair.name: found for pair in running if (found := pair.counters())}
    found = {pair.name: row(pair.name, pair.rounds) for pair in running}
    reference = found[PLAIN]
    return {
        "rate": rate,
        "systems": {name: figures(each, reference, hits[name]) for name, each in found.items()},
        "counters": counters,
        "failures": {pair.name: pair.failure for pair in group if pair.failure},
    }


def figures(each: Row, reference: Row, hits: float) -> dict[str, Any]:
    """A system's figures, and what they are to those of the baseline in the same run."""
    here, there = each.as_json(), reference.as_json()
    loadable = sum(
        (len(timed.prompt.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for timed in each.answers
    )
    equal = sum(
        own.answer.tokens == other.answer.tokens
        for own, other in zip(each.answers, reference.answers, strict=True)
    )
    return here | {
        "loaded_share": hits / loadable,
        "outputs_equal": equal,
        "ratios": {name: here[name] / there[name] for name in here if name != "requests"},
    }


def table(groups: Sequence[dict[str, Any]]) -> str:
    """All systems, a line each."""
    lines = []
    for group in groups:
        for name, found in group["systems"].items():
            lines.append(
                [
                    name,
                    f"{found['loaded_share']:.1%}",
                    *(
                        f"{found[key] * 1e3:,.0f}"
                        for key in (
                            "first_token_p50",
                            "first_token_p99",
                            "hand_over_p50",
                            "hand_over_p99",
                            "between_tokens_p50",
                            "between_tokens_p99",
                            "between_tokens_max",
                            "whole_answer_p50",
                        )
                    ),
                    f"{found['ratios']['between_tokens_p99']:.2f}",
                    f"{found['ratios']['first_token_p50']:.2f}",
                    f"{found['outputs_equal']} of {found['requests']}",
                ]
            )
        lines += [[name, "failed", *[""] * 11] for name in group["failures"]]
    return report.table(
        [
            "ms",
            "loaded",
            "first token p50",
            "p99",
            "on the decode server p50",
            "p99",
            "between tokens p50",
            "p99",
            "longest",
            "whole answer p50",
            "between p99, ratio",
            "first p50, ratio",
            "outputs equal",
        ],
        lines,
    )


def draw(group: Sequence[Pair]) -> str:
    """Time between tokens of the first system that is not round-robin, and of round-robin."""
    plain = next(pair for pair in group if pair.name == PLAIN)
    apart = next(pair for pair in group if pair.name.startswith("penstock"))
    series = [("plain", row(PLAIN, plain.rounds).gaps), ("pool", row("", apart.rounds).gaps)]
    return picture(
        scatter(series, "ms", "s since the round began"),
        (("plain", "two servers, round-robin"), ("pool", "prefill and decode apart")),
    )


def main() -> None:
    """Measures, prints a table and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.prefill_decode", description=__doc__)
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=[name for name in (*connectors.every(), "nixl", SHORT_STEPS) if name != "none"],
        default=["penstock-file", "penstock-valkey", "penstock-shm", SHORT_STEPS],
    )
    parser.add_argument("--prompts", type=int, default=15, help="a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--load", type=float, default=0.6, help="of what the prefill server can do")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the times as SVG")
    args = report.begin(parser)
    rows = connectors.every() | {"nixl": connectors.Nixl()}
    names = args.systems
    groups = []
    for begin in range(0, len(names), GROUP):
        chosen = names[begin : begin + GROUP]
        group = [Pair(PLAIN, None), *(Pair(name, rows.get(name)) for name in chosen)]
        groups.append(measure(group, args))
        if args.plot and begin == 0:
            args.plot.write_text(draw(group), encoding="utf-8")
    settings = {"prompts": args.prompts, "rounds": args.rounds, "load": args.load}
    report.finish(args, table(groups), {**settings, "groups": groups})


if __name__ == "__main__":
    main()
