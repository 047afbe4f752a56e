"""What the docs name exists: files, links, tests, settings, metrics, options, commands."""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from penstock._native import parse_size
from penstock.cli.main import make_parser
from penstock.plan import wish
from penstock.sglang.compat import SUPPORTED as SUPPORTED_SGLANG
from penstock.sglang.counters import COUNTERS as SGLANG_COUNTERS
from penstock.sglang.settings import Settings as SglangSettings
from penstock.vllm.counters import COUNTERS, HISTOGRAMS, PLACE_COUNTERS, TENANT_COUNTERS
from penstock.vllm.families import FAMILIES, NOT_TRIED, TRIED
from penstock.vllm.names import PREFIX
from penstock.vllm.scheduler.spans import ATTRIBUTES, OUTCOMES
from penstock.vllm.settings import Settings

ROOT = Path(__file__).parents[2]

OTHERS_OPTIONS = {"--cfg", "--example", "--ipc", "--lib", "--release", "--shm-size", "--strict"}
OTHERS_OPTIONS |= {"--test", "--workspace", "--sign", "--no-run", "--timings"}
OTHERS_OPTIONS |= {
    "--build-arg",
    "--device",
    "--env",
    "--file",
    "--gpus",
    "--publish",
    "--rm",
    "--tag",
}
OTHERS_OPTIONS |= {"--tag", "--filename", "--kustomize", "--namespace", "--output"}
OTHERS_OPTIONS |= {"--lookup", "--router", "--worker-urls", "--vllm-pd-disaggregation"}
OTHERS_OPTIONS |= {"--decode", "--kv-connector", "--prefill"}
OTHERS_OPTIONS |= {"--enable-hierarchical-cache", "--enable-metrics", "--lora-paths"}
OTHERS_OPTIONS |= {"--hicache-mem-layout", "--model-path", "--page-size"}
OTHERS_OPTIONS |= {"--hicache-storage-backend", "--hicache-storage-backend-extra-config"}
OTHERS_OPTIONS |= {"--speculative-draft-kv-cache-dtype", "--collect-only"}
"""Of cargo, rustc, mypy and git; of containers; of kubectl; of routers and what steers them; of
SGLang; of pytest."""

OTHERS_FILES = {"ask.py", "config.json", "plots.svg"}
"""The quick start's, which readers write; a model's; and one that a command would write."""

KINDS = ("rs", "py", "pyi", "md", "toml", "sh", "txt", "svg", "json", "ptx", "yml", "yaml")
FOLDERS = (
    ".ci",
    ".cargo",
    ".github",
    "benches",
    "crates",
    "deploy",
    "docs",
    "examples",
    "lab",
    "python",
    "requirements",
    "scripts",
    "tests",
)


@cache
def files() -> list[str]:
    """The project's own, without what builds and tests leave beside them."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    found += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts]


@cache
def sources() -> str:
    """All text of the project that runs."""
    kinds = (".rs", ".py", ".pyi", ".ptx", ".sh", ".toml")
    return "\n".join(
        (ROOT / name).read_text()
        for name in files()
        if name.endswith(kinds) and not name.startswith("tests/docs/")
    )


@cache
def words() -> set[str]:
    return set(re.findall(r"\w+", sources()))


def pages() -> list[str]:
    """The docs; the CHANGELOG speaks of what was."""
    return [name for name in files() if name.endswith(".md") and name != "CHANGELOG.md"]


def spans(text: str) -> Iterator[str]:
    """What stands in backticks or in blocks of code."""
    for block in re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL):
        yield from block.splitlines()[1:-1]
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def anchors(text: str) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


def missing_links(name: str) -> list[str]:
    text = (ROOT / name).read_text()
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            wrong.append(target)
    return wrong


def missing_files(name: str) -> list[str]:
    known = files()
    folders = {str(parent) for file in known for parent in Path(file).parents}
    wrong = []
    for span in spans((ROOT / name).read_text()):
        # What a command writes need not be there before.
        for word in re.findall(r"[\w./-]*\w", re.sub(r"--(json|plot) \S+|\S*[{]\S*", "", span)):
            last = word.rpartition("/")[2]
            is_file = last.rpartition(".")[2] in KINDS and last.count(".") and last[0] != "."
            is_folder = re.match(r"(tests|docs|benches|crates|deploy|lab|python|scripts)/\w", word)
            if not (is_file or is_folder) or last in OTHERS_FILES or word[0] == "/":
                continue
            word = word.removeprefix("./")
            if any(
                f"/{file}".endswith(f"/{word}") or file.startswith(f"{word}.") for file in known
            ):
                continue
            if word not in folders and not any(("/" + f).endswith("/" + word) for f in folders):
                wrong.append(word)
    return wrong


def missing_tests(name: str) -> list[str]:
    """Functions that are cited behind their file, as in reliability.md, or in backticks."""
    text = (ROOT / name).read_text()
    wrong = []
    for file, cited in re.findall(
        r"`([\w/]+\.(?:rs|py))`((?:,? (?:test_\w+|[a-z]\w*_\w+))+)", text
    ):
        there = "".join((ROOT / f).read_text() for f in files() if f"/{f}".endswith(f"/{file}"))
        functions = re.findall(r"\w+", cited)
        wrong += [f"{file} {each}" for each in functions if not re.search(rf"\b{each}\b", there)]
    named = {span for span in spans(text) if re.fullmatch(r"[a-z]+(_[a-z]+){3,}", span)}
    named = {each for each in named if not each.startswith("penstock_")}
    return wrong + sorted(named - words())


@cache
def options() -> set[str]:
    """Options of `penstock` and of the project's other programs."""
    found = set()

    def take(parser: argparse.ArgumentParser) -> None:
        found.update(parser._option_string_actions)
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for each in action.choices.values():
                    take(each)

    take(make_parser())
    programs = (
        r"(benches|crates|lab|scripts/flaky|tests/soak|tests/cli/golden|python/penstock/cli/serve)\b"
        r".*\.(py|rs|sh)"
    )
    for program in files():
        if re.match(programs, program):
            found.update(re.findall(r'"(--[a-z][a-z0-9-]+)"', (ROOT / program).read_text()))
    return found


