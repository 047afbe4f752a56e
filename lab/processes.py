"""Server processes that never outlive the program that started them."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from lab.waiting import eventually
from penstock.errors import PenstockError

_GRACE_SECONDS = 10.0
_LOG_LINES = 25


class ServerFailed(PenstockError):
    """A server ended, or did not come up in time. The message has the end of its log."""

    kind = "server_failed"


class Interrupted(BaseException):
    """A signal asked the program to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """A context in which the first signal that ends a program raises :class:`Interrupted`.

    Later signals are ignored, so that they do not interrupt the clean-up. `held` delays the
    exception."""

    def __init__(self) -> None:
        self._holds = 0
        self._pending: int | None = None
        self._raised = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        self._before = {each: signal.signal(each, self._receive) for each in _ENDING_SIGNALS}
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A context in which nothing is interrupted. If a signal came meanwhile, it raises at the
        end."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
        if self._pending is not None:
            self._raise(self._pending)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self._holds:
            self._pending = number
        else:
            self._raise(number)

    def _raise(self, number: int) -> None:
        if not self._raised:
            self._raised = True
            raise Interrupted(number)


class Processes:
    """All servers of a program. After the `with` block, none of their processes is left."""

    def __init__(self, interruption: Interruption) -> None:
        self._interruption = interruption
        self._servers: list[Server] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_exception: object) -> None:
        with self._interruption.held():
            _stop_all(self._servers)

    def start(
        self, name: str, command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None
    ) -> Server:
        """Starts a program. Its output is added to the file `log`."""
        # Otherwise a signal could come after the program's start, but before it is in the list.
        with self._interruption.held():
            server = Server(name, command, log, environ)
            self._servers.append(server)
        return server


class Server:
    """A program in its own session, so that a Ctrl-C at the terminal reaches only who started it.

    However that one ends, the program ends too: it is killed with the thread that started it."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        """Starts the program. Its output is added to the file `log`."""
        self.name = name
        self._log = log
        self._started = time.monotonic()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environ or {})},
            )

    @property
    def pid(self) -> int:
        """The program's process."""
        return self._process.pid

    def check(self, deadline: float) -> None:
        """Raises ServerFailed if the program ended, or has been running for `deadline` seconds."""
        status = self._process.poll()
        if status is not None:
            raise ServerFailed(f"{self.name} ended with status {status}{self.log_tail()}")
        if time.monotonic() - self._started > deadline:
            raise ServerFailed(f"{self.name} was not ready after {deadline:.0f} s{self.log_tail()}")

    def wait_for_port(self, port: int, deadline: float = 120.0) -> None:
        """Waits until the program answers at a port of the loopback interface.

        Raises:
            ServerFailed: the program ended, or has been running for `deadline` seconds.
        """

        def answers() -> bool:
            self.check(deadline)
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return True
            return False

        eventually(answers, seconds=math.inf, pause=0.1)

    def log_tail(self) -> str:
        """The last lines of the program's log, as the end of a message."""
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        if not lines:
            return " and left no log"
        return f"; the end of its log {self._log}:\n" + "\n".join(f"  {line}" for line in lines)

    def family(self) -> list[psutil.Process]:
        """The program, its descendants, and processes that are no longer descendants but still in
        its session."""
        session = self._process.pid
        family = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.Error):
                if os.getsid(process.pid) == session:
                    family.append(process)
        with contextlib.suppress(psutil.Error):
            family += psutil.Process(self._process.pid).children(recursive=True)
        return list(set(family))

    def terminate(self) -> None:
        """Asks the program to end."""
        if self._process.poll() is None:
            self._process.terminate()

    def send(self, number: signal.Signals) -> None:
        """Sends the program a signal."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """Asks the program to end; kills what is left of its family after ten seconds."""
        _stop_all([self])

    def kill(self) -> None:
        """Ends the program at once, and nothing that it has started."""
        self._process.kill()
        self._process.wait()


def _stop_all(servers: Sequence[Server]) -> None:
    families = {process for server in servers for process in server.family()}
    for server in servers:
        server.terminate()
    psutil.wait_procs(families, timeout=_GRACE_SECONDS)
    families.update(process for server in servers for process in server.family())
    for process in families:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(families, timeout=_GRACE_SECONDS)


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on.

    It is below the ports that Linux gives to connections (`ip_local_port_range`, from 32768 on). So
    no connection takes it by chance while a server is starting.
    """
    while True:
        port = random.SystemRandom().randrange(12_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
