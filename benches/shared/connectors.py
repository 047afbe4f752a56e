"""What engines of benches have as their KV connector: nothing, or Penstock over one of its pools.

`benches.shared.peers` has those of others. Every server listens on loopback or a unix socket and
keeps no data. It is ended by its pid.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from lab.segments import Segment
from lab.servers import PoolServer

_COMPUTING = max(1, (os.cpu_count() or 2) - 1)
ENGINE_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{_COMPUTING - 1}" if _COMPUTING > 1 else "0",
}
"""The environment of every engine: the model has all cores but the last.

By itself vLLM keeps one more core free for an engine with a connector. Where that leaves no core,
it keeps none free. So on two cores the model has one thread without a connector, and two with one.
Then neither speed nor bits can be compared."""

POOL_BYTES = 2 << 30
"""Size of every pool that has a bound: twice what all prompts of the larger model take."""


class Connector:
    """vLLM alone. It is also the base class of all other rows."""

    label = "none"

    def start(self, folder: Path) -> None:
        """Starts the servers; they outlive the engines."""

    def between(self) -> None:
        """Called after the end of the first process, and before the second begins."""

    def warm(self) -> None:
        """Called before a timed load. It brings the files of that load into the page cache."""

    def stop(self) -> None:
        """Ends the servers."""

    def transfer(self) -> dict[str, Any] | None:
        """vLLM's kv_transfer_config."""
        return None

    def environment(self) -> dict[str, str]:
        """Variables of the engine beyond `ENGINE_ENVIRONMENT`."""
        return {}


class Penstock(Connector):
    """Penstock over a directory, shared memory or a server's socket.

    It has its default settings, except `settings`.
    """

    def __init__(self, kind: str, transport: str = "", **settings: str) -> None:
        self._kind, self._transport = kind, transport
        self._settings = {f"penstock.{name}": value for name, value in settings.items()}
        self.label = f"Penstock, {kind}" + (f" over {transport}" if transport else "")
        self.label += "".join(f", {value}" for value in settings.values())
        self._folder: Path | None = None
        self._ends = contextlib.ExitStack()

    def start(self, folder: Path) -> None:
        # No blanks: they separate pools.
        words = (self._kind, self._transport.replace(" ", "-"), *self._settings.values())
        name = "-".join(filter(None, ("bench", *words)))
        own = folder / name
        match self._kind:
            case "file":
                self._folder = own
                self._url = f"file://{own}?size={POOL_BYTES}"
            case "shm":
                self._url = self._ends.enter_context(Segment(name)).url(POOL_BYTES)
            case server_kind:
                own.mkdir()
                server = self._ends.enter_context(PoolServer(server_kind, own))
                self._url = server.tcp_url if self._transport == "TCP" else server.unix_url

    def warm(self) -> None:
        if self._folder is not None:
            read_all(self._folder)

    def stop(self) -> None:
        self._ends.close()

    def transfer(self) -> dict[str, Any]:
        return {
            "kv_connector": "PenstockConnector",
            "kv_connector_module_path": "penstock.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"penstock.pool": self._url, **self._settings},
        }


class PenstockNode(Penstock):
    """Penstock with node memory, before a Valkey server's unix socket."""

    def __init__(self) -> None:
        super().__init__("valkey", "unix socket")
        self.label = "Penstock, node memory before Valkey"

    def start(self, folder: Path) -> None:
        own = folder / "node"
        own.mkdir()
        super().start(own)
        node = self._ends.enter_context(Segment("bench-node"))
        self._settings = {"penstock.host_memory": node.url(POOL_BYTES)}


def read_all(folder: Path) -> None:
    """Brings all files of a folder into the page cache.

    Kernels reclaim pages that nobody has read for a while. Here minutes lie between a prompt's
    store and its load. Without this, a row would measure the disk, by chance.
    """
    buffer = bytearray(1 << 20)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
