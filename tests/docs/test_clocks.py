"""Which tests read a clock or sleep, and why they may: all that do are in `clocks.txt`.

A test must pass on a machine that stands still for seconds at any point (CONTRIBUTING.md). The list
only shrinks: what is not in it fails, and so does a line that allows more than there is. A line has
a file, the number of places, and the reason in a sentence.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("clocks.txt")

CLOCKS = {
    *("time.sleep", "asyncio.sleep", "threading.Timer"),
    *(f"time.{name}" for name in ("monotonic", "perf_counter", "time")),
    *(f"time.{name}_ns" for name in ("monotonic", "perf_counter", "time")),
    *("datetime.datetime.now", "datetime.datetime.utcnow"),
}

RUST_CLOCKS = re.compile(r"\bsleep\(|\.elapsed\(|\bInstant::now\b|\bSystemTime::now\b")
RUST_QUIET = re.compile(
    r"""//[^\n]*|/\*.*?\*/|\bb?r(\#*)".*?"\1|\bb?"(?:\\.|[^"\\])*"|"(?:\\.|[^"\\])*"|'(?:\\[^']+|[^\\'])'""",
    re.DOTALL,
)
"""Comments, texts and characters: what they hold is no code, and their braces are none."""
RUST_TEST = re.compile(r"#\[cfg\((?:all\()?test\b[^\]]*\]")
"""What stands before an item that only tests have."""


def python_uses(source: str) -> list[int]:
    """The lines where a source names a clock, by whatever name. No time passes in `sleep(0)`."""
    tree = ast.parse(source)
    meant: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                meant[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                meant[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def name(node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return meant.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := name(node.value)) is not None:
            return f"{owner}.{node.attr}"
        return None

    idle = {
        node.func
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and [ast.dump(one) for one in node.args] == [_ZERO]
    }
    return sorted(
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute) and node not in idle and name(node) in CLOCKS
    )


_ZERO = ast.dump(ast.Constant(0))


def rust_uses(source: str, *, is_test: bool) -> list[int]:
    """The lines where a source's tests name a clock; all of it, if the file is a test's."""

    def quiet(found: re.Match[str]) -> str:
        return "\n" * found[0].count("\n")

    code = RUST_QUIET.sub(quiet, source)
    parts = [(0, len(code))] if is_test else [*_items(code)]
    # An item inside of another one is there twice.
    places = {
        found.start() for start, end in parts for found in RUST_CLOCKS.finditer(code, start, end)
    }
    return [code.count("\n", 0, place) + 1 for place in sorted(places)]


def _items(code: str) -> Iterator[tuple[int, int]]:
    """Where the items begin and end that only tests have."""
    for mark in RUST_TEST.finditer(code):
        depth, end = 0, mark.end()
        for end in range(mark.end(), len(code)):
            depth += (code[end] in "{") - (code[end] in "}")
            if not depth and code[end] in ";}":
                break
        yield mark.end(), end


def test_modules(source: str) -> set[str]:
    """The modules in files of their own that only tests have."""
    code = RUST_QUIET.sub("", source)
    items = (code[start:end] for start, end in _items(code))
    return {found[1] for item in items if (found := re.search(r"\bmod (\w+)\s*$", item))}


test_modules.__test__ = False  # type: ignore[attr-defined]


def python_files() -> Iterator[tuple[str, list[int]]]:
    # The demo measures; the rest of the laboratory is what tests stand on.
    demo = ROOT / "lab/demo"
    for path in sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "lab").rglob("*.py")]):
        if not path.is_relative_to(demo):
            yield _named(path), python_uses(path.read_text())


