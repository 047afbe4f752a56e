"""`penstock top`: what engines and their pool do right now."""

from __future__ import annotations

import argparse
import sys
import time
import urllib.error
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock import Pool
from penstock._native import Store
from penstock.cli import words
from penstock.cli.activity import Activity, address, total, watch
from penstock.errors import PenstockError
from penstock.pool.namespace import DESCRIPTIONS

if TYPE_CHECKING:
    from argparse import _SubParsersAction

Seen = Mapping[str, "Activity | OSError"]


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to `penstock`'s parser."""
    parser = subparsers.add_parser(
        "top",
        help="watch engines and their pool: hits, seconds saved, loads, queues, failures",
        description="Reads the metrics of vLLM servers every few seconds and shows what each does "
        "with its pool. Rates are those of the last interval. Ends with Ctrl-C.",
    )
    parser.add_argument(
        "engines", metavar="ENGINE", nargs="+", help="host:port of a vLLM server, or a metrics URL"
    )
    parser.add_argument("--pool", metavar="URL", help="show this pool's use as well")
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=words.seconds_argument,
        default=2.0,
        help="time between two readings (default: %(default)s)",
    )
    parser.add_argument(
        "--count",
        metavar="N",
        type=words.count_argument,
        help="end after so many readings, instead of never",
    )
    parser.add_argument(
        "--json", action="store_true", help="write one JSON document a line instead, a reading each"
    )


def run(args: argparse.Namespace) -> int:
    """Watches; returns 1 if no engine answered the last time."""
    urls = list(dict.fromkeys(map(address, args.engines)))
    pool = None
    if args.pool is not None:
        store = Store.open(words.named_pool(args.pool), client_name="penstock-top")
        pool = Pool(store, DESCRIPTIONS, timeout=args.interval)
    seen: Seen = {}
    with pool or nullcontext():
        console = words.console()
        is_live = not args.json and sys.stdout.isatty()
        live = Live(console=console, auto_refresh=False) if is_live else nullcontext()
        with live as screen:
            for seen in watch(urls, args.interval, args.count):
                facts = None if pool is None else _facts(pool)
                if args.json:
                    print(words.as_json(_document(seen, facts)), flush=True)
                elif screen is not None:
                    screen.update(page(seen, facts, args.interval, console.width), refresh=True)
                else:
                    console.print(page(seen, facts, args.interval, console.width))
    return int(all(isinstance(each, OSError) for each in seen.values()))


def _facts(pool: Pool) -> dict[str, Any]:
    try:
        return dict(pool.describe())
    except PenstockError as error:
        return {"error": str(error)}


def _document(seen: Seen, facts: dict[str, Any] | None) -> dict[str, Any]:
    engines = {
        url: {"error": str(each)} if isinstance(each, OSError) else asdict(each)
        for url, each in seen.items()
    }
    pool = {} if facts is None else {"pool": facts}
    return {"time": time.time(), "engines": engines, **pool}


_COLUMNS = (
    "engine",
    "run/wait",
    "KV used",
    "hits",
    "look-ups/s",
    "look-up",
    "load",
    "pool in/s",
    "host in/s",
    "out/s",
    "saved",
    "saved/s",
    "failures",
)


_WITHIN = {
    60: ("engine", "hits", "saved", "failures"),
    140: ("engine", "run/wait", "hits", "load", "pool in/s", "saved", "failures"),
}
"""The columns of terminals that are narrower than so many characters."""


def page(seen: Seen, facts: dict[str, Any] | None, interval: float, width: int) -> Group:
    """A reading as a terminal of `width` columns shows it. `facts` are the pool's, if it is
    watched."""
    shown = next((names for most, names in _WITHIN.items() if width < most), _COLUMNS)
    places = [_COLUMNS.index(name) for name in shown]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in shown:
        is_first = name == "engine"
        table.add_column(
            name, justify="left" if is_first else "right", no_wrap=not is_first, overflow="fold"
        )
    for url, each in seen.items():
        if isinstance(each, OSError):
            table.add_row(_name(url), Text("gone", style="red"))
            continue
        cells = [_name(url), *_cells(each)]
        table.add_row(*(cells[place] for place in places))
    working = [each for each in seen.values() if isinstance(each, Activity)]
    if len(seen) > 1:
        table.add_section()
        cells = [f"{len(working)} of {len(seen)} answer", *_cells(total(working))]
        table.add_row(*(cells[place] for place in places), style="bold")
    lines: list[Any] = [table]
    gone = {url: each for url, each in seen.items() if isinstance(each, OSError)}
    if gone:
        lines += [
            Text(),
            *(words.text(f"{_name(url)}: {_reason(each)}") for url, each in gone.items()),
        ]
    far = [_name(url) for url, each in seen.items() if _is_far(each)]
    if far:
        lines += [
            Text(),
            Text(f"far from their pool, so look-ups may take longer: {', '.join(far)}"),
        ]
    if facts is not None:
        lines += [Text(), words.text(_pool_line(facts))]
    saved = "saved: seconds of prefill less seconds waited, since the engine started"
    lines += [Text(), Text(f"every {interval:g} s · {saved} · Ctrl-C ends", style="dim")]
    return Group(*lines)


def _is_far(each: Activity | OSError) -> bool:
    """Whether the engine's look-ups get more time, as its pool is far away."""
    return isinstance(each, Activity) and each.lookup_limit_raises > 0


def _name(url: str) -> str:
    return url.removeprefix("http://").removesuffix("/metrics")


def _reason(error: OSError) -> str:
    """Why an engine did not answer."""
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError):
        error = error.reason
    return error.strerror or str(error)


def _cells(each: Activity) -> list[Text | str]:
    failures = Text(f"{each.failures:,.0f}", style="red" if each.failures else "")
    if each.panics:
        failures.append(f" +{each.panics:,.0f} panics", style="bold red")
    return [
        f"{each.running:.0f}/{each.waiting:.0f}",
        _share(each.kv_usage),
        _share(each.hit_share),
        _number(each.lookups),
        _time(each.lookup_seconds),
        _time(each.load_seconds),
        _size(each.pool_bytes),
        _size(each.host_bytes),
        _size(each.stored_bytes),
        f"{each.saved_seconds:,.1f} s",
        _number(each.saved_rate),
        failures,
    ]


def _pool_line(facts: dict[str, Any]) -> str:
    if "error" in facts:
        return f"pool: {facts['error']}"
    used = words.number(facts, "used_memory", "used_bytes")
    room = words.number(facts, "maxmemory", "capacity_bytes")
    said = ["pool:"]
    if used is not None:
        said.append(f"{words.size(used)} used")
    if room:
        said.append(f"of {words.size(room)}")
    evicted = words.number(facts, "evicted_keys")
    if evicted is not None:
        said.append(f"· {evicted:,} evicted")
    return " ".join(said)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    # Plus zero: a loss that rounds to nothing has no sign.
    return "-" if value is None else f"{round(value, 2) + 0.0:,.2f}"


def _time(value: float | None) -> str:
    return "-" if value is None else words.milliseconds(value)


def _size(value: float | None) -> str:
    return "-" if value is None else words.size(value)
