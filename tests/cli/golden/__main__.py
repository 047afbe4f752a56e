"""`python -m tests.cli.golden --write` makes all golden pages anew; see the package."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.cli.golden import page
from tests.cli.golden.room import room

parser = argparse.ArgumentParser(prog="python -m tests.cli.golden", description=__doc__)
parser.add_argument("--write", action="store_true", required=True, help="write the pages")
parser.add_argument("--to", metavar="FOLDER", type=Path, default=page.FOLDER)
arguments = parser.parse_args()

page.preload()
for old in arguments.to.glob("*.txt"):
    old.unlink()
with room() as made:
    for command, its_parser in page.commands().items():
        page.path(command, arguments.to).write_text(page.page(command, its_parser, made))
