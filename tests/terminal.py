"""Programs in a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Sequence


def shown_in_terminal(columns: int, command: Sequence[str]) -> str:
    """What a terminal of this width shows of a program, without its control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written_to_terminal(columns, command).decode())


def written_to_terminal(columns: int, command: Sequence[str]) -> bytes:
    """All that a program writes to a terminal of this width. It must succeed."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    environ = os.environ | {"TERM": "xterm", "COLUMNS": "", "LINES": ""}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                more = os.read(ours, 65536)
            except OSError:
                break
            if not more:
                break
            shown += more
        assert process.wait(60) == 0, shown
    os.close(ours)
    return shown
