"""`penstock doctor`: can this pool serve, and what should the operator change?"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from penstock import Pool
from penstock._native import EncryptionKeys, Store
from penstock.cli import (
    activity,
    cuda_copies,
    doctor_engine,
    doctor_model,
    doctor_sglang,
    findings,
    options,
    pool_schemes,
    sharing,
    words,
    writers,
)
from penstock.cli.findings import Finding, Level
from penstock.errors import (
    ConfigError,
    Denied,
    Full,
    NotFound,
    StoreError,
    TimedOut,
    Unreachable,
)
from penstock.layout.negotiate import AUTO, LAYOUTS
from penstock.pool import POOL_VARIABLE, is_registered
from penstock.pool.namespace import namespace_digest
from penstock.vllm.settings import Settings

if TYPE_CHECKING:
    from argparse import _SubParsersAction

ROUND_TRIPS = 50
VALUES = 8
VALUE_BYTES = 1 << 20

_LAST_DEVICE = 1023

_NAMESPACE = namespace_digest({"kind": "penstock doctor"})
_MARKS: dict[Level, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "note": ("·", "cyan"),
    "warn": ("!", "yellow"),
    "fail": ("✗", "bold red"),
}
_ACL = (
    "ACL SETUSER <user> on >password ~penstock:* +get +set +exists +unlink +scan +strlen +info "
    "+config|get +client|setname +select +ping"
)


@dataclass
class Report:
    """The findings and measurements."""

    url: str
    findings: list[Finding] = field(default_factory=list)
    round_trip_ms: float | None = None
    put_mib_s: float | None = None
    get_mib_s: float | None = None

    @property
    def can_serve(self) -> bool:
        """Whether the pool can serve: no finding has the level `fail`."""
        return all(finding.level != "fail" for finding in self.findings)


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to `penstock`'s parser."""
    parser = subparsers.add_parser(
        "doctor",
        help="check a pool: can it serve, what should be changed",
        description="Connects to a pool, measures it with a few values that it removes again, "
        "and says in words which of its settings to change. Exit status 1 if it cannot serve. "
        "With --model, says instead what the model gets from Penstock: whether it is served or "
        "refused, its KV layout, what was tried; "
        "with --engine, what a running engine's metrics tell of faults; "
        "with --cuda-device, how copies of the device are made, as measured; with --vllm, whether "
        "the installed vLLM has what Penstock uses of it; with --sglang, whether the installed "
        "SGLang takes Penstock as its storage.",
    )
    words.add_pool_url(parser)
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="say what this model (a folder or a name, as for vLLM) gets from Penstock on this "
        "machine; no pool is looked at, and no weights are loaded",
    )
    parser.add_argument(
        "--kv-layout",
        metavar="LAYOUT",
        default=AUTO,
        choices=(AUTO, *LAYOUTS),
        help=f"with --model: the layout to ask for: auto, or {', '.join(LAYOUTS)} (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--cuda-device",
        metavar="ORDINAL",
        type=_ordinal,
        help="measure copies of pieces from and to this device, both ways to make them; no pool "
        "is looked at",
    )
    parser.add_argument(
        "--vllm",
        metavar="FOLDER",
        nargs="?",
        const="",
        help="check a vLLM against what Penstock uses of it: the installed one, or the sources in "
        "FOLDER; nothing of it is imported, and no pool is looked at",
    )
    parser.add_argument(
        "--engine",
        metavar="ENGINE",
        action="append",
        default=[],
        help="say what this running engine's metrics tell of faults: host:port of a vLLM server, "
        "or a metrics URL; may be given several times; no pool is looked at",
    )
    parser.add_argument(
        "--sglang",
        action="store_true",
        help="try the installed SGLang: import it, have its storage factory make the backend, move "
        "a page in each layout of host memory; the pool is looked at too if there is one",
    )
    options.add(parser, Settings, "encryption_key_file")
    parser.add_argument("--json", action="store_true", help="write one JSON document instead")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=words.seconds_argument,
        default=5.0,
        help="longest that one operation may take (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Examines the pool, a model's layout, a device's copies or a vLLM, and shows the report."""
    if args.model is not None:
        return doctor_model.run(args.model, args.kv_layout, as_json=args.json)
    if args.cuda_device is not None:
        return cuda_copies.run(args.cuda_device, as_json=args.json)
    if args.vllm is not None:
        return _check_vllm(args)
    if args.sglang:
        return _try_sglang(args)
    if args.engine:
        return _ask_engines(args)
    reports = _examine_pool(args)
    can_serve = all(report.can_serve for report in reports)
    if args.json:
        words.print_json({"can_serve": can_serve, **_document(reports)})
    else:
        for report in reports:
            _show(report)
    return 0 if can_serve else 1


