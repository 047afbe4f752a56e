"""The text that the models learn: what CPython says about itself.

Every CPython has it, so nothing is downloaded: the language reference as `help()` shows it
(`pydoc_data.topics`) and the docstrings of the standard library. Both are under the PSF licence,
as CPython is.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SHORTEST = 300
"""Characters of a docstring that is worth learning."""
HELD_OUT = 12
"""One document of so many is never learnt."""
_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "pydoc_data"}


@dataclass(frozen=True)
class Text:
    """Documents, in an order that depends on their content alone."""

    learnt: tuple[str, ...]
    held_out: tuple[str, ...]

    @cached_property
    def digest(self) -> str:
        """Names the text: other versions of CPython have others."""
        whole = hashlib.sha256()
        for document in (*self.learnt, "", *self.held_out):
            whole.update(document.encode() + b"\0")
        return whole.hexdigest()


def read() -> Text:
    """The text that this CPython ships with."""
    return split([*topics(), *docstrings(Path(sysconfig.get_path("stdlib")))])


def split(documents: list[str]) -> Text:
    """Sets documents apart that are not learnt. Each is taken once, however often it comes."""
    digests = {hashlib.sha256(each.encode()).digest(): each for each in documents}
    # The digest draws, so that a new document moves no other.
    held_out = {digest for digest in digests if digest[0] % HELD_OUT == 0}
    return Text(
        tuple(digests[each] for each in sorted(digests.keys() - held_out)),
        tuple(digests[each] for each in sorted(held_out)),
    )


def topics() -> list[str]:
    """The language reference, by subject."""
    found = importlib.import_module("pydoc_data.topics").topics
    return [each.strip() for each in found.values()]


def docstrings(library: Path) -> Iterator[str]:
    """Docstrings of the modules in a folder, without tests and without what others installed."""
    for path in sorted(library.rglob("*.py")):
        if _LEFT_OUT & set(path.relative_to(library).parts):
            continue
        try:
            module = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(module):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found = ast.get_docstring(node)
                if found and len(found) >= SHORTEST:
                    yield found
