"""The demo's command line: its options, and its figures for people."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from lab.demo import report, workload
from lab.demo.figures import Figures
from lab.demo.forecast import requests_text
from lab.demo.measure import measure
from lab.demo.pd import figures as pd
from lab.demo.pd import measure as pd_measure
from lab.demo.pd import report as pd_report
from lab.latency import Latency
from lab.processes import Interrupted
from penstock.cli import words
from penstock.cli.main import Parser, status_of
from penstock.cli.words import print_json, size
from penstock.errors import ConfigError

_CONVERSATIONS = 8
_PROMPTS = 30
_LOAD = 0.6


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; returns its exit status, one of `penstock.cli.main.STATUSES`."""
    args = make_parser().parse_args(arguments)
    return status_of(lambda: run(args))


def make_parser() -> argparse.ArgumentParser:
    """The parser of the demo's options."""
    parser = Parser(
        prog="python -m lab.demo",
        description="Starts two vLLM servers on this machine's CPU over one pool, replays "
        "conversations that change servers with every turn, sends each prompt in turn to a "
        "vLLM server without Penstock too, and shows times and whether every output is the same. "
        "With --pd, a prefill server hands prompts over to a decode server in place of this. "
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
        "--conversations",
        metavar="N",
        type=words.count_argument,
        help=f"how many (default: {_CONVERSATIONS})",
    )
    material.add_argument(
        "--pd",
        action="store_true",
        help="prefill and decode apart: a prefill server hands prompts over to a decode server, "
        "against two servers behind round-robin",
    )
    parser.add_argument(
        "--prompts",
        metavar="N",
        type=words.count_argument,
        help=f"with --pd: how many (default: {_PROMPTS})",
    )
    parser.add_argument(
        "--load",
        metavar="SHARE",
        type=words.share_argument,
        help="with --pd: prompts come at this share of what the prefill server can compute "
        f"(default: {_LOAD:.0%})".replace("%", "%%"),
    )
    parser.add_argument("--report", metavar="FILE", type=Path, help="write an HTML report there")
    parser.add_argument(
        "--requests",
        metavar="FILE",
        type=Path,
        help="write the requests there as a trace for `penstock simulate`",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON in place of the table"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Runs the demo. Returns 0 if all outputs are equal and blocks were loaded, else 1."""
    console = Console(stderr=args.json, highlight=False)
    pool = None if args.pool is None else words.named_pool(args.pool)
    try:
        if args.pd:
            return _run_apart(args, pool, console)
        return _run_shared(args, pool, console)
    except Interrupted as signal:
        console.print(f"stopped by {signal}; no server is left", style="yellow")
        return 128 + signal.number


def _run_shared(args: argparse.Namespace, pool: str | None, console: Console) -> int:
    for name in ("prompts", "load"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name} is for --pd")
    if args.trace:
        material = workload.trace(args.trace)
    else:
        material = workload.documents(args.conversations or _CONVERSATIONS)
    figures = measure(material, pool, args.pool_server, console)
    if args.json:
        print_json(figures.as_json())
    else:
        show(figures, console)
    if args.requests:
        exchanges = [each.exchange for each in figures.comparisons]
        words.write_file(args.requests, requests_text(exchanges))
    page = report.render(figures) if args.report else ""
    return _conclude(figures.failures, page, args, console)


def _run_apart(args: argparse.Namespace, pool: str | None, console: Console) -> int:
    if args.requests:
        raise ConfigError("--requests is not for --pd: no prompt is like another")
    prompts, load = args.prompts or _PROMPTS, args.load or _LOAD
    figures = pd_measure.measure(prompts, load, pool, args.pool_server, console)
    if args.json:
        print_json(figures.as_json())
    else:
        show_apart(figures, console)
    page = pd_report.render(figures) if args.report else ""
    return _conclude(figures.failures, page, args, console)


def _conclude(
    failures: Sequence[str], page: str, args: argparse.Namespace, console: Console
) -> int:
    if args.report:
        words.write_file(args.report, page)
        console.print(f"report: {args.report.resolve().as_uri()}", soft_wrap=True)
    for failure in failures:
        console.print(f"FAILED: {failure}", style="bold red")
    return 1 if failures else 0


def show_apart(figures: pd.Figures, console: Console) -> None:
    """Prints the figures of `--pd` for people."""
    rows = (figures.apart, figures.round_robin)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    table.add_column("ms", no_wrap=True)
    for row in rows:
        table.add_column(row.name, justify="right", min_width=13)
    table.add_row("first token, p50 / p99", *(_milliseconds(row.first_token) for row in rows))
    table.add_row("  of it on the decode server", _milliseconds(figures.apart.hand_over), "")
    table.add_row("between tokens, p50 / p99", *(_milliseconds(row.between_tokens) for row in rows))
    table.add_row("longest pause in an answer", *(f"{row.longest_gap * 1e3:,.0f}" for row in rows))
    table.add_row("whole answer, p50 / p99", *(_milliseconds(row.whole_answer) for row in rows))
    console.print(table)
    count = len(figures.apart.answers)
    console.print(
        f"{count} prompts of {figures.prompt_tokens:,} tokens, {figures.rate:.2f} a second: "
        f"{figures.prefill_share:.0%} of what the prefill server can compute\n"
        f"loaded by the decode server: {figures.loaded_share:.1%} of the prompts' whole blocks, "
        f"{size(figures.moved.loaded_bytes)}\n"
        f"outputs equal to those without Penstock: {count - figures.differing} of {count}"
    )


def show(figures: Figures, console: Console) -> None:
    """Prints the figures for people."""
    rows = figures.rows
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    table.add_column("first token: p50 / p99 ms", no_wrap=True)
    for row in rows:
        table.add_column(row.situation.value, justify="right", min_width=13)
    table.add_row("requests", *(str(row.requests) for row in rows))
    table.add_row("prompt tokens", *(f"{row.prompt_tokens:,}" for row in rows))
    table.add_row("  loaded from the pool", *(f"{row.loaded_tokens:,}" for row in rows))
    table.add_row("  in its own cache", *(f"{row.local_tokens:,}" for row in rows))
    table.add_row("first token with Penstock", *(_milliseconds(row.penstock) for row in rows))
    table.add_row("first token recomputed", *(_milliseconds(row.recomputed) for row in rows))
    console.print(table)
    equal = len(figures.comparisons) - len(figures.differing)
    console.print(
        f"all: {len(figures.comparisons)} requests, {figures.prompt_tokens:,} prompt tokens, "
        f"{figures.moved.loaded_tokens:,} of them loaded from the pool\n"
        f"bytes moved: {size(figures.moved.loaded_bytes)} loaded, "
        f"{size(figures.moved.stored_bytes)} stored\n"
        f"outputs equal to the run without Penstock: {equal} of {len(figures.comparisons)}"
    )
    if figures.hits is not None:
        console.print(
            f"blocks not computed: {figures.hits.found:.1%}; by `penstock simulate`: "
            f"{figures.hits.expected:.1%}"
        )


def _milliseconds(latency: Latency) -> str:
    return f"{latency.p50 * 1e3:,.0f} / {latency.p99 * 1e3:,.0f}"
