"""The rows of the end-to-end table: each KV connector with the servers that it needs.

Every server listens on loopback or a unix socket and keeps no data. It is ended by its pid. Peers
run with the settings that their own documentation gives for a setup like this.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from lab.processes import Server, free_port
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


class Example(Connector):
    """vLLM's own ExampleConnector: one file for each layer, whole prompts only."""

    label = "ExampleConnector"

    def start(self, folder: Path) -> None:
        self._folder = folder / "example"
        self._folder.mkdir()

    def warm(self) -> None:
        _read_all(self._folder)

    def transfer(self) -> dict[str, Any]:
        return {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(self._folder)},
        }


class Penstock(Connector):
    """Penstock over a directory, shared memory or a server's socket.

    It has its default settings, except `settings`.
    """

    def __init__(self, kind: str, transport: str = "", **settings: str) -> None:
        self._kind, self._transport = kind, transport
        self._settings = {f"penstock.{name}": value for name, value in settings.items()}
        self.label = f"Penstock, {kind}" + (f" over {transport}" if transport else "")
        self.label += "".join(f", {value}" for value in settings.values())
        self._server: PoolServer | None = None
        self._folder: Path | None = None
        self._segment: Path | None = None

    def start(self, folder: Path) -> None:
        if self._kind == "file":
            self._folder = folder / "-".join(["pool", *self._settings.values()])
            self._url = f"file://{self._folder}?size={POOL_BYTES}"
            return
        if self._kind == "shm":
            self._segment = Path(f"/dev/shm/penstock-bench-{os.getpid()}")
            self._url = f"shm://bench-{os.getpid()}?size={POOL_BYTES}"
            return
        # No blanks: they separate pools.
        transport = self._transport.replace(" ", "-")
        own = folder / "-".join([self._kind, transport, *self._settings.values()])
        own.mkdir()
        self._server = PoolServer(self._kind, own)
        self._server.start()
        self._url = self._server.tcp_url if self._transport == "TCP" else self._server.unix_url

    def warm(self) -> None:
        if self._folder is not None:
            _read_all(self._folder)

    def stop(self) -> None:
        if self._server is not None:
            self._server.kill()
        if self._segment is not None:
            self._segment.unlink(missing_ok=True)

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
        name = f"bench-node-{os.getpid()}"
        self._segment = Path(f"/dev/shm/penstock-{name}")
        self._settings = {"penstock.host_memory": f"shm://{name}?size={POOL_BYTES}"}


def _read_all(folder: Path) -> None:
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


class LMCache(Connector):
    """LMCache's multi-process server: its own DRAM, or Redis behind it.

    With Redis, the server is started anew before the second process. So this process finds the same
    as on another machine: an empty DRAM, and the values in Redis.
    """

    def __init__(self, *, redis: bool) -> None:
        self.label = "LMCache MP, Redis behind it" if redis else "LMCache MP, its server's DRAM"
        self._with_redis = redis
        self._redis: PoolServer | None = None
        self._process: Server | None = None

    def start(self, folder: Path) -> None:
        self._folder = folder / ("lmcache-redis" if self._with_redis else "lmcache")
        self._folder.mkdir()
        if self._with_redis:
            self._redis = PoolServer("redis", self._folder)
            self._redis.start()
        self._port, self._http_port = free_port(), free_port()
        self._start_server()

    def _start_server(self) -> None:
        options = {
            "host": "127.0.0.1",
            "port": self._port,
            "http-host": "127.0.0.1",
            "http-port": self._http_port,
            "l1-size-gb": POOL_BYTES >> 30,
            "eviction-policy": "LRU",
            "chunk-size": 256,
            "supported-transfer-mode": "auto",
        }
        command = [sys.executable, "-m", "lmcache.cli.main", "server", "--disable-metrics"]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        if self._redis is not None:
            adapter = {
                "type": "resp",
                "host": "127.0.0.1",
                "port": self._redis.port,
                "num_workers": 4,
            }
            command += ["--l2-adapter", json.dumps(adapter)]
        log = self._folder / "server.log"
        self._process = Server("LMCache", command, log, self.environment())
        self._process.wait_for_port(self._http_port)

    def between(self) -> None:
        if self._redis is not None and self._process is not None:
            self._process.stop()
            self._start_server()

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
        if self._redis is not None:
            self._redis.kill()

    def transfer(self) -> dict[str, Any]:
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self._port,
            },
        }

    def environment(self) -> dict[str, str]:
        return {"LMCACHE_TRACK_USAGE": "false"}


