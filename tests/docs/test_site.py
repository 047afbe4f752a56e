"""The site has all that the code has: settings, metrics, commands. Needs no mkdocs."""

from __future__ import annotations

import argparse
import doctest
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import penstock
from penstock.cli.main import COMMANDS, main, make_parser
from penstock.plan import wish
from penstock.vllm import compat
from penstock.vllm.counters import COUNTERS, HISTOGRAMS, PLACE_COUNTERS, TENANT_COUNTERS
from penstock.vllm.names import PREFIX
from penstock.vllm.settings import Settings
from scripts.docs import check, markup, reference

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", [markup, reference], ids=lambda module: module.__name__)
def test_examples(module) -> None:
    failed, tried = doctest.testmod(module)
    assert (failed, tried > 0) == (0, True)


def cells(page: str, first: str) -> list[str]:
    """The row of a page that begins with this cell."""
    (row,) = re.findall(rf"^\| {re.escape(first)}(?: \| |<br>)(.*) \|$", page, re.MULTILINE)
    return row.split(" | ")


def test_every_setting_is_there_with_its_meaning() -> None:
    page = reference.settings()
    for field in fields(Settings):
        given, default, kind, meaning = cells(page, f"`{PREFIX}{field.name}`")
        assert default
        assert kind
        assert field.name in given.replace("-", "_")
        assert meaning == reference.meanings_of(Settings)[field.name].replace("|", r"\|")
    for key in (wish.PROPORTIONAL, wish.TOKENS):
        assert all(cells(page, f"`{key}`"))


def test_every_metric_is_there() -> None:
    page = reference.metrics()
    for name, meaning in (COUNTERS | TENANT_COUNTERS | PLACE_COUNTERS).items():
        assert cells(page, f"`vllm:penstock_{name}_total`")[-1] == meaning
    for name, meaning in HISTOGRAMS.items():
        assert cells(page, f"`vllm:penstock_{name}`")[-1] == meaning


def test_metrics_are_of_two_kinds() -> None:
    text = (ROOT / "python/penstock/vllm/stats.py").read_text()
    kinds = set(re.findall(r"\b_?(\w+_cls)\b|prometheus_client\.(\w+)", text))
    expected = {("counter_cls", ""), ("histogram_cls", "")}
    assert kinds == expected, "the reference of metrics has to learn of other kinds"


def commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[str]]]:
    """Each command with what it takes."""
    named = [name for action in parser._actions for name in action.option_strings]
    yield parser.prog, named
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from commands(each)


def test_every_command_is_there_with_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_POOL", "valkey://user:password@builder")
    monkeypatch.setenv("COLUMNS", "40")
    page = reference.commands()
    sections = dict(re.findall(r"^#+ (penstock[^\n]*)\n\n```text\n(.*?)\n```", page, re.M | re.S))
    found = dict(commands(make_parser()))
    assert {f"penstock {name}" for name in COMMANDS} <= set(found)
    assert set(sections) == set(found)
    for prog, options in found.items():
        for option in options:
            assert re.search(rf"{option}(?![\w-])", sections[prog]), f"{prog} {option}"


def test_commands_are_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PENSTOCK_POOL", "valkey://user:password@builder")
    page = reference.commands()
    assert "builder" not in page
    assert str(Path.home()) + "/" not in page
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("PENSTOCK_POOL")
    assert reference.commands() == page
    helps = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert max(len(line) for text in helps for line in text.splitlines()) <= 80


def test_every_line_of_what_may_differ_is_there() -> None:
    page = reference.sharing()
    for name, reason in {**compat.MAY_DIFFER, **compat.MAY_DIFFER_BY_ENVIRONMENT}.items():
        assert f"| `{name}` | {reason} |" in page


def test_every_generated_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    for page in reference.PAGES:
        assert f"- {page}\n" in navigation


def test_every_error_of_the_package_is_documented_by_its_module() -> None:
    assert "::: penstock.errors\n" in (ROOT / "docs/api/errors.md").read_text()


def test_everything_that_the_package_gives_is_in_the_api() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs/api").glob("*.md"))
    named = set(re.findall(r"^::: penstock\.(\w+)$", pages, re.MULTILINE))
    assert set(penstock.__all__) - named == {"PenstockError", "__version__"}


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/index.html").write_text('<h1 id="top">Other</h1>')
    (tmp_path / "index.html").write_text(
        '<a href="other/#top">good</a> <a href="https://example.com/">elsewhere</a>'
        '<a href="other/#low">bad</a> <a href="gone/">bad</a> <img src="gone.svg">'
        '<script src="https://example.com/script.js"></script>'
    )
    assert check.faults(tmp_path) == [
        "index.html: gone.svg is not there",
        "index.html: gone/ is not there",
        "index.html: fetches https://example.com/script.js",
        "index.html: other/#low has no such place",
    ]


def test_the_quick_start_says_what_commands_print(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = (ROOT / "docs/quickstart.md").read_text()
    steps = re.findall(r"^```\n(.*?)```\n\n```text\n(.*?)```", text, re.MULTILINE | re.DOTALL)
    said = {command.splitlines()[-1]: printed for command, printed in steps}
    assert said["penstock --version"] == f"penstock {penstock.__version__}\n"
    (pool,) = re.findall(r"^export PENSTOCK_POOL='(\S+)'", text, re.MULTILINE)
    (serve,) = (command for command in said if command.endswith("--dry-run"))
    here = pool.replace("/tmp", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_POOL", here)
    assert main(shlex.split(serve)[1:]) == 0
    assert capsys.readouterr().out.replace(here, pool) == said[serve]
    assert main(["doctor"]) == 0
    found = capsys.readouterr().out.splitlines()
    shown = said["penstock doctor"].splitlines()
    # Speeds and the file system are the machine's.
    assert [line.split()[1] for line in found[1:]] == [line.split()[1] for line in shown[1:]]
    (script,) = re.findall(r"^```python\n(.*?)```", text, re.MULTILINE | re.DOTALL)
    compile(script, "ask.py", "exec")
