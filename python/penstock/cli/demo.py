"""`penstock demo`: two vLLM servers over one pool, measured against one without it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from penstock.cli import words
from penstock.cli.words import print_json, size

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from penstock.demo.figures import Figures, Latency


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to `penstock`'s parser."""
    parser = subparsers.add_parser(
        "demo",
        help="show two vLLM servers share a pool, on this machine",
        description="Starts two vLLM servers on this machine's CPU over one pool, replays "
        "conversations that change servers with every turn, sends each prompt in turn to a "
        "vLLM server without Penstock too, and shows times and whether every output is the same. "
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
        default=8,
        help="how many (default: %(default)s)",
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


def run(args: argparse.Namespace) -> int:
    """Runs the demo. Returns 0 if all outputs are equal and blocks were loaded, else 1."""
    # Imported here, because the demo needs packages that vLLM installs, and other commands do not.
    from penstock.demo import report, workload
    from penstock.demo.forecast import requests_text
    from penstock.demo.measure import measure
    from penstock.demo.processes import Interrupted

    console = Console(stderr=args.json, highlight=False)
    material = workload.trace(args.trace) if args.trace else workload.documents(args.conversations)
    try:
        pool = None if args.pool is None else words.named_pool(args.pool)
        figures = measure(material, pool, args.pool_server, console)
    except Interrupted as signal:
        console.print(f"stopped by {signal}; no server is left", style="yellow")
        return 128 + signal.number
    if args.json:
        print_json(figures.as_json())
    else:
        show(figures, console)
    if args.report:
        words.write_file(args.report, report.render(figures))
        console.print(f"report: {args.report.resolve().as_uri()}", soft_wrap=True)
    if args.requests:
        exchanges = [each.exchange for each in figures.comparisons]
        words.write_file(args.requests, requests_text(exchanges))
    for failure in figures.failures:
        console.print(f"FAILED: {failure}", style="bold red")
    return 1 if figures.failures else 0


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
