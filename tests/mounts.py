"""Directories that several hosts have mounted: sshfs over a server of its own for each host.

Locks are seen by one mount only, and what one host writes into an open file others see late. That
is the least that network file systems promise.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from lab.waiting import eventually

SERVER = Path("/usr/lib/openssh/sftp-server")

needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0
    or not Path("/dev/fuse").exists()
    or shutil.which("sshfs") is None
    or not SERVER.exists(),
    reason="a directory of several hosts takes root, /dev/fuse, sshfs and sftp-server "
    "(scripts/install-servers.sh installs the last two)",
)


class Mount:
    """A directory, as one host has mounted it."""

    def __init__(self, directory: Path, at: Path, *, believed: float = 1) -> None:
        """`believed`: for how many seconds the host believes what it has seen. Only afterwards does
        it see what others do."""
        self.path = at
        at.mkdir()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._server = subprocess.Popen([SERVER], stdin=theirs, stdout=theirs)
            caches = ("dcache_timeout", "attr_timeout", "entry_timeout")
            options = ",".join(["passive", *(f"{cache}={believed}" for cache in caches)])
            command = ["sshfs", "-f", "-o", options, f":{directory}", str(at)]
            self._client = subprocess.Popen(command, stdin=ours, stdout=ours)

        def is_mounted() -> bool:
            assert self._client.poll() is None, "sshfs ended"
            return os.path.ismount(at)

        eventually(is_mounted, "sshfs has mounted it")

    def __enter__(self) -> Mount:
        return self

    def __exit__(self, *_: object) -> None:
        self.thaw()
        subprocess.run(["umount", "--lazy", self.path], check=True)
        for process in (self._client, self._server):
            process.terminate()
            process.wait(60)

    def freeze(self) -> None:
        """The server answers nothing any more. Who asks waits."""
        self._server.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """The server goes on."""
        self._server.send_signal(signal.SIGCONT)
