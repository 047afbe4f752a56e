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

_PROGRAM = """
from lab.demo.program import main
from lab.demo.servers import Servers

sharing = Servers.sharing


def patient(self, *options):
    return sharing(self, *{options!r}, *options)


Servers.sharing = patient
{more}
raise SystemExit(main())
"""


def program(folder: Path, more: str = "") -> tuple[str, ...]:
    """The demo's command, with patient servers. `more` is done before it runs."""
    path = folder / "demo.py"
    path.write_text(_PROGRAM.format(options=OPTIONS, more=more))
    return (sys.executable, str(path))
