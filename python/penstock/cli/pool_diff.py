"""`penstock pool diff`: the facts in which two namespaces differ."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

from penstock import Pool
from penstock._native import Store
from penstock.cli import words
from penstock.cli.namespaces import add_timeout, chosen
from penstock.errors import ConfigError
from penstock.pool.namespace import DESCRIPTIONS

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_NOT_IN_THE_NAME = ("model", "lookup")
"""Facts of a description that are for people and routers. Two namespaces may differ in them and be
the same."""


def add_parsers(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the action to `penstock pool`'s parser."""
    parser = actions.add_parser(
        "diff",
        help="the facts in which two namespaces differ: why two engines do not share",
        description="Shows the facts in which two namespaces of a pool differ, and nothing that is "
        "the same. Exit status: 0 if there are any, 1 if there are none.",
    )
    for name in ("one", "other"):
        parser.add_argument(
            name, metavar="NS", help="a digest as `ls` shows it, or the beginning of it"
        )
    words.add_pool_url(parser)
    parser.add_argument("--json", action="store_true", help="write one JSON document instead")
    add_timeout(parser, "listing")
    parser.set_defaults(run_action=_run)


def _run(args: argparse.Namespace) -> int:
    store = Store.open(words.pool_url(args), client_name="penstock-pool")
    with Pool(store, DESCRIPTIONS, timeout=args.timeout) as pool:
        used = pool.namespaces()
    found = [chosen(used, beginning)[0] for beginning in (args.one, args.other)]
    facts = []
    for namespace in found:
        if namespace.digest == DESCRIPTIONS:
            raise ConfigError(f"{namespace.digest.hex()} has descriptions, and no engine's blocks")
        if namespace.description is None:
            raise ConfigError(f"nothing describes the namespace {namespace.digest.hex()}")
        facts.append(dict(flat(namespace.description)))
    rows = differences(*facts)
    if args.json:
        one, other = (namespace.digest.hex() for namespace in found)
        words.print_json([{"fact": name, one: own, other: others} for name, own, others in rows])
    elif rows:
        # A tenant's begins as the one that it is made from.
        length = 8 if found[0].digest[:4] != found[1].digest[:4] else None
        table = Table(box=None, header_style="bold")
        table.add_column("fact", no_wrap=True)
        for namespace in found:
            table.add_column(namespace.digest.hex()[:length], overflow="fold")
        for name, own, others in rows:
            table.add_row(words.text(name), *(words.text(_said(each)) for each in (own, others)))
        words.console().print(table)
    else:
        words.console().print("They differ in no fact.")
    return 0 if rows else 1


def flat(description: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The facts of a description, each by its path.

    >>> dict(flat({"options": {"a.b": 1}, "spans": [[0, 8]], "model": "for people"}))
    {'options.a.b': 1, 'spans': [[0, 8]]}
    """
    for name, value in description.items():
        if not path and name in _NOT_IN_THE_NAME:
            continue
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Name, value and other value of each fact that differs; None where one has no such fact.

    >>> differences({"dtype": "a", "same": 1}, {"dtype": "b", "same": 1, "new": 2})
    [('dtype', 'a', 'b'), ('new', None, 2)]
    """
    names = sorted({*one, *other})
    pairs = ((name, one.get(name), other.get(name)) for name in names)
    return [(name, own, others) for name, own, others in pairs if own != others]


def _said(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)
