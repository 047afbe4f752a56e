"""vLLM servers of benches, with a connector or without, and `vllm bench serve`, which drives them.

All serve the demo's model. Their names, logs and files are in a folder of the bench's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches.shared import quiet
from benches.shared.connectors import ENGINE_ENVIRONMENT, Connector
from lab.demo.engine import Engine
from lab.demo.servers import Servers
from lab.models.chat import model_folder
from lab.processes import Interruption, Processes
from penstock.programs import cache_folder

CORES = ENGINE_ENVIRONMENT["VLLM_CPU_OMP_THREADS_BIND"]
"""All but the last, unless there is one only."""
SEQUENCES = 128
"""Requests that a server computes at once, by vLLM's default."""
# vLLM of this environment, which may have more than the one that Penstock is in.
_VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
_SERVED_NAME = "bench"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class Place:
    """Where servers run. They end with it, and so does what their connectors have started."""

    folder: Path
    model: Path
    processes: Processes
    servers: Servers
    ends: contextlib.ExitStack

    def prepare(self, name: str, connector: Connector) -> None:
        """Starts what a connector needs beside the servers."""
        own = self.folder / name.replace(" ", "-")
        own.mkdir()
        self.ends.callback(connector.stop)
        connector.start(own)

    def start(
        self,
        name: str,
        cores: str,
        connector: Connector,
        *options: str,
        kv_bytes: int,
        sequences: int = SEQUENCES,
        **transfers: str,
    ) -> Engine:
        """Starts a server with a connector. `transfers` are said in its `kv_transfer_config`."""
        command = [*_VLLM, "serve", str(self.model), "--served-model-name", _SERVED_NAME, *options]
        if (transfer := connector.transfer()) is not None:
            command += ["--kv-transfer-config", json.dumps(transfer | transfers)]
        return self.servers.start(
            name,
            cores,
            command,
            sequences=sequences,
            kv_bytes=kv_bytes,
            environment=connector.environment(),
        )

    def drive(
        self,
        url: str,
        requests: int,
        *,
        beside: contextlib.AbstractContextManager[object] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Runs `vllm bench serve` once, when the machine has come to rest. Returns its result.

        What is `beside` it begins after the rest. Options have the names that they have there. One
        that is True takes no value.

        Raises:
            RuntimeError: it fails, or not all requests were answered.
        """
        result = self.folder / "result.json"
        options |= {
            "backend": "openai",
            "base_url": url,
            "model": _SERVED_NAME,
            "tokenizer": self.model,
            "num_prompts": requests,
            "ignore_eos": True,
            "disable_tqdm": True,
            "save_result": True,
            "result_dir": result.parent,
            "result_filename": result.name,
        }
        command = [*_VLLM, "bench", "serve"]
        for option, value in options.items():
            command.append(f"--{option.replace('_', '-')}")
            command += [] if value is True else [str(value)]
        quiet.wait()
        with beside or contextlib.nullcontext():
            said = subprocess.run(
                command, capture_output=True, text=True, env=os.environ | _OFFLINE
            )
        if said.returncode != 0:
            raise RuntimeError(f"vllm bench serve failed: {said.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(result.read_text())
        if found["completed"] != requests:
            raise RuntimeError(f"only {found['completed']} of {requests} requests were answered")
        return found


@contextlib.contextmanager
def place() -> Iterator[Place]:
    """A place for servers. A signal that ends the bench ends them too."""
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as name,
        contextlib.ExitStack() as ends,
        Interruption() as interruption,
        Processes(interruption) as processes,
    ):
        folder = Path(name)
        model = model_folder(cache_folder() / "demo")
        yield Place(folder, model, processes, Servers(model, folder, processes), ends)
