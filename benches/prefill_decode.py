"""Prefill and decode apart, against two servers behind round-robin, on the real vLLM.

Every system has two servers of the same model, on the same cores, in turn. Each gets the same
prompts at the same times, whether or not earlier ones are answered. The systems are measured in
groups, each group with the two servers behind round-robin. Run it as ``python -m
benches.prefill_decode``; with peers, by ``.venv-bench/bin/python``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benches.shared import pairs, report, rows, serving
from benches.shared.connectors import Connector, Penstock
from benches.shared.pairs import Pair
from benches.shared.peers import Nixl
from benches.shared.report import progress
from benches.shared.systems import BASELINE, NAMES, every
from lab.demo.engine import Engine
from lab.demo.page import picture
from lab.demo.pd import load
from lab.demo.pd.figures import Row, row
from lab.demo.pd.load import Prompt, Timed
from lab.demo.pd.systems import Apart, RoundRobin, System
from lab.demo.replay import BLOCK_TOKENS, REST_SECONDS
from lab.models.chat import BEGIN
from lab.models.prompts import tokens
from penstock.chart import scatter
from penstock.completions import Answer

PLAIN, SHORT_STEPS, NIXL = "round-robin", "round-robin, short steps", "nixl"
SYSTEMS = [name for name in (*NAMES, NIXL, SHORT_STEPS) if name != BASELINE]
STEP_TOKENS = 256
"""Tokens of a short step: what operators set so that prompts hold up answers less."""
KV_BYTES = 512 << 20
SEQUENCES = 16
ANSWER_TOKENS = 96
COLUMNS = [
    ("ms", "{system}"),
    ("loaded", "{loaded_share:.1%}"),
    ("first token p50", "{first_token_p50!m:,.0f}"),
    ("p99", "{first_token_p99!m:,.0f}"),
    ("on the decode server p50", "{hand_over_p50!m:,.0f}"),
    ("p99", "{hand_over_p99!m:,.0f}"),
    ("between tokens p50", "{between_tokens_p50!m:,.0f}"),
    ("p99", "{between_tokens_p99!m:,.0f}"),
    ("longest", "{between_tokens_max!m:,.0f}"),
    ("whole answer p50", "{whole_answer_p50!m:,.0f}"),
    ("between p99, ratio", "{ratios[between_tokens_p99]:.2f}"),
    ("first p50, ratio", "{ratios[first_token_p50]:.2f}"),
    ("outputs equal", "{outputs_equal} of {requests}"),
]


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


def pair_of(name: str) -> Pair:
    """The two servers of a system. Other connectors than Penstock have one role only, in which
    they store and load."""
    if name in (PLAIN, SHORT_STEPS):
        short = ("--max-num-batched-tokens", str(STEP_TOKENS)) if name == SHORT_STEPS else ()
        return Pair(name, Connector(), *short)
    connector = Nixl() if name == NIXL else every()[name]
    return Pair(name, connector, apart=isinstance(connector, Penstock))


def system_of(pair: Pair) -> System:
    """How two servers answer prompts together."""
    if isinstance(pair.connector, Penstock | Nixl):
        return Apart(pair.engines[:1], pair.engines[1:])
    if pair.connector.transfer() is None:
        return RoundRobin(pair.engines)
    return Blind(*pair.engines)


def counters(pair: Pair) -> dict[str, float]:
    """What Penstock counted on the decode server, if anything."""
    prefix = "vllm:penstock_"
    return {
        name.removeprefix(prefix).removesuffix("_total"): value
        for name, value in pair.engines[-1].metrics().items()
        if name.startswith(prefix) and name.endswith("_total") and value
    }


def external_hits(pair: Pair) -> float:
    """Prompt tokens that the decode server took from outside, as vLLM counts them."""
    return pair.engines[-1].metrics().get("vllm:external_prefix_cache_hits_total", 0.0)


def warm_up(pair: Pair) -> None:
    """Has both servers use their memory and code once."""
    for number in range(4):
        prompt = (BEGIN, *tokens(load.LONGEST - 1, f"warm-up {number}"))
        system_of(pair).ask(Prompt(number, prompt, 2, 0.0))


def speed(engine: Engine) -> float:
    """Tokens of prompts that a server computes in a second."""
    seconds = []
    for number in range(3):
        prompt = [BEGIN, *tokens(load.LONGEST, f"speed {number}")]
        time.sleep(REST_SECONDS)
        begin = time.perf_counter()
        engine.complete(prompt, 1)
        seconds.append(time.perf_counter() - begin)
    return load.LONGEST / min(seconds)


def measure(names: Sequence[str], args: argparse.Namespace) -> tuple[dict[str, Any], list[Row]]:
    """Measures some systems together. The first one is the baseline."""
    group = [pair_of(name) for name in names]
    with serving.place() as place:
        running = pairs.started(place, group, warm_up, kv_bytes=KV_BYTES, sequences=SEQUENCES)
        rounds: dict[str, list[list[Timed]]] = {pair.name: [] for pair in running}
        rate = args.load * speed(running[0].engines[0]) / load.mean_tokens()
        before = {pair.name: external_hits(pair) for pair in running}
        for number in range(args.rounds):
            prompts = load.prompts(args.prompts, ANSWER_TOKENS, rate, seed=args.seed + number)
            for pair in pairs.shuffled(running, number):
                time.sleep(REST_SECONDS)
                progress(f"round {number + 1} of {args.rounds}: {pair.name}")
                rounds[pair.name].append(load.run(system_of(pair).ask, prompts, lambda: None))
        time.sleep(REST_SECONDS)
        hits = {pair.name: external_hits(pair) - before[pair.name] for pair in running}
        counted = {pair.name: counters(pair) for pair in running}
    found = [row(name, of) for name, of in rounds.items()]
    return {
        "rate": rate,
        "systems": {each.name: figures(each, found[0], hits[each.name]) for each in found},
        "counters": {name: counts for name, counts in counted.items() if counts},
        "failures": pairs.failures(group),
    }, found


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
    lines: list[dict[str, Any]] = []
    for group in groups:
        lines += [{"system": name} | found for name, found in group["systems"].items()]
        lines += [{"system": name, "failure": why} for name, why in group["failures"].items()]
    return report.listing(lines, COLUMNS)


def draw(found: Sequence[Row]) -> str:
    """Time between tokens of Penstock's first system, and of round-robin."""
    plain = next(each for each in found if each.name == PLAIN)
    apart = next(each for each in found if each.name.startswith("penstock"))
    keys = (("plain", "two servers, round-robin"), ("pool", "prefill and decode apart"))
    series = [("plain", plain.gaps), ("pool", apart.gaps)]
    return picture(scatter(series, "ms", "s since the round began"), keys)


def main() -> None:
    """Measures, prints a table and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.prefill_decode", description=__doc__)
    chosen = ["penstock-file", "penstock-valkey", "penstock-shm", SHORT_STEPS]
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=chosen)
    parser.add_argument("--prompts", type=int, default=15, help="a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--load", type=float, default=0.6, help="of what the prefill server can do")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the times as SVG")
    args = report.begin(parser)
    measured = [measure([PLAIN, *some], args) for some in rows.groups(args.systems, pairs.GROUP)]
    groups = [group for group, _ in measured]
    settings = {"prompts": args.prompts, "rounds": args.rounds, "load": args.load}
    report.finish(args, table(groups), {**settings, "groups": groups})
    if args.plot:
        args.plot.write_text(draw(measured[0][1]), encoding="utf-8")


if __name__ == "__main__":
    main()
