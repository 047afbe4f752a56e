"""A picture of `penstock top`, from one of its own readings in a demo.

Usage: python -m scripts.docs.top

It draws docs/pictures/top.svg from scripts/docs/dashboard.json (see scripts/docs/dashboard.py).
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from penstock.cli.activity import Activity
from penstock.cli.top import page
from scripts.docs.dashboard import RECORDED, ROOT

PICTURE = ROOT / "docs/pictures/top.svg"
_COLUMNS = 140

# Without the font that rich would make a browser fetch.
_FORMAT = re.sub(r"@font-face {{.*?}}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def draw(reading: Mapping[str, Any]) -> str:
    """The picture, as SVG, of a line that `penstock top --json` wrote."""
    seen = {url: Activity(**each) for url, each in reading["engines"].items()}
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), highlight=False)
    console.print(page(seen, reading.get("pool"), 2.0, _COLUMNS))
    drawn = console.export_svg(title="penstock top", code_format=_FORMAT, unique_id="top")
    return "\n".join(line.rstrip() for line in drawn.splitlines() if line.strip()) + "\n"


def main() -> None:
    """Draws the picture anew."""
    Path(PICTURE).write_text(draw(json.loads(RECORDED.read_text())["top"]))


if __name__ == "__main__":
    main()