def rust_files() -> Iterator[tuple[str, list[int]]]:
    sources = {path: path.read_text() for path in sorted((ROOT / "crates").rglob("*.rs"))}
    whole: set[Path] = set()
    for path, source in sources.items():
        at = path.parent if path.stem in ("mod", "lib", "main") else path.with_suffix("")
        for module in test_modules(source):
            whole |= {at / f"{module}.rs", at / module / "mod.rs"}
    for path, source in sources.items():
        _, crate, kind, *_ = path.relative_to(ROOT).parts
        if kind not in ("src", "tests"):
            continue
        is_test = (
            path in whole
            or (crate == "penstock-contract" and "testing" in path.parts)
            or "tests" in path.relative_to(ROOT).parts
            or path.stem in ("tests", "fuzz")
        )
        yield _named(path), rust_uses(source, is_test=is_test)


def _named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def table() -> dict[str, tuple[int, str]]:
    """File → how many places of it may use a clock, and why."""
    lines = [line.split(" ", 2) for line in TABLE.read_text().splitlines()]
    assert lines == sorted(lines)
    return {path: (int(uses), reason) for path, uses, reason in lines}


@pytest.mark.parametrize(
    ("suffix", "files"), [(".py", python_files), (".rs", rust_files)], ids=["python", "rust"]
)
def test_each_use_of_a_clock_has_its_reason(
    suffix: str, files: Callable[[], Iterator[tuple[str, list[int]]]]
) -> None:
    allowed = {path: entry for path, entry in table().items() if path.endswith(suffix)}
    found = {path: lines for path, lines in files() if lines}
    wrong = [
        f"{path}: a clock in {len(found.get(path, []))} places, lines {found.get(path, [])}; "
        f"clocks.txt says {allowed.get(path, (0, ''))[0]}"
        for path in sorted(found.keys() | allowed.keys())
        if len(found.get(path, [])) != allowed.get(path, (0, ""))[0]
    ]
    assert not wrong, "\n".join(wrong)
    assert [path for path, (_, reason) in allowed.items() if not reason.endswith(".")] == []


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.sleep(1)",
        "import time as t\nx = t.monotonic() + 3",
        "from time import sleep\nsleep(0.1)",
        "from time import perf_counter as now\nbegin = now()",
        "import time\nfield(default_factory=time.time)",
        "def test():\n    import time\n    time.monotonic_ns()",
        "import asyncio\nasync def f():\n    await asyncio.sleep(0.1)",
        "from asyncio import sleep",
        "import threading\nthreading.Timer(1, f)",
        "from threading import Timer\nTimer(1, f)",
        "import datetime\ndatetime.datetime.now(datetime.timezone.utc)",
        "from datetime import datetime\ndatetime.now()",
        "from datetime import datetime as d\nd.utcnow()",
    ],
)
def test_pythons_clocks_are_found(source: str) -> None:
    # What is only imported is not used yet.
    assert len(python_uses(source)) == ("\n" in source)


@pytest.mark.parametrize(
    "source",
    [
        "# time.sleep(1)",
        "'time.sleep(1)'",
        "import asyncio\nasync def f():\n    await asyncio.sleep(0)",
        "clock.sleep(1)",
        "from tests.clock import time\ntime.sleep(1)",
    ],
)
def test_what_is_no_clock_of_pythons_is_left_alone(source: str) -> None:
    assert python_uses(source) == []


RUST = """
use std::time::Instant;
/// As `Instant::now()` is.
fn product() { let a = Instant::now(); sleep(a.elapsed()); }
#[cfg(test)]
use std::time::SystemTime;
#[cfg(all(test, not(loom)))]
mod tests {
    fn one() { let text = "sleep( }"; let brace = '}'; thread::sleep(SECOND); }
    fn two<'a>() { let raw = r#"Instant::now() ""#; assert!(begin.elapsed() < SECOND); }
    /* SystemTime::now() */
    fn three() { Instant::now(); SystemTime::now(); }
}
fn product_too() { Instant::now(); }
#[cfg(test)]
mod others;
"""


def test_rusts_clocks_are_found() -> None:
    assert rust_uses(RUST, is_test=False) == [9, 10, 12, 12]
    assert rust_uses(RUST, is_test=True) == [4, 4, 4, 9, 10, 12, 12, 14]
    assert test_modules(RUST) == {"others"}