def _examine_pool(args: argparse.Namespace) -> list[Report]:
    """A report of each tier."""
    keys = words.encryption_keys(args.encryption_key_file)
    tiers = [Store.open(url, client_name="penstock-doctor") for url in words.pool_url(args).split()]
    return [examine(store, args.timeout, keys) for store in tiers]


def _document(reports: list[Report]) -> dict[str, Any]:
    if len(reports) == 1:
        return asdict(reports[0])
    return {"tiers": [{"can_serve": report.can_serve, **asdict(report)} for report in reports]}


def _try_sglang(args: argparse.Namespace) -> int:
    has_pool = args.url is not None or bool(os.environ.get(POOL_VARIABLE))
    reports = _examine_pool(args) if has_pool else []
    found = doctor_sglang.examine()
    can_serve = not found.violations and all(report.can_serve for report in reports)
    if args.json:
        pool = {"pool": _document(reports)} if reports else {}
        words.print_json(doctor_sglang.document(found) | pool | {"can_serve": can_serve})
    else:
        doctor_sglang.show(found)
        for report in reports:
            _show(report)
    return 0 if can_serve else 1


def _ask_engines(args: argparse.Namespace) -> int:
    urls = dict.fromkeys(map(activity.address, args.engine))
    reports = [Report(url, list(doctor_engine.examine(url, args.timeout))) for url in urls]
    can_serve = all(report.can_serve for report in reports)
    if args.json:
        engines = [{"can_serve": report.can_serve, **asdict(report)} for report in reports]
        words.print_json({"can_serve": can_serve, "engines": engines})
    else:
        for report in reports:
            _show(report)
    return 0 if can_serve else 1


def _ordinal(text: str) -> int:
    """The number of a device, from 0, on the command line."""
    if not text.isascii() or not text.isdecimal() or int(text) > _LAST_DEVICE:
        raise argparse.ArgumentTypeError(f"a device's number from 0, not {text!r}")
    return int(text)


def _check_vllm(args: argparse.Namespace) -> int:
    from penstock.vllm.compat import contract, versions

    package = contract.package_in(Path(args.vllm)) if args.vllm else contract.installed_package()
    if package is None:
        where = f"in {args.vllm}" if args.vllm else "installed"
        raise ConfigError(f"there is no vLLM {where}: name a folder that has its package `vllm`")
    version = contract.Sources(package).version or "unknown"
    wrong = versions.violations(package, version)
    is_tested = ".".join(version.split(".")[:2]) in versions.SUPPORTED
    if args.json:
        words.print_json({"version": version, "is_tested": is_tested, "violations": wrong})
        return 1 if wrong else 0
    console = words.console()
    tested = "tested with Penstock" if is_tested else "not tested with Penstock"
    console.print(f"vLLM {version}, {tested} ({', '.join(versions.SUPPORTED)} are)")
    for violation in wrong:
        console.print(Text(f"✗ {violation}"))
    if not wrong:
        console.print("✓ it has all that Penstock uses", style="green")
    return 1 if wrong else 0


def examine(store: Store, timeout: float, keys: EncryptionKeys | None = None) -> Report:
    """Runs all checks. A failure becomes a finding, not an exception. With keys, the values that it
    measures with are encrypted."""
    report = Report(store.url)
    try:
        facts = store.describe(timeout=timeout)
    except (Unreachable, TimedOut) as error:
        report.findings.append(Finding("connection", "fail", str(error), _connect_advice(store)))
        return report
    except Denied as error:
        # Engines do not need these facts. Whether this user may put and get is checked below.
        facts = {}
        report.findings.append(Finding("settings", "note", str(error), f"grant it: {_ACL}"))
    except StoreError as error:
        facts = {}
        report.findings.append(_failed("settings", error))
    report.findings += findings.of_url(store.url)
    # What the facts of a registered store mean is the store's own.
    if is_registered(store.url):
        pass
    elif facts and store.url.startswith("shm:"):
        report.findings += findings.of_shared_memory(facts)
    elif facts and findings.is_object_store(store.url):
        report.findings += findings.of_object_store(store.url, facts)
    elif "path" in facts:
        report.findings += findings.of_directory(facts)
    elif store.url.startswith("memory:"):
        report.findings.append(
            Finding(
                "sharing",
                "warn",
                "memory of one process: no other can share it",
                "a directory or a server, except in tests",
            )
        )
    elif facts:
        report.findings += findings.of_server(facts)
    report.findings += sharing.of_namespaces(store, timeout)
    if keys is not None:
        store = store.encrypted(keys)
        report.findings.append(findings.of_keys(keys))
    report.findings += writers.of_marks(store, timeout)
    with Pool(store, _NAMESPACE, timeout=timeout) as pool:
        report.findings += _measure(pool, report)
    if (registered := pool_schemes.finding()) is not None:
        report.findings.append(registered)
    return report


