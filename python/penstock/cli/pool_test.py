"""`penstock pool test`: proves that a store does what every store must do."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from penstock._native import Store, check_store, store_checks
from penstock.cli import words
from penstock.cli.namespaces import add_timeout
from penstock.errors import PenstockError, Unsupported

if TYPE_CHECKING:
    from argparse import _SubParsersAction


@dataclass(frozen=True)
class Result:
    """What became of one check."""

    check: str
    seconds: float
    problem: str
    """What is wrong; empty if the store passes."""


def add_parsers(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the action to `penstock pool`."""
    parser = actions.add_parser(
        "test",
        help="prove that a store does what every store must do",
        description="Makes the checks that Penstock's own stores pass: for authors of stores. "
        "They put some 30 MiB under fresh keys and leave part of it there, so give an empty pool. "
        "Exit status 1 if the store fails one.",
    )
    words.add_pool_url(parser)
    parser.add_argument("--json", action="store_true", help="write one JSON document instead")
    add_timeout(parser, "finding out whether the store is there")
    parser.set_defaults(run_action=_run)


def _run(args: argparse.Namespace) -> int:
    url = words.pool_url(args)
    # A URL that is wrong, or a server that is not there, is no finding about the store.
    store = Store.open(url, client_name="penstock-test")
    with contextlib.suppress(Unsupported):
        store.describe(timeout=args.timeout)
    shown = store.url
    with words.progress(args.json) as progress:
        task = progress.add_task("testing", total=len(store_checks()))
        results = []
        for result in _results(url):
            results.append(result)
            progress.advance(task)
    passes = not any(result.problem for result in results)
    if args.json:
        document = {"url": shown, "passes": passes, "checks": [asdict(one) for one in results]}
        words.print_json(document)
    else:
        _show(shown, results, passes)
    return 0 if passes else 1


def _results(url: str) -> Iterator[Result]:
    for check in store_checks():
        start = time.perf_counter()
        try:
            problem = check_store(url, check) or ""
        except PenstockError as error:
            problem = str(error)
        yield Result(check, time.perf_counter() - start, problem)


def _show(url: str, results: list[Result], passes: bool) -> None:
    console = words.console()
    console.print(words.text(url, style="bold"))
    table = Table.grid(padding=(0, 1))
    for result in results:
        mark = Text("✗", style="bold red") if result.problem else Text("✓", style="green")
        table.add_row(mark, result.check, Text(f"{result.seconds:.2f} s", style="dim"))
        if result.problem:
            table.add_row("", words.text(result.problem))
    console.print(table)
    if passes:
        console.print("This store does what every store must do.", style="green")
    else:
        console.print("This store cannot be a pool.", style="bold red")
