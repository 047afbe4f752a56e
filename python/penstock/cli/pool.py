"""`penstock pool`: shows and removes the content of a pool. Longer work has its own files."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.table import Table

from penstock import Pool
from penstock._native import Store
from penstock.cli import (
    pool_archive,
    pool_diff,
    pool_schemes,
    pool_test,
    pool_verify,
    pool_warm,
    quotas,
    words,
)
from penstock.cli.namespaces import add_namespace, add_timeout, chosen, namespace_as_json
from penstock.errors import ConfigError
from penstock.pool import NamespaceUsage
from penstock.pool.namespace import DESCRIPTIONS, DIGEST_BYTES, remove_namespace

if TYPE_CHECKING:
    from argparse import _SubParsersAction


_SHOWN_FACTS = (
    "used_memory",
    "maxmemory",
    "maxmemory_policy",
    "evicted_keys",
    "keyspace_hits",
    "keyspace_misses",
    "connected_clients",
    "capacity_bytes",
    "used_bytes",
    "disk_free_bytes",
    "known_packs",
    "damaged_packs",
    "expire_days",
)


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to `penstock`'s parser."""
    parser = subparsers.add_parser(
        "pool",
        help="what lies in a pool: stats, ls, diff, purge, verify, export, import, warm; and which "
        "pools there are: test, schemes",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    stats = actions.add_parser("stats", help="objects, bytes and use of the whole pool")
    ls = actions.add_parser(
        "ls",
        help="objects, bytes and age by namespace, in words",
        description="Shows the namespaces of a pool, those first that were described last. `new`: "
        "how long ago its users described it first, with their first store. `stored`: how long ago "
        "they described it last, as vLLM's engines do every five to ten minutes while they store. "
        "`used`: how long ago a value was got or put, where the store knows it: files, shared "
        "memory.",
    )
    purge = actions.add_parser(
        "purge",
        help="remove what lies in a pool; asks first",
        description="Removes all objects of one namespace, or of all. Engines that use them "
        "compute them again.",
    )
    for action in (stats, ls, purge):
        words.add_pool_url(action)
        action.add_argument("--json", action="store_true", help="write one JSON document instead")
        add_namespace(action)
        add_timeout(action, "listing, or removing a batch,")
    purge.add_argument("--yes", action="store_true", help="do not ask")
    for other in (pool_diff, pool_verify, pool_archive, pool_warm, pool_test, pool_schemes):
        other.add_parsers(actions)


def run(args: argparse.Namespace) -> int:
    """Runs the chosen action."""
    if (run_action := getattr(args, "run_action", None)) is not None:
        status: int = run_action(args)
        return status
    store = Store.open(words.pool_url(args), client_name="penstock-pool")
    with Pool(store, DESCRIPTIONS, timeout=args.timeout) as pool:
        used = chosen(pool.namespaces(), args.namespace)
        if args.action == "ls":
            _ls(used, args.json)
        elif args.action == "stats":
            _stats(pool, used, args.json)
        else:
            return _purge(store, used, args)
    return 0


def _ls(used: list[NamespaceUsage], as_json: bool) -> None:
    if as_json:
        words.print_json([namespace_as_json(one) for one in used])
        return
    console = words.console()
    if not used:
        console.print("The pool is empty.")
        return
    table = Table(box=None, header_style="bold")
    # The whole name, because `purge` needs it.
    table.add_column("namespace", no_wrap=True, min_width=2 * DIGEST_BYTES)
    table.add_column("what")
    for column in ("objects", "bytes", "new", "stored", "used"):
        table.add_column(column, justify="right", no_wrap=True)
    now = time.time()
    for one in sorted(used, key=_newest_first):
        ages = (one.first_described, one.last_described, one.last_use)
        table.add_row(
            one.digest.hex(),
            words.text(words.description(one.description)),
            f"{one.objects:,}",
            words.size(one.nbytes),
            *(words.age(then, now) for then in ages),
        )
    console.print(table)


def _newest_first(one: NamespaceUsage) -> tuple[float, int]:
    """Sorts namespaces. Those that nobody has described come last, the largest first."""
    return -(one.last_described or 0.0), -one.nbytes


def _stats(pool: Pool, used: list[NamespaceUsage], as_json: bool) -> None:
    totals = {
        "namespaces": len(used),
        "objects": sum(one.objects for one in used),
        "bytes": sum(one.nbytes for one in used),
    }
    facts = pool.describe()
    shown = {name: facts[name] for name in _SHOWN_FACTS if name in facts}
    accounts = quotas.accounts(facts, used)
    if as_json:
        of_accounts = {"quotas": [asdict(one) for one in accounts]} if accounts else {}
        words.print_json({"url": pool.url, **totals, "store": shown, **of_accounts})
        return
    table = Table.grid(padding=(0, 2))
    table.add_row("namespaces", f"{totals['namespaces']:,}")
    table.add_row("objects", f"{totals['objects']:,}")
    table.add_row("bytes", words.size(totals["bytes"]))
    for name, value in shown.items():
        is_size = name.endswith("_bytes") or name in ("used_memory", "maxmemory")
        nbytes = words.number(shown, name) if is_size else None
        said = value if nbytes is None else words.size(nbytes)
        table.add_row(name.removesuffix("_bytes").replace("_", " "), words.text(said))
    console = words.console()
    console.print(words.text(pool.url, style="bold"))
    console.print(table)
    if accounts:
        console.print()
        console.print(quotas.table(accounts))


def _purge(store: Store, used: list[NamespaceUsage], args: argparse.Namespace) -> int:
    objects = sum(one.objects for one in used)
    nbytes = sum(one.nbytes for one in used)
    if not args.yes and objects:
        if not sys.stdin.isatty():
            raise ConfigError("purge asks first, but there is no terminal; give --yes to go on")
        question = f"Remove {objects:,} objects, {words.size(nbytes)}, from {store.url}?"
        sys.stderr.write(f"{question} Type yes: ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() != "yes":
            print("Nothing was removed.", file=sys.stderr)
            return 1
    with words.progress(args.json) as progress:
        task = progress.add_task("removing", total=objects)
        advance = functools.partial(progress.advance, task)
        removed = sum(
            remove_namespace(store, one.digest, timeout=args.timeout, removed=advance)
            for one in used
        )
    if args.json:
        words.print_json({"removed": removed})
    else:
        words.console().print(f"Removed {removed:,} objects.")
    return 0
