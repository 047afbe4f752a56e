"""What the vLLM servers of the demos have in common: model, options, cores."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lab.demo.engine import Engine
from lab.demo.replay import BLOCK_TOKENS
from lab.models.chat import CONTEXT_TOKENS
from lab.processes import Processes, free_port
from penstock.environment import describe
from penstock.programs import installed_program, vllm_program


class Servers:
    """Starts vLLM servers of one model. They end with `processes`."""

    def __init__(self, model: Path, folder: Path, processes: Processes) -> None:
        """The servers' logs and sockets lie in `folder`."""
        self._model = model
        self._folder = folder
        self._processes = processes

    def sharing(self, *options: str) -> list[str]:
        """The command of a server with Penstock."""
        # Servers, clients and the pool share the cores here, so a look-up may take its time.
        limits = ["--set", "lookup_timeout=5", "--set", "load_timeout=20"]
        return [installed_program("penstock"), "serve", str(self._model), *limits, *options]

    def plain(self, *options: str) -> list[str]:
        """The command of a server without Penstock."""
        return [vllm_program(), "serve", str(self._model), *options]

    def start(
        self,
        name: str,
        cores: str,
        command: Sequence[str],
        *,
        sequences: int,
        kv_bytes: int,
        environment: Mapping[str, str] | None = None,
    ) -> Engine:
        """Starts a server on some cores. It computes at most `sequences` requests at once, and has
        `kv_bytes` bytes for their KV."""
        port = free_port()
        server = self._processes.start(
            name,
            [
                *command,
                *("--host", "127.0.0.1", "--port", str(port)),
                *("--dtype", "float32"),
                *("--block-size", str(BLOCK_TOKENS)),
                *("--max-model-len", str(CONTEXT_TOKENS)),
                *("--max-num-seqs", str(sequences)),
                *("--kv-cache-memory-bytes", str(kv_bytes)),
                "--enforce-eager",
                "--disable-uvicorn-access-log",
            ],
            self._folder / f"{name.replace(' ', '-')}.log",
            {
                # Sockets that vLLM leaves behind are removed with the folder.
                "TMPDIR": str(self._folder),
                "VLLM_CPU_OMP_THREADS_BIND": cores,
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                **(environment or {}),
            },
        )
        return Engine(name, server, port)


def wait_until_ready(engines: Sequence[Engine], progress: Callable[[int], None]) -> None:
    """Waits for servers. Tells `progress` how many are ready.

    Raises:
        ServerFailed: a server ended, or took too long to start.
    """
    while (ready := sum(engine.is_ready() for engine in engines)) < len(engines):
        progress(ready)
        time.sleep(0.25)


def shares_of_cores() -> tuple[str, str]:
    """This process's cores in two equal halves, written as vLLM's CPU build reads them."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    first, second = cores[:half], cores[half : 2 * half] or cores[:half]
    return ",".join(map(str, first)), ",".join(map(str, second))


def environment(model: Path, cores: str) -> dict[str, str]:
    """What a demo ran on. `cores` says which server had which cores."""
    described = describe()
    versions = described["versions"]
    return {
        "model": f"{model.name}: Llama, 8 layers, hidden size 512, random weights, float32",
        "vLLM": versions["vllm"],
        "Penstock": versions["penstock"],
        "Python": versions["python"],
        "processor": f"{described['machine']['cpu']}; {cores}",
    }