@cache
def vllm_options() -> set[str]:
    """Read from the text, as importing vLLM takes long."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / "engine/arg_utils.py").read_text()
    return set(re.findall(r'"(--[a-z][a-z0-9-]+)"', text))


def missing_options(name: str) -> list[str]:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", (ROOT / name).read_text()))
    return sorted(named - options() - vllm_options() - OTHERS_OPTIONS)


def missing_commands(name: str) -> list[str]:
    wrong = []
    targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    # A bench that is no longer kept is in the commit that its figures were measured at.
    text = re.sub(r"at commit\s[0-9a-f]{7}\swith\s`[^`]*`", "", (ROOT / name).read_text())
    for span in spans(text):
        for module in re.findall(r"\b(benches\.\w+)", span):
            if module.replace(".", "/") + ".py" not in files():
                wrong.append(module)
        if made := re.match(r"make ([a-z0-9]+)", span):
            wrong += [] if made[1] in targets else [made[0]]
        command = re.match(r"(?:.*/)?penstock ([a-z][a-z-]*)(?: ([a-z]+))?\b", span)
        if command and span not in sources() and not takes(command[1], command[2]):
            wrong.append(command[0])
    return wrong


def takes(command: str, target: str | None) -> bool:
    parser = make_parser()
    for word in (command, target):
        choices = [a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if not choices or word is None:
            return True
        if word not in choices[0]:
            return False
        parser = choices[0][word]
    return True


@cache
def counters() -> set[str]:
    return {*COUNTERS, *TENANT_COUNTERS, *PLACE_COUNTERS}


def missing_metrics(name: str) -> list[str]:
    text = (ROOT / name).read_text()
    named = re.findall(r"(?:vllm:)?penstock_(\w+?)_total", text)
    named += re.findall(r"`…_(\w+)_total`", text)
    measured = re.findall(r"vllm:penstock_(\w+_(?:seconds|ratio))\b(?!_total)", text)
    return sorted({*named} - counters() - {*SGLANG_COUNTERS} | {*measured} - {*HISTOGRAMS})


def missing_variables(name: str) -> list[str]:
    named = set(re.findall(r"\bPENSTOCK_[A-Z_]+\b", (ROOT / name).read_text()))
    return sorted(each for each in named if f'"{each}"' not in sources())


def torn_tables(name: str) -> list[str]:
    """Rows behind an empty line, which no heading makes a table of."""
    lines = (ROOT / name).read_text().splitlines()
    return [
        row
        for before, row, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False)
        if row.startswith("|") and not before.startswith("|") and not after.startswith("|-")
    ]


@pytest.mark.parametrize(
    "check",
    [
        missing_links,
        missing_files,
        missing_tests,
        missing_options,
        missing_commands,
        missing_metrics,
        missing_variables,
        torn_tables,
    ],
    ids=lambda check: check.__name__,
)
def test_nothing_is(check) -> None:
    found = {name: wrong for name in pages() if (wrong := check(name))}
    assert found == {}


def rows(page: str, heading: str) -> list[list[str]]:
    """Cells of the first table after a heading."""
    text = (ROOT / page).read_text().partition(f"{heading}\n")[2]
    table = re.search(r"^\|.*\n\|-.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in row[1:-1].split(" | ")] for row in table[1].splitlines()]


def test_every_setting_is_in_the_reference_with_its_default() -> None:
    said = {}
    for key, default, _ in rows("docs/reference/settings.md", "# Settings of the connector"):
        said[key.strip("`").removeprefix(PREFIX)] = default.strip("`")
    known = {field.name: field.default for field in fields(Settings)}
    assert set(said) == set(known)
    for name, default in known.items():
        # These two are elsewhere unless they are set.
        if name in ("pool", "encryption_key_file"):
            assert "environment `PENSTOCK_" in said[name]
        elif name == "host_bytes":
            # Not a number: it follows from the engine's steps.
            assert (default, said[name]) == (0, "what two steps store")
        elif name in ("get_lanes", "put_lanes", "copy_lanes"):
            few, many = (Settings("memory:").lanes(1, cores) for cores in (1, 64))
            lane = name.removesuffix("_lanes")
            assert said[name] == f"{getattr(few, lane)}, or {getattr(many, lane)}"
        elif isinstance(default, bool):
            assert said[name] == str(default).lower(), name
        elif isinstance(default, int):
            assert parse_size(said[name].replace(" ", "")) == default, name
        elif isinstance(default, float):
            assert float(said[name]) == default, name
        else:
            assert said[name] == (default or "empty"), name


def test_every_setting_and_metric_of_sglang_is_in_the_reference() -> None:
    page = "docs/reference/settings.md"
    said = {
        key.strip("`"): default.strip("`")
        for key, default, _ in rows(page, "# Settings of SGLang's storage backend")
    }
    known = {field.name: field.default for field in fields(SglangSettings)}
    assert set(said) == set(known)
    for name, default in known.items():
        if name in ("pool", "encryption_key_file"):
            assert "environment `PENSTOCK_" in said[name]
        elif isinstance(default, int):
            assert parse_size(said[name].replace(" ", "")) == default, name
        elif isinstance(default, float):
            assert float(said[name]) == default, name
        else:
            assert said[name] == (default or "empty"), name
    named = {cells[0].strip("`") for cells in rows(page, "# Metrics of SGLang's storage backend")}
    assert named == {*SGLANG_COUNTERS}
    assert f"The tests run with SGLang {', '.join(SUPPORTED_SGLANG)}." in (ROOT / page).read_text()


NO_TEST = "\N{EN DASH}"


def test_the_guide_of_models_has_the_families_of_the_code() -> None:
    page = "docs/guides/models.md"
    assert rows(page, "## Kinds of layers") == [
        [
            each.layers,
            each.examples,
            each.on_cpu,
            f"`{each.shown_by}`" if each.shown_by else NO_TEST,
        ]
        for each in FAMILIES
    ]
    names = {what: f"`{Path(what).name}`" for each in FAMILIES for what in each.tried.values()}
    assert rows(page, "## What was tried") == [
        [each.examples, *(names.get(each.how(what), NOT_TRIED) for what in TRIED)]
        for each in FAMILIES
        if not each.is_refused
    ]


def test_every_key_of_kv_memory_is_in_the_reference() -> None:
    said = {cells[0].strip("`") for cells in rows("docs/reference/settings.md", "## KV memory")}
    assert said == {wish.PROPORTIONAL, wish.TOKENS}


def test_every_metric_is_in_the_reference() -> None:
    named = [
        cells[0].strip("`")
        for heading in (
            "# Metrics",
            "## Counters by thread",
            "## Counters by tenant",
            "## Histograms",
        )
        for cells in rows("docs/reference/settings.md", heading)
    ]
    assert sorted(named) == sorted({*counters(), *HISTOGRAMS})


def test_spans_are_in_the_reference() -> None:
    page = "docs/reference/settings.md"
    said = {cells[0].strip("`") for cells in rows(page, "# Spans")}
    assert said == {f"penstock.{name}" for name in ATTRIBUTES}
    assert {cells[0].strip("`") for cells in rows(page, "## Outcomes of a span")} == {*OUTCOMES}


_OF_TESTS = ("PENSTOCK_TEST", "PENSTOCK_TRACES", "PENSTOCK_STANDIN")
"""How variables begin that only tests set."""


def test_every_variable_that_users_set_is_in_the_docs() -> None:
    used = set(re.findall(r'"(PENSTOCK_[A-Z_]+)"', sources()))
    used = {name for name in used if not name.startswith(_OF_TESTS)}
    text = "".join((ROOT / name).read_text() for name in pages())
    assert {name for name in used if name not in text} == set()


def test_every_fault_is_counted_by_a_counter_that_there_is() -> None:
    for cells in rows("docs/reliability.md", "## The server's answers"):
        assert set(re.findall(r"`(\w+)`", cells[2])) <= counters(), cells
