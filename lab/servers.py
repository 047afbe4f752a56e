"""Valkey and Redis servers: on loopback and a unix socket, without persistence."""

from __future__ import annotations

import math
import shutil
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from lab.processes import Processes, Server, ServerFailed, free_port
from lab.waiting import eventually

_START_ATTEMPTS = 3
_LIMIT = 120.0
"""How long a start or an answer may take, in seconds. It only ends what hangs."""


class NotInstalled(ServerFailed):
    """There is no such server on this machine."""

    kind = "not_installed"


class Start(Protocol):
    """A way to start a program, as :meth:`Processes.start` is one."""

    def __call__(
        self, name: str, command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None
    ) -> Server:
        """Starts it."""


class PoolServer:
    """A server that can be frozen, killed and started again. Its files lie in a folder.

    With `cluster`, it has a second port, over which the servers of a cluster speak. If its first
    start fails, it is tried again with other ports: another process may have taken one meanwhile.
    """

    def __init__(
        self,
        kind: str,
        folder: Path,
        *options: str,
        cluster: bool = False,
        listens: bool = True,
        start: Start = Server,
    ) -> None:
        """A server that does not run yet. `kind` is "valkey" or "redis". Unless it `listens`, it
        has no TCP port. `start` starts its program.

        Raises:
            NotInstalled: there is no such server.
        """
        binary = shutil.which(f"{kind}-server")
        if binary is None:
            raise NotInstalled(
                f"{kind}-server is not installed (Debian's package {kind}-server has it, "
                "scripts/install-servers.sh installs it)"
            )
        self._kind = kind
        self._binary = binary
        self._options = options
        self._cluster = cluster
        self._listens = listens
        self._start = start
        self._folder = folder
        self._started_before = False
        self._bus_port = 0
        self.port = 0
        self._choose_ports()
        self.socket = folder / f"{kind}.sock"
        self.unix_url = f"unix://{self.socket}"
        self.process: Server | None = None

    @property
    def tcp_url(self) -> str:
        """The server's URL as a pool, by its port."""
        return f"{self._kind}://127.0.0.1:{self.port}"

    def __enter__(self) -> PoolServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Starts the server, empty, and waits until it accepts connections.

        Raises:
            ServerFailed: it does not start. The message has the end of its log.
        """
        for attempt in range(1, _START_ATTEMPTS + 1):
            self._launch()
            try:
                self._wait_until_it_answers()
            except ServerFailed:
                self.kill()
                if attempt == _START_ATTEMPTS:
                    raise
                if not self._started_before:
                    self._choose_ports()
            else:
                self._started_before = True
                return

    def _choose_ports(self) -> None:
        if self._listens:
            self.port = self._bus_port = free_port()
            while self._bus_port == self.port:
                self._bus_port = free_port()

    def _launch(self) -> None:
        self.socket.unlink(missing_ok=True)
        self.process = self._start(
            f"{self._kind}-server",
            [
                self._binary,
                *("--bind", "127.0.0.1"),
                *("--port", str(self.port)),
                *("--unixsocket", str(self.socket)),
                *("--unixsocketperm", "700"),
                *("--save", ""),
                *("--appendonly", "no"),
                *("--dir", str(self._folder)),
                *(("--cluster-port", str(self._bus_port)) if self._cluster else ()),
                *self._options,
            ],
            self._folder / f"{self._kind}.log",
        )

    def _wait_until_it_answers(self) -> None:
        def greets() -> bool:
            self._running().check(_LIMIT)
            return self._greets()

        eventually(greets, seconds=math.inf)
        # What answers is this server, and no other one at its socket.
        self._running().check(float("inf"))

    def _greets(self) -> bool:
        try:
            return self.command("PING").startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def command(self, *words: str | bytes) -> bytes:
        """The first bytes of the raw reply to one command, which is sent over the unix socket."""
        parts = [w if isinstance(w, bytes) else w.encode() for w in words]
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(_LIMIT)
            client.connect(str(self.socket))
            body = b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts)
            client.sendall(b"*%d\r\n%s" % (len(parts), body))
            return client.recv(1 << 20)

    def freeze(self) -> None:
        """Stops the server's process where it is; connections stay open and silent."""
        self._running().send(signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets a frozen server go on."""
        self._running().send(signal.SIGCONT)

    def kill(self) -> None:
        """Ends the server at once; what it held is gone."""
        if self.process is not None:
            self.process.kill()
            self.process = None

    def _running(self) -> Server:
        if self.process is None:
            raise ServerFailed(f"{self._kind}-server does not run")
        return self.process


def start_pool_server(processes: Processes, kind: str, folder: Path) -> str:
    """Starts Valkey or Redis on a unix socket in `folder`. Returns its URL as a pool.

    Raises:
        NotInstalled: there is no such server.
        ServerFailed: it does not start.
    """
    bounds = ("--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru")
    server = PoolServer(kind, folder, *bounds, listens=False, start=processes.start)
    server.start()
    return f"{kind}+{server.unix_url}"
