"""A demo that is patient. As users run it, a busy machine makes it load less, or wait no longer."""

from __future__ import annotations

import sys
from pathlib import Path

OPTIONS = (
    *("--load-policy", "always"),
    *("--set", "lookup_timeout=120", "--set", "load_timeout=240"),
    *("--set", "handover_timeout=240"),
)
"""Of its servers: they load whatever the pool has."""

_PROGRAM = """#!{python}
from penstock.cli import main
from penstock.demo.servers import Servers

sharing = Servers.sharing


def patient(self, *options):
    return sharing(self, *{options!r}, *options)


Servers.sharing = patient
{more}
raise SystemExit(main())
"""


def program(folder: Path, more: str = "") -> Path:
    """The command `penstock`, whose demo starts patient servers. `more` is done before it runs."""
    path = folder / "penstock"
    path.write_text(_PROGRAM.format(python=sys.executable, options=OPTIONS, more=more))
    path.chmod(0o755)
    return path
