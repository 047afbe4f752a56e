"""What the page of the examples says that each of them prints."""

from __future__ import annotations

import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def said() -> dict[str, str]:
    """Output by example, as the page has it."""
    _, *sections = re.split(r"^### ", (EXAMPLES / "README.md").read_text(), flags=re.MULTILINE)
    found = {}
    for section in sections:
        [output] = re.findall(r"^```text\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        found[section.partition("\n")[0]] = output
    return found
