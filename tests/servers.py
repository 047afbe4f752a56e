"""Real Valkey and Redis servers for tests: on loopback, without persistence, ended by their pid."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from lab.processes import free_port

from tests.waiting import LIMIT, eventually

START_ATTEMPTS = 3


class Server:
    """A server process that can be frozen, killed and started again.

    With `cluster`, it has a second port, over which the servers of a cluster speak. If its first
    start fails, it is tried again with other ports: another process may have taken one meanwhile.
    """

    def __init__(self, kind: str, folder: Path, *options: str, cluster: bool = False) -> None:
        binary = shutil.which(f"{kind}-server")
        if binary is None:
            message = f"{kind}-server is not installed (scripts/install-servers.sh installs it)"
            if not any(shutil.which(f"{other}-server") for other in ("redis", "valkey")):
                pytest.fail(f"{message}, nor is the other; one of them is needed")
            pytest.skip(message)
        self._kind = kind
        self._binary = binary
        self._options = options
        self._cluster = cluster
        self._folder = folder
        self._log = folder / f"{kind}.log"
        self._started_before = False
        self._bus_port = 0
        self.port = 0
        self._choose_ports()
        self.socket = folder / f"{kind}.sock"
        self.unix_url = f"unix://{self.socket}"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def tcp_url(self) -> str:
        return f"{self._kind}://127.0.0.1:{self.port}"

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Starts the server, empty, and waits until it accepts connections.

        Raises:
            RuntimeError: it does not start. The message has the end of its log.
        """
        for _ in range(START_ATTEMPTS):
            self._launch()
            if self._answers():
                self._started_before = True
                return
            self.kill()
            if not self._started_before:
                self._choose_ports()
        end = self._log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{self._binary} did not start; the end of its log:\n{end}")

    def _choose_ports(self) -> None:
        self.port = self._bus_port = free_port()
        while self._bus_port == self.port:
            self._bus_port = free_port()

    def _launch(self) -> None:
        self.socket.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    self._binary,
                    *("--bind", "127.0.0.1"),
                    *("--port", str(self.port)),
                    *("--unixsocket", str(self.socket)),
                    *("--save", ""),
                    *("--appendonly", "no"),
                    *("--dir", str(self._folder)),
                    *(("--cluster-port", str(self._bus_port)) if self._cluster else ()),
                    *self._options,
                ],
                stdout=log,
                stderr=log,
            )

    def _answers(self) -> bool:
        """Waits until it accepts connections. False: it ended."""
        assert self.process is not None
        process = self.process
        eventually(lambda: self._greets() or process.poll() is not None)
        return process.poll() is None

    def _greets(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(LIMIT)
                client.connect(str(self.socket))
                client.sendall(b"PING\r\n")
                return client.recv(16).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def command(self, *words: str | bytes) -> bytes:
        """Sends one command over the unix socket; returns the first bytes of the raw reply."""
        parts = [w if isinstance(w, bytes) else w.encode() for w in words]
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(LIMIT)
            client.connect(str(self.socket))
            body = b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts)
            client.sendall(b"*%d\r\n%s" % (len(parts), body))
            return client.recv(1 << 20)

    def freeze(self) -> None:
        """Stops the server's process where it is; connections stay open and silent."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets a frozen server go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends the server at once; what it held is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
