"""Valkey and Redis servers: on loopback and a unix socket, without persistence."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

from lab.loopback import LoopbackServer, Start
from lab.processes import Processes, Server, free_port
from lab.waiting import LIMIT


class PoolServer(LoopbackServer):
    """A Valkey or a Redis, which can be frozen too. A server that was killed starts empty.

    With `cluster`, it has a second port, over which the servers of a cluster speak.
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
        self._kind = kind
        self._options = options
        self._cluster = cluster
        self._listens = listens
        self._bus_port = 0
        self.port = 0
        self.socket = folder / f"{kind}.sock"
        self.unix_url = f"unix://{self.socket}"
        program = f"{kind}-server"
        origin = f"Debian's package {program} has it, scripts/install-servers.sh installs it"
        super().__init__(program, origin, folder, f"{kind}.log", start)

    @property
    def tcp_url(self) -> str:
        """The server's URL as a pool, by its port."""
        return f"{self._kind}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts the server, empty, and waits until it answers."""
        self.socket.unlink(missing_ok=True)
        super().start()

    def _choose_ports(self) -> None:
        if self._listens:
            self.port = self._bus_port = free_port()
            while self._bus_port == self.port:
                self._bus_port = free_port()

    def _arguments(self) -> list[str]:
        return [
            *("--bind", "127.0.0.1"),
            *("--port", str(self.port)),
            *("--unixsocket", str(self.socket)),
            *("--unixsocketperm", "700"),
            *("--save", ""),
            *("--appendonly", "no"),
            *("--dir", str(self._folder)),
            *(("--cluster-port", str(self._bus_port)) if self._cluster else ()),
            *self._options,
        ]

    def _serves(self) -> bool:
        return self.command("PING").startswith((b"+PONG", b"-NOAUTH"))

    def command(self, *words: str | bytes) -> bytes:
        """The first bytes of the raw reply to one command, which is sent over the unix socket."""
        parts = [w if isinstance(w, bytes) else w.encode() for w in words]
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(LIMIT)
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
