"""`penstock doctor --sglang`: can this SGLang be served, and does its pool answer?"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from penstock.cli import words

if TYPE_CHECKING:
    from penstock.sglang.check import Finding


def examine() -> Finding:
    """Imports SGLang and tries it."""
    from penstock.sglang import check

    # Standard output is for the findings. vLLM, which SGLang imports, reads this.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    # What SGLang's modules say of devices is not about storage.
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return check.examine()
    finally:
        logging.disable(logging.NOTSET)


def document(found: Finding) -> dict[str, Any]:
    """The findings, as one JSON document."""
    return {"can_serve": not found.violations, **asdict(found)}


def show(found: Finding) -> None:
    """Prints the findings."""
    from penstock.sglang.check import COPIED, IN_PLACE, NOT_TRIED
    from penstock.sglang.compat import SUPPORTED

    console = words.console()
    if found.version is not None:
        tested = "tested with Penstock" if found.is_tested else "not tested with Penstock"
        console.print(f"SGLang {found.version}, {tested} ({', '.join(SUPPORTED)} is)")
    for violation in found.violations:
        console.print(Text(f"✗ {violation}"))
    if not found.violations:
        console.print("✓ its storage factory takes the backend", style="green")
    table = Table.grid(padding=(0, 1))
    for layout, how in found.layouts.items():
        is_served = how in (IN_PLACE, COPIED)
        if how.startswith(NOT_TRIED):
            mark = Text("-")
        else:
            mark = Text("✓", "green") if is_served else Text("✗", "bold red")
        table.add_row(mark, f"layout {layout}", Text(f"pages move {how}" if is_served else how))
    console.print(table)
