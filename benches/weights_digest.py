"""How fast weights are digested, and how much longer a server's start takes for it.

First a file that lies in the page cache is digested, by one thread and by two. The baselines are
reading it, and SHA-256 as a hub names its files. Then servers are started with the same weights:
vLLM alone, Penstock with weights that nobody has digested, and Penstock with weights that it knows.
Passes of all kinds take turns, and each kind is first as often as the others. Run it as
``python -m benches.weights_digest``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benches.shared import report
from benches.shared.connectors import ENGINE_ENVIRONMENT
from benches.shared.report import GIB, progress
from benches.shared.rows import Times, turns
from lab.demo.engine import Engine
from lab.processes import Interruption, Processes, free_port
from penstock._native import FileDigests
from penstock.pool import POOL_VARIABLE
from penstock.programs import installed_program, vllm_program

STARTS = ("vLLM alone", "Penstock, new weights", "Penstock, known weights")
LAYERS, HIDDEN = 16, 2048
_AT_ONCE = 4 << 20


def read(path: Path) -> None:
    buffer = bytearray(_AT_ONCE)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def sha256(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        hashlib.file_digest(file, "sha256")


def digest(path: Path, threads: int) -> None:
    assert FileDigests([path], threads=threads).wait()


ALONE = "reading alone"
WAYS: dict[str, Callable[[Path], None]] = {
    ALONE: read,
    "SHA-256, one thread": sha256,
    "Penstock, one thread": lambda path: digest(path, 1),
    "Penstock, two threads": lambda path: digest(path, 2),
}


def speeds(folder: Path, nbytes: int, passes: int) -> dict[str, list[float]]:
    """Bytes per second of each way, pass by pass."""
    path = folder / "weights"
    with path.open("wb") as file:
        for _ in range(nbytes // _AT_ONCE):
            file.write(os.urandom(_AT_ONCE))
    read(path)
    times = Times()
    for number, way in turns(list(WAYS), passes, warm_up=0):
        progress(f"{way}: pass {number + 1} of {passes}")
        times.run(number, way, "file", partial(WAYS[way], path))
    path.unlink()
    return {way: [nbytes / seconds for seconds in times.each(way, "file")] for way in WAYS}


def model(folder: Path) -> Path:
    """A Llama with random weights, large enough that reading them takes time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32_000,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="1GB")
    return folder


def started(kind: str, weights: Path, folder: Path) -> tuple[float, float]:
    """Seconds until a server is ready, and how many of them it waited for digests."""
    cache = folder / "cache"
    if kind == STARTS[1]:
        shutil.rmtree(cache / "penstock/digests", ignore_errors=True)
    port = free_port()
    own = kind != STARTS[0]
    program = [installed_program("penstock")] if own else [vllm_program()]
    command = [*program, "serve", str(weights), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--skip-tokenizer-init", "--max-model-len", "1024"]
    command += ["--kv-cache-memory-bytes", str(1 << 28), "--enforce-eager"]
    environment = ENGINE_ENVIRONMENT | {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(cache),
        POOL_VARIABLE: (folder / "pool").as_uri(),
    }
    log = folder / "server.log"
    log.unlink(missing_ok=True)
    with Interruption() as interruption, Processes(interruption) as processes:
        began = time.perf_counter()
        server = processes.start("server", command, log, environment)
        engine = Engine("server", server, port)
        while not engine.is_ready():
            time.sleep(0.05)
        seconds = time.perf_counter() - began
    waited = re.findall(r"the start waited ([0-9.]+) s", log.read_text())
    return seconds, sum(map(float, waited))


def starts(folder: Path, passes: int) -> tuple[int, Times]:
    """The bytes of the weights, and the seconds of starts and those that they waited."""
    weights = model(folder / "model")
    files = list(weights.glob("*.safetensors"))
    for file in files:
        read(file)
        os.utime(file)
    # The digest of a file that was changed within the last minute is not kept.
    time.sleep(65)
    times = Times()
    # Nothing is measured of the first start. It fills the caches of files and of vLLM, and that of
    # digests.
    started(STARTS[1], weights, folder)
    for number, kind in turns(STARTS, passes, warm_up=0):
        progress(f"{kind}: start {number + 1} of {passes}")
        ready, waited = started(kind, weights, folder)
        times.add(number, kind, "ready", ready)
        times.add(number, kind, "waited", waited)
    return sum(file.stat().st_size for file in files), times


def main() -> None:
    parser = argparse.ArgumentParser(prog="benches.weights_digest", description=__doc__)
    parser.add_argument("--gib", type=int, default=4, help="size of the file (default: 4)")
    parser.add_argument("--passes", type=int, default=7, help="over the file (default: 7)")
    parser.add_argument("--starts", type=int, default=6, help="of each kind (default: 6)")
    args = report.begin(parser)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        found = speeds(Path(name), args.gib * GIB, args.passes)
        lines = [
            [
                way,
                f"{statistics.median(each) / 1e9:.2f}",
                f"{report.median_ratio(each, found[ALONE]):.3f}",
            ]
            for way, each in found.items()
        ]
        text = report.table(["a file in the page cache", "GB/s", "to reading"], lines)
        result["bytes_per_second"] = found
        if args.starts:
            nbytes, times = starts(Path(name), args.starts)
            lines = [
                [
                    kind,
                    f"{times.median(kind, 'ready'):.2f}",
                    f"{times.ratio(kind, STARTS[0], 'ready'):.3f}",
                    f"{times.ratio(kind, STARTS[2], 'ready'):.3f}",
                    f"{times.median(kind, 'waited'):.2f}",
                ]
                for kind in STARTS
            ]
            heads = [f"start with {nbytes / 1e9:.1f} GB of weights", "s", "to vLLM alone"]
            heads += ["to known weights", "s waited for digests"]
            text += "\n\n" + report.table(heads, lines)
            result |= {
                "weights_bytes": nbytes,
                "seconds_to_ready": {kind: times.each(kind, "ready") for kind in STARTS},
                "seconds_waited": {kind: times.each(kind, "waited") for kind in STARTS},
            }
    report.finish(args, text, result)


if __name__ == "__main__":
    main()
