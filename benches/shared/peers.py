"""The KV connectors of others, with the servers that they need.

They run with the settings that their own documentation gives for a setup like this.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benches.shared.connectors import POOL_BYTES, Connector, read_all
from lab.processes import Server, free_port
from lab.servers import PoolServer


class Example(Connector):
    """vLLM's own ExampleConnector: one file for each layer, whole prompts only."""

    label = "ExampleConnector"

    def start(self, folder: Path) -> None:
        self._folder = folder / "example"
        self._folder.mkdir()

    def warm(self) -> None:
        read_all(self._folder)

    def transfer(self) -> dict[str, Any]:
        return {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(self._folder)},
        }


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
