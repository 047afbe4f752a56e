"""Programs that the benches start. Each one is ended by its pid."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path


class Process:
    """A server program and its log."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                # However the bench itself ends, its servers end with it.
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The program's process."""
        return self._process.pid

    def wait_for_port(self, port: int, timeout: float = 120.0) -> None:
        """Waits until the port answers. If the program ends first, it raises with the log's end."""
        end = time.monotonic() + timeout
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"a server did not start: {self._log.read_text()[-3000:]}")

    def stop(self) -> None:
        """Asks the program and its children to end; kills them after ten seconds."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
