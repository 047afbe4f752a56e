"""Servers on loopback, each on ports that nobody else has."""

from __future__ import annotations

import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

from lab.processes import Server, ServerFailed
from lab.waiting import LIMIT, eventually

_START_ATTEMPTS = 3


class NotInstalled(ServerFailed):
    """There is no such server on this machine."""

    kind = "not_installed"


class Start(Protocol):
    """A way to start a program, as :meth:`lab.processes.Processes.start` is one."""

    def __call__(
        self, name: str, command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None
    ) -> Server:
        """Starts it."""


class LoopbackServer(ABC):
    """A server that can be killed and started again. Its files lie in a folder.

    If its first start fails, it is tried again with other ports: another process may have taken
    one meanwhile.
    """

    def __init__(
        self, program: str, origin: str, folder: Path, log: str, start: Start = Server
    ) -> None:
        """A server that does not run yet. `origin` says how to get its `program`. `start` starts
        it.

        Raises:
            NotInstalled: there is no such program.
        """
        binary = shutil.which(program)
        if binary is None:
            raise NotInstalled(f"{program} is not installed ({origin})")
        self._program = program
        self._binary = binary
        self._folder = folder
        self._log = folder / log
        self._start = start
        self._started_before = False
        self.process: Server | None = None
        self._choose_ports()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Starts the server and waits until it serves.

        Raises:
            ServerFailed: it does not start. The message has the end of its log.
        """
        for attempt in range(1, _START_ATTEMPTS + 1):
            command = [self._binary, *self._arguments()]
            self.process = self._start(self._program, command, self._log)
            try:
                self._wait_until_it_serves()
            except ServerFailed:
                self.kill()
                if attempt == _START_ATTEMPTS:
                    raise
                if not self._started_before:
                    self._choose_ports()
            else:
                self._started_before = True
                return

    @abstractmethod
    def _choose_ports(self) -> None:
        """Takes ports for the next start."""

    @abstractmethod
    def _arguments(self) -> Sequence[str]:
        """What the program is told."""

    @abstractmethod
    def _serves(self) -> bool:
        """Whether it does. An OSError says no."""

    def _wait_until_it_serves(self) -> None:
        def serves() -> bool:
            self._running().check(LIMIT)
            try:
                return self._serves()
            except OSError:
                return False

        eventually(serves, seconds=math.inf)
        # What answers is this server, and no other one in its place.
        self._running().check(math.inf)

    def kill(self) -> None:
        """Ends the server at once."""
        if self.process is not None:
            self.process.kill()
            self.process = None

    def _running(self) -> Server:
        if self.process is None:
            raise ServerFailed(f"{self._program} does not run")
        return self.process
