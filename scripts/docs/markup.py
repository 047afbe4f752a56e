"""Markdown of docstrings: of roles, and of examples as an interpreter shows them."""

from __future__ import annotations

import re


def roles(text: str) -> str:
    """Cross-references, as links if they name the whole path.

    >>> roles("raises :class:`~penstock.errors.Full`, see :meth:`close`")
    'raises [`Full`][penstock.errors.Full], see `close`'
    """

    def link(found: re.Match[str]) -> str:
        short, path = found[1], found[2]
        shown = path.rpartition(".")[2] if short else path
        return f"[`{shown}`][{path}]" if path.startswith("penstock.") else f"`{shown}`"

    return re.sub(r":\w+:`(~?)([\w.]+)`", link, text)


def examples(text: str) -> str:
    """Examples of the interpreter, fenced.

    >>> examples("So:\\n\\n>>> 1 + 1\\n2\\n\\nThat is it.").splitlines()
    ['So:', '', '```pycon', '>>> 1 + 1', '2', '```', '', 'That is it.']
    """
    return re.sub(r"^>>> .*(?:\n.+)*", r"```pycon\n\g<0>\n```", text, flags=re.MULTILINE)
