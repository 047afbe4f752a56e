"""`penstock pool schemes`: which stores other distributions bring."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.table import Table

from penstock.cli import words
from penstock.cli.findings import Finding
from penstock.pool import RegisteredStore, registered_stores

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parsers(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the action to `penstock pool`."""
    parser = actions.add_parser(
        "schemes",
        help="stores that other packages bring, by the scheme of their URLs",
        description="Lists the stores that installed packages bring by the entry point group "
        "penstock.stores, and says which cannot be used. Exit status 1 if one cannot.",
    )
    parser.add_argument("--json", action="store_true", help="write one JSON document instead")
    parser.set_defaults(run_action=_run)


def finding() -> Finding | None:
    """What `penstock doctor` says of registered stores; None if others bring none."""
    stores = registered_stores()
    if all(one.distribution.split()[0] == "penstock" and not one.problem for one in stores):
        return None
    problems = [store.problem for store in stores if store.problem]
    said = ", ".join(f"{one.scheme}:// ({one.distribution})" for one in stores)
    if problems:
        return Finding("registered", "warn", said, "; ".join(problems))
    return Finding("registered", "ok", said)


def _run(args: argparse.Namespace) -> int:
    stores = registered_stores()
    if args.json:
        words.print_json([asdict(store) for store in stores])
    elif stores:
        words.console().print(_table(stores))
    else:
        words.console().print("No installed package brings a store.")
    return 1 if any(store.problem for store in stores) else 0


def _table(stores: list[RegisteredStore]) -> Table:
    table = Table(box=None, header_style="bold")
    for heading in ("scheme", "brought by", "entry point"):
        table.add_column(heading)
    for store in stores:
        table.add_row(f"{store.scheme}://", store.distribution, store.value)
        if store.problem:
            table.add_row("", words.text(f"✗ {store.problem}", style="bold red"))
    return table
