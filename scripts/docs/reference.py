"""Reference pages of the site, made from the code that they describe.

Each page is text that a function returns. Penstock's native module has to be built; vLLM need not.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import partial
from itertools import pairwise
from typing import Any, cast, get_type_hints
from unittest import mock

from penstock.cli import words
from penstock.cli.main import STATUSES, make_parser
from penstock.option import Option
from penstock.plan import wish
from penstock.pool import POOL_VARIABLE
from penstock.vllm import compat
from penstock.vllm.counters import (
    COUNTER_LABELS,
    COUNTERS,
    HISTOGRAM_LABELS,
    HISTOGRAMS,
    PLACE_COUNTERS,
    TENANT_COUNTERS,
)
from penstock.vllm.names import PREFIX
from penstock.vllm.settings import Settings

HELP_WIDTH = 80
"""Columns of the commands' help."""

_GENERATED = "This page is generated from the code, with every build of the site."

_VALUES: Mapping[type, str] = {
    bool: "`true` or `false`",
    float: "a number over 0",
    int: "a whole number over 0, or a size as `8GiB`",
    str: "text",
}

_OPTIONS_OF_KV_MEMORY = {
    wish.PROPORTIONAL: "--enable-pp-prop-kv-cache",
    wish.TOKENS: "--kv-cache-tokens",
}


def settings() -> str:
    """The page of the connector's settings."""
    meanings = meanings_of(Settings)
    kinds = get_type_hints(Settings)
    parser = _command("serve")
    rows = []
    for field in fields(Settings):
        option = f"--{field.name.replace('_', '-')}"
        has_option = option in parser._option_string_actions
        given = f"`{option}`" if has_option else f"`--set {field.name}=…`"
        kind = _VALUES[kinds[field.name]]
        meaning = meanings[field.name]
        rows.append((f"`{PREFIX}{field.name}`<br>{given}", _default(field), kind, meaning))
    memory = [
        (f"`{key}`<br>`{option}`", parser._option_string_actions[option].help or "")
        for key, option in _OPTIONS_OF_KV_MEMORY.items()
    ]
    return "\n".join(
        [
            "# All settings",
            "",
            f"{_GENERATED} [Settings](../settings.md) explains how to use them.",
            "",
            "## Connector",
            "",
            "Keys of `kv_connector_extra_config` in vLLM's `--kv-transfer-config`. An unknown key",
            f"that begins with `{PREFIX}` is refused.",
            "",
            *_table(("key, with `penstock serve`", "default", "value", "meaning"), rows),
            "",
            "## KV memory",
            "",
            "Keys of vLLM's `--additional-config`.",
            "",
            *_table(("key, with `penstock serve`", "meaning"), memory),
            "",
        ]
    )


def metrics() -> str:
    """The page of the connector's metrics."""
    counters = [(f"`{metric_name(name)}`", "", text) for name, text in COUNTERS.items()]
    counters += [
        (f"`{metric_name(name)}`", f"`{COUNTER_LABELS[name]}`", text)
        for name, text in (TENANT_COUNTERS | PLACE_COUNTERS).items()
    ]
    histograms = [
        (
            f"`vllm:penstock_{name}`",
            f"`{HISTOGRAM_LABELS[name][0]}`" if name in HISTOGRAM_LABELS else "",
            text,
        )
        for name, text in HISTOGRAMS.items()
    ]
    return "\n".join(
        [
            "# All metrics",
            "",
            f"{_GENERATED} [Metrics](../settings.md#metrics) explains what to watch.",
            "",
            "vLLM serves them at `/metrics`, one series for each engine.",
            "",
            "## Counters",
            "",
            *_table(("metric", "its own label", "counts"), counters),
            "",
            "## Histograms",
            "",
            *_table(("metric", "its own label", "measures"), histograms),
            "",
        ]
    )


def commands() -> str:
    """The page of the command line: what every command's `--help` prints."""
    lines = [
        "# Command line",
        "",
        f"{_GENERATED} It shows what `--help` prints for each command.",
        "",
        "Every command ends with one of these exit statuses:",
        "",
        *_table(
            ("status", "meaning"),
            [
                (f"{status}", f"{meaning[0].upper()}{meaning[1:]}.")
                for status, meaning in STATUSES.items()
            ],
        ),
    ]
    for parser in parsers():
        level = "#" * min(4, 1 + len(parser.prog.split()))
        lines += ["", f"{level} {parser.prog}", "", "```text", help_text(parser), "```"]
    return "\n".join([*lines, ""])


