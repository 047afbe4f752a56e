"""Each docstring names what it is about in its first sentence: an editor shows it alone, on hover.

What only points at a neighbour ("The same, ...", "As [`x`], ...") or begins with a pronoun ("Its
bytes.") says nothing there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

POINTS = re.compile(
    r"(?:And|As|Its?|Of|So|That|Their|Them|These|They|Those|The (?:same|others|other(?! \w))"
    r"|All of (?:it|them)|(?:How \w+|What|When|Where|Which|Whom?|Whose|Why) (?:it|they)"
    r"|This (?:is|many|one))\b|(?:Bytes|Requests|Seconds|Steps|This|Tokens|Why)\."
    r"|`?None`? "
)
"""What a sentence begins with that does not name its object. "This store's ..." does."""


def rust_docs(source: str) -> Iterator[tuple[int, str]]:
    """The first line of each doc comment, with its number."""
    before = None
    for number, line in enumerate(source.splitlines(), 1):
        found = re.match(r"\s*(//[/!])(?!/) ?(.*)", line)
        if found and found[1] != before:
            yield number, found[2]
        before = found and found[1]


def python_docs(source: str) -> Iterator[tuple[int, str]]:
    """Each docstring, with its line. A text after an assignment is one, too."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


@pytest.mark.parametrize(
    ("folder", "kinds", "docs"),
    [
        ("crates", (".rs",), rust_docs),
        ("python/penstock", (".py", ".pyi"), python_docs),
        ("lab", (".py",), python_docs),
    ],
)
def test_first_sentences_name_their_object(
    folder: str, kinds: tuple[str, ...], docs: Callable[[str], Iterator[tuple[int, str]]]
) -> None:
    files = sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in kinds)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {text.splitlines()[0]}"
        for path in files
        for number, text in docs(path.read_text())
        if POINTS.match(text)
    ]
    assert files
    assert found == []
