"""Real Valkey and Redis servers for tests: on loopback, without persistence, ended by their pid."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from penstock.demo.processes import free_port

START_TIMEOUT = 20.0


class Server:
    """A server process that can be frozen, killed and started again."""

    def __init__(self, kind: str, folder: Path, *options: str) -> None:
        binary = shutil.which(f"{kind}-server")
        if binary is None:
            message = f"{kind}-server is not installed (scripts/install-servers.sh installs it)"
            if not any(shutil.which(f"{other}-server") for other in ("redis", "valkey")):
                pytest.fail(f"{message}, nor is the other; one of them is needed")
            pytest.skip(message)
        self._binary = binary
        self._options = options
        self._folder = folder
        self.socket = folder / f"{kind}.sock"
        self.port = free_port()
        self.tcp_url = f"{kind}://127.0.0.1:{self.port}"
        self.unix_url = f"unix://{self.socket}"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Starts the server, empty, and waits until it accepts connections."""
        self.socket.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [
                self._binary,
                *("--bind", "127.0.0.1"),
                *("--port", str(self.port)),
                *("--unixsocket", str(self.socket)),
                *("--save", ""),
                *("--appendonly", "no"),
                *("--dir", str(self._folder)),
                *self._options,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + START_TIMEOUT
        while time.monotonic() < end:
            try:
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(str(self.socket))
                    client.sendall(b"PING\r\n")
                    if client.recv(16).startswith((b"+PONG", b"-NOAUTH")):
                        return
            except OSError:
                time.sleep(0.02)
        raise TimeoutError(f"{self._binary} did not start")

    def command(self, *words: str | bytes) -> bytes:
        """Sends one command over the unix socket; returns the first bytes of the raw reply."""
        parts = [w if isinstance(w, bytes) else w.encode() for w in words]
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
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