def _measure(pool: Pool, report: Report) -> Iterator[Finding]:
    keys = [os.urandom(16) for _ in range(VALUES)]
    try:
        times = []
        for _ in range(ROUND_TRIPS):
            start = time.perf_counter()
            pool.contains(keys[:1])
            times.append(time.perf_counter() - start)
        report.round_trip_ms = statistics.median(times) * 1000
        yield findings.of_round_trip(statistics.median(times))
        yield from _transfer(pool, keys, report)
    except StoreError as error:
        yield _failed("round trip", error)


def _transfer(pool: Pool, keys: list[bytes], report: Report) -> Iterator[Finding]:
    value = os.urandom(VALUE_BYTES)
    into = bytearray(VALUE_BYTES)
    mebibytes = VALUES * VALUE_BYTES / (1 << 20)
    step = "put"
    try:
        start = time.perf_counter()
        for key in keys:
            pool.put(key, value)
        report.put_mib_s = mebibytes / (time.perf_counter() - start)
        yield Finding("put", "ok", f"{report.put_mib_s:.0f} MiB/s, values of 1 MiB, one by one")
        step = "get"
        seconds = 0.0
        for key in keys:
            start = time.perf_counter()
            pool.get(key, into=into)
            seconds += time.perf_counter() - start
            if into != value:
                yield Finding("get", "fail", "a value came back with other bytes")
                return
        report.get_mib_s = mebibytes / seconds
        yield Finding("get", "ok", f"{report.get_mib_s:.0f} MiB/s, verified")
        step = "remove"
    except NotFound:
        yield Finding(
            "get",
            "fail",
            "a value was gone right after it was stored",
            "more room: the pool evicts what was just written",
        )
    except StoreError as error:
        yield _failed(step, error)
    finally:
        failed = _remove(pool, keys)
        if failed is not None and step == "remove":
            yield failed


def _remove(pool: Pool, keys: list[bytes]) -> Finding | None:
    try:
        pool.remove(keys)
    except StoreError as error:
        return _failed("remove", error)
    return None


def _failed(check: str, error: StoreError) -> Finding:
    advice = ""
    if isinstance(error, Denied):
        advice = (
            "give credentials (valkey://user:password@host; an object store's come from the "
            f"environment), or rights: {_ACL}"
        )
    elif isinstance(error, Full):
        advice = "CONFIG SET maxmemory-policy allkeys-lru, or more maxmemory"
    elif isinstance(error, TimedOut):
        advice = "find out what holds the server up, or allow more with --timeout"
    return Finding(check, "fail", str(error), advice)


def _connect_advice(store: Store) -> str:
    if store.url.startswith("unix:"):
        return "is the server running, with this `unixsocket`, and may this user open it?"
    return "is the server running, bound to this address, and the port open from here?"


def _show(report: Report) -> None:
    console = words.console()
    console.print(words.text(report.url, style="bold"))
    table = Table.grid(padding=(0, 1))
    for finding in report.findings:
        mark, style = _MARKS[finding.level]
        table.add_row(Text(mark, style=style), finding.check, words.text(finding.message))
        if finding.advice:
            table.add_row("", "", words.text(f"→ {finding.advice}", style="dim"))
    console.print(table)
    changes = sum(finding.level == "warn" for finding in report.findings)
    if not report.can_serve:
        verdict = Text("This pool cannot serve.", style="bold red")
    elif changes:
        things = "one thing" if changes == 1 else f"{changes} things"
        verdict = Text(f"This pool can serve; {things} should be changed.", style="yellow")
    else:
        verdict = Text("This pool can serve.", style="green")
    console.print(verdict)
