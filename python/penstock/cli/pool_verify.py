"""`penstock pool verify`: reads what lies in a pool, and says what of it is damaged."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from rich.table import Table

from penstock import Pool
from penstock._native import Store
from penstock.cli import options, words
from penstock.cli.namespaces import add_namespace, add_rate, add_timeout, chosen
from penstock.pool import NamespaceUsage
from penstock.pool.namespace import DESCRIPTIONS, DIGEST_BYTES
from penstock.pool.pace import Pace
from penstock.pool.sweep import Finding, Scrubbed, scrub
from penstock.vllm.settings import Settings

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parsers(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the action to `penstock pool`'s parser."""
    parser = actions.add_parser(
        "verify",
        help="read a pool's values and count what is damaged",
        description="Reads every value and checks it as a load does. Of several tiers, each is "
        "read. Exit status: 1 if damaged values were found and are still there, else 0.",
    )
    words.add_pool_url(parser)
    parser.add_argument("--json", action="store_true", help="write one JSON document instead")
    add_namespace(parser)
    parser.add_argument(
        "--sample",
        metavar="SHARE",
        type=words.share_argument,
        default=1.0,
        help="read only this share of each namespace, chosen at random, as 10%% or 0.1",
    )
    parser.add_argument("--remove", action="store_true", help="remove what is damaged")
    parser.add_argument(
        "--no-cache-salts",
        action="store_true",
        help="no request to this pool has a cache salt: an encrypted value that does not "
        "authenticate is damaged, not unreadable",
    )
    options.add(parser, Settings, "encryption_key_file")
    add_rate(parser)
    add_timeout(parser, "listing, or a batch,")
    parser.set_defaults(run_action=run)


def run(args: argparse.Namespace) -> int:
    """Verifies; returns 1 if something damaged is left."""
    keys = words.encryption_keys(args.encryption_key_file)
    pace = Pace(args.rate)
    pools = []
    for url in words.pool_url(args).split():
        store = Store.open(url, client_name="penstock-pool")
        with Pool(store, DESCRIPTIONS, timeout=args.timeout) as pool:
            used = pool.namespaces()
        pools.append((store.encrypted(keys) if keys is not None else store, used))
    if args.namespace is not None:
        every = {one.digest: one for _, used in pools for one in used}
        (only,) = chosen(list(every.values()), args.namespace)
        pools = [
            (store, [one for one in used if one.digest == only.digest]) for store, used in pools
        ]
    reports = []
    with words.progress(args.json) as progress:
        objects = sum(one.objects for _, used in pools for one in used)
        task = progress.add_task("verifying", total=math.ceil(objects * args.sample))
        for store, used in pools:
            found = [
                scrub(
                    store,
                    one.digest,
                    timeout=args.timeout,
                    pace=pace,
                    share=args.sample,
                    remove=args.remove,
                    has_cache_salts=not args.no_cache_salts,
                    advance=lambda count: progress.advance(task, count),
                )
                for one in used
            ]
            reports.append((store.url, used, found))
    _report(reports, args.json)
    return 1 if any(one.left_damaged for _, _, found in reports for one in found) else 0


Report = tuple[str, list[NamespaceUsage], list[Scrubbed]]


def _report(reports: list[Report], as_json: bool) -> None:
    if as_json:
        words.print_json(
            [
                {"url": url, "namespaces": list(map(_as_json, used, found))}
                for url, used, found in reports
            ]
        )
        return
    for url, used, found in reports:
        _show(url, used, found)


def _as_json(one: NamespaceUsage, scrubbed: Scrubbed) -> dict[str, Any]:
    return {
        "namespace": one.digest.hex(),
        "description": one.description,
        "objects": scrubbed.objects,
        "read_bytes": scrubbed.nbytes,
        **{finding.value: scrubbed.found[finding] for finding in Finding},
        "removed": scrubbed.removed,
        "reasons": dict(scrubbed.reasons),
    }


def _show(url: str, used: list[NamespaceUsage], found: list[Scrubbed]) -> None:
    console = words.console()
    console.print(words.text(url, style="bold"))
    if not used:
        console.print("The pool is empty.")
        return
    table = Table(box=None, header_style="bold")
    table.add_column("namespace", no_wrap=True, min_width=2 * DIGEST_BYTES)
    table.add_column("what")
    for name in ("objects", "read", *(finding.value for finding in Finding), "removed"):
        table.add_column(name, justify="right")
    table.add_column("why")
    for one, scrubbed in zip(used, found, strict=True):
        table.add_row(
            one.digest.hex(),
            words.text(words.description(one.description)),
            f"{scrubbed.objects:,}",
            words.size(scrubbed.nbytes),
            *(f"{scrubbed.found[finding]:,}" for finding in Finding),
            f"{scrubbed.removed:,}",
            ", ".join(f"{reason} {count:,}" for reason, count in scrubbed.reasons.items()),
        )
    console.print(table)
    damaged = sum(one.found[Finding.DAMAGED] for one in found)
    left = sum(one.left_damaged for one in found)
    if left:
        console.print(f"{left:,} damaged values are in the pool; `--remove` removes them.")
    elif damaged:
        console.print(f"All {damaged:,} damaged values were removed.")
    else:
        console.print("No damage was found.")