def sharing() -> str:
    """The page of what keeps engines of one model apart."""
    return "\n".join(
        [
            "# What may differ",
            "",
            f"{_GENERATED} [Keys and values](../values.md#what-makes-the-namespace) tells what",
            "must agree.",
            "",
            "Engines that share blocks may differ in what stands here. Whatever else is set",
            "counts: then engines share only if it is set alike. `penstock pool diff` and",
            "`penstock doctor` name it.",
            "",
            "## Options",
            "",
            "Parts of vLLM's configuration, or options in it. A star stands for any text within",
            "a name.",
            "",
            *_table(("option", "why"), _reasons(compat.MAY_DIFFER)),
            "",
            "These count though the part with them is above:",
            "",
            *(f"- `{name}`" for name in compat.COUNTED),
            "",
            "## Environment variables",
            "",
            *_table(("variable", "why"), _reasons(compat.MAY_DIFFER_BY_ENVIRONMENT)),
            "",
        ]
    )


def _reasons(of: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(f"`{name}`", reason) for name, reason in of.items()]


PAGES: Mapping[str, Callable[[], str]] = {
    "reference/generated/settings.md": settings,
    "reference/generated/metrics.md": metrics,
    "reference/generated/commands.md": commands,
    "reference/generated/sharing.md": sharing,
}
"""Path in the site's sources → what makes the page."""


def metric_name(counter: str) -> str:
    """A counter's name at `/metrics`.

    >>> metric_name("loads")
    'vllm:penstock_loads_total'
    """
    return f"vllm:penstock_{counter}_total"


def documented(of: type) -> dict[str, str]:
    """The text beneath each attribute in a class's source, where there is one.

    >>> documented(Settings)["drain_timeout"]
    'Seconds that shutdown waits for stores to reach the pool.'
    """
    (definition,) = ast.parse(inspect.getsource(of)).body
    body = cast("ast.ClassDef", definition).body
    found = {}
    for node, after in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
            found[ast.unparse(node.target)] = inspect.cleandoc(ast.literal_eval(after.value))
    return {name: " ".join(text.split()) for name, text in found.items()}


def meanings_of(settings: type) -> dict[str, str]:
    """The meaning of each field: the text beneath it, or else that of its option.

    >>> meanings_of(Settings)["host_memory"].partition(",")[0]
    'Node memory'
    """
    found = {
        field.name: f"{option.help[0].upper()}{option.help[1:]}."
        for field in fields(settings)
        if (option := Option.of(field.metadata))
    }
    return found | documented(settings)


def parsers() -> Iterator[argparse.ArgumentParser]:
    """The parser of `penstock`, of each command, and of each command's actions."""
    # Defaults are the project's, not those of the machine that builds the site.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    with mock.patch.dict(os.environ, kept, clear=True):
        yield from _with_actions(make_parser())


def help_text(parser: argparse.ArgumentParser) -> str:
    """What `--help` prints, for a terminal of a set width."""
    formatter: Any = parser.formatter_class
    of_width = partial(formatter, width=HELP_WIDTH)
    with mock.patch.object(parser, "formatter_class", of_width):
        lines = parser.format_help().rstrip().splitlines()
    # In a usage, argparse does not break an option from its choices.
    return "\n".join(
        textwrap.fill(line, HELP_WIDTH, subsequent_indent=" " * 8, break_on_hyphens=False)
        if len(line) > HELP_WIDTH
        else line
        for line in lines
    )


def _with_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _with_actions(each)


def _command(name: str) -> argparse.ArgumentParser:
    return next(parser for parser in parsers() if parser.prog == f"penstock {name}")


def _default(field: Field[Any]) -> str:
    value = field.default
    if value is MISSING:
        return f"none; environment `{POOL_VARIABLE}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and value >= 1 << 10:
        return f"`{words.size(value)}`"
    return "empty" if value == "" else f"`{value}`"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield _row(head)
    yield "|---" * len(head) + "|"
    yield from map(_row, rows)


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
