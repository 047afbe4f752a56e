"""The engines of `benches.one_engine`: vLLM alone and with a connector, on a device or a CPU."""

from __future__ import annotations

import argparse
import queue
import shutil
import sys
from pathlib import Path
from typing import Any

from benches.shared import report
from benches.shared.connectors import ENGINE_ENVIRONMENT
from benches.shared.report import progress
from lab import segments
from lab.engines.node import Node, StartError
from lab.models.saved import COMMON
from lab.segments import Segment

PLAIN, OFFLOADING, PENSTOCK, OTHER = "vllm", "offloading", "penstock", "penstock, another process"
LABELS = {
    PLAIN: "vLLM alone",
    OFFLOADING: "OffloadingConnector",
    PENSTOCK: "Penstock",
    OTHER: "Penstock, another process",
}
SHAPES: dict[str, dict[str, int]] = {
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
START_TIMEOUT = 900.0
"""Seconds. The first engine with a connector compiles what another without one has compiled."""
SHOWN = (
    "stored_blocks",
    "stores_dropped",
    "stores_failed",
    "load_failed_blocks",
    "load_late_blocks",
    "rejected_objects",
    "unpinned_bytes",
)
"""Counters of Penstock that belong to the result."""


def save_shape(folder: Path, shape: str) -> Path:
    """A model of which there is only the configuration."""
    from transformers import LlamaConfig

    config = LlamaConfig(**COMMON | SHAPES[shape] | {"max_position_embeddings": 1 << 17})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


class Engines:
    """The engines, by name. One that does not start is left out, and said in `failures`."""

    def __init__(self, model: Path, folder: Path, args: argparse.Namespace) -> None:
        self._model, self._folder, self._args = model, folder, args
        self._segment = Segment("bench-one")
        self.alive: dict[str, Node] = {}
        self.failures: dict[str, str] = {}
        self.counters: dict[str, dict[str, float]] = {}
        """Penstock's, of the engines that have ended."""

    def start(self, *names: str) -> None:
        """Starts engines, one after the other: each takes its share of the device's memory."""
        for name in names:
            log = self._folder / f"{name.replace(', ', '-').replace(' ', '-')}.log"
            node = Node(self._model, log, env=ENGINE_ENVIRONMENT, **self._options(name))
            try:
                node.wait_ready(START_TIMEOUT)
            except (StartError, queue.Empty) as error:
                node.kill()
                if name == PLAIN:
                    raise
                self.failures[name] = report.cause(str(error) or "TimeoutError: it takes too long")
                progress(f"{name} does not start: {self.failures[name]}")
            else:
                self.alive[name] = node
                progress(f"{name} serves")

    def stop(self, *names: str) -> None:
        """Ends engines, those of these names that there are."""
        for name in names:
            if (node := self.alive.pop(name, None)) is not None:
                if name in (PENSTOCK, OTHER):
                    found = node.counters()
                    self.counters[name] = {key: found.get(key, 0.0) for key in SHOWN}
                node.stop()

    def close(self) -> None:
        """Ends all, whatever they are doing, and gives the pool's memory back."""
        for node in self.alive.values():
            node.kill()
        self._segment.remove()

    def _options(self, name: str) -> dict[str, Any]:
        args = self._args
        on_device = args.device == "cuda"
        options: dict[str, Any] = {
            "load_format": "dummy",
            "dtype": "bfloat16" if on_device else "float32",
            "enforce_eager": not on_device,
            "max_model_len": max(args.lengths) + 64,
            "max_num_seqs": args.batch,
            "max_num_batched_tokens": args.step_tokens,
            "kv_cache_memory_bytes": args.kv_bytes,
        }
        if on_device:
            # Each engine would want nearly all of the device's memory to be free.
            options["gpu_memory_utilization"] = 0.25
        if name == OFFLOADING:
            options["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": args.host_bytes},
            }
        elif name != PLAIN:
            options["pool"] = self._segment.url(args.host_bytes)
            options["settings"] = {
                "penstock.host_bytes": args.host_bytes,
                "penstock.host_tier": True,
                # What a load takes is wanted, also where Penstock would rather recompute.
                "penstock.load_policy": "always",
            }
        return options | dict(args.engine)


def check_room(args: argparse.Namespace) -> None:
    """Ends the bench if the host memory of its engines does not fit into shared memory."""
    wanted, free = len(args.rows) * args.host_bytes, shutil.disk_usage(segments.FOLDER).free
    if wanted > free:
        sys.exit(
            f"one_engine: {segments.FOLDER} has {free >> 20} MiB left, and {', '.join(args.rows)} "
            f"take {wanted >> 20} MiB. Enlarge it (docker run --shm-size), or lower --host-bytes"
        )