class Mooncake(Connector):
    """Mooncake's store over TCP: its master, and a process that holds the memory."""

    label = "MooncakeStoreConnector, TCP"

    def __init__(self) -> None:
        self._processes: list[Server] = []

    def start(self, folder: Path) -> None:
        own = folder / "mooncake"
        own.mkdir()
        master, metrics, holder = free_port(), free_port(), free_port()
        programs = Path(sys.executable).parent
        self._config = own / "mooncake.json"
        self._config.write_text(
            json.dumps(
                {
                    "mode": "standalone-store",
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": f"127.0.0.1:{master}",
                    "protocol": "tcp",
                    "device_name": "",
                    "global_segment_size": 0,
                    "local_buffer_size": 512 << 20,
                }
            )
        )
        self._run(
            own / "master.log",
            [
                str(programs / "mooncake_master"),
                "-rpc_address=127.0.0.1",
                f"-rpc_port={master}",
                "-metrics_host=127.0.0.1",
                f"-metrics_port={metrics}",
                "-enable_metric_reporting=false",
            ],
        ).wait_for_port(master)
        self._run(
            own / "holder.log",
            [
                str(programs / "mooncake_client"),
                "-host=127.0.0.1",
                f"-port={holder}",
                "-metadata_server=P2PHANDSHAKE",
                f"-master_server_address=127.0.0.1:{master}",
                "-protocol=tcp",
                f"-global_segment_size={POOL_BYTES >> 30}GB",
            ],
        ).wait_for_port(holder)

    def _run(self, log: Path, command: list[str]) -> Server:
        process = Server(log.stem, command, log, self.environment())
        self._processes.append(process)
        return process

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.stop()

    def transfer(self) -> dict[str, Any]:
        return {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}

    def environment(self) -> dict[str, str]:
        return {"MOONCAKE_CONFIG_PATH": str(self._config), "VLLM_HOST_IP": "127.0.0.1"}


class Nixl(Connector):
    """NIXL's transfer from one engine's KV cache into another's, over TCP or shared memory as UCX
    chooses. Nothing is kept, so it is for prefill and decode apart only.

    Its progress thread never rests, and stays on the model's cores. So each server needs a core to
    spare: on one core, prompts take four times as long."""

    label = "NixlConnector"

    def transfer(self) -> dict[str, Any]:
        return {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}

    def environment(self) -> dict[str, str]:
        # Every engine listens on a port of its own.
        return {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }


def every() -> dict[str, Connector]:
    """All rows, by their short names on the command line. The first one is the baseline."""
    return {
        "none": Connector(),
        "example": Example(),
        "penstock-node": PenstockNode(),
        "penstock-shm": Penstock("shm"),
        "penstock-file": Penstock("file"),
        "penstock-file-layers": Penstock("file", kv_layout="LBHNC"),
        "penstock-file-portable": Penstock("file", pool_geometry="portable"),
        "penstock-redis": Penstock("redis", "unix socket"),
        "penstock-redis-tcp": Penstock("redis", "TCP"),
        "penstock-valkey": Penstock("valkey", "unix socket"),
        "penstock-valkey-tcp": Penstock("valkey", "TCP"),
        "lmcache": LMCache(redis=False),
        "lmcache-redis": LMCache(redis=True),
        "mooncake": Mooncake(),
    }
