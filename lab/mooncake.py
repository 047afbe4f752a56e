"""Mooncake's store for tests and benches, on loopback."""

from __future__ import annotations

import contextlib
from pathlib import Path

import penstock
from lab.processes import Server, free_port
from lab.waiting import eventually
from penstock.errors import StoreError


class Mooncake:
    """A master, which can be killed and started again, and a client that lends 512 MiB."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._folder = folder
        self._programs = programs
        self._port, self._metrics, self._holder_port = free_port(), free_port(), free_port()
        self.master = f"127.0.0.1:{self._port}"
        self.url = f"mooncake://{self.master}?buffer=64MiB"
        self.start()
        self._holder = self._run(
            "mooncake_client",
            "-host=127.0.0.1",
            f"-port={self._holder_port}",
            "-metadata_server=P2PHANDSHAKE",
            f"-master_server_address=127.0.0.1:{self._port}",
            "-protocol=tcp",
            "-global_segment_size=512MB",
        )

    def start(self) -> None:
        self._master = self._run(
            "mooncake_master",
            "-rpc_address=127.0.0.1",
            f"-rpc_port={self._port}",
            "-metrics_host=127.0.0.1",
            f"-metrics_port={self._metrics}",
            "-enable_metric_reporting=false",
        )

    def wait_until_it_stores(self) -> None:
        """Waits until the master knows of the memory.

        Raises:
            TimeoutError: it never does.
        """
        with penstock.open(self.url) as pool:

            def stores() -> bool:
                with contextlib.suppress(StoreError):
                    pool.put("ready", b"value", timeout=5)
                    return True
                return False

            eventually(stores, pause=0.2)

    def kill_master(self) -> None:
        self._master.kill()

    def stop(self) -> None:
        self.kill_master()
        self._holder.kill()

    def _run(self, program: str, *options: str) -> Server:
        command = [str(self._programs / program), *options]
        return Server(program, command, self._folder / f"{program}.log")
