"""`penstock pool warm` on the real vLLM: what it sends is in the pool afterwards."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.demo.engine import Engine
from lab.models.chat import BEGIN, VOCABULARY, model_folder
from lab.processes import Interruption, Processes, free_port
from lab.waiting import eventually
from penstock.cli import main
from penstock.pool import POOL_VARIABLE
from penstock.programs import cache_folder, installed_program
from tests.watched import START_SECONDS

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

BLOCK = 128


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: vLLM's unix sockets lie in it."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[Engine, int]]:
    with Interruption() as interruption, Processes(interruption) as processes:
        port = free_port()
        command = [
            *(installed_program("penstock"), "serve", str(model_folder(cache_folder() / "demo"))),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", "2048"),
            *("--kv-cache-memory-bytes", str(256 << 20), "--enforce-eager"),
            *("--host-bytes", str(256 << 20)),
        ]
        environment = {
            "TMPDIR": str(folder),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            POOL_VARIABLE: (folder / "pool").as_uri(),
        }
        process = processes.start("the server", command, folder / "log", environment)
        engine = Engine("the server", process, port)
        eventually(engine.is_ready, seconds=START_SECONDS)
        yield engine, port


def prompt(blocks: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [BEGIN, *(rng.randrange(3, VOCABULARY) for _ in range(blocks * BLOCK))]


def test_prompts_are_in_the_pool_afterwards(
    server: tuple[Engine, int], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, port = server
    prompts = [prompt(3, seed) for seed in range(5)]
    file = folder / "prompts.jsonl"
    lines: list[Any] = [*prompts, prompts[0], {"prompt": prompt(100, 9)}]
    file.write_text("\n".join(map(json.dumps, lines)))

    def warm(*options: str) -> tuple[int, dict[str, Any]]:
        status = main(["pool", "warm", str(file), f"127.0.0.1:{port}", "--json", *options])
        return status, json.loads(capsys.readouterr().out)

    assert warm("--dry-run") == (0, {"prompts": 6, "prompt_tokens": 5 * 385 + 12801})
    status, warmed = warm("--concurrency", "2")
    # One is longer than the server takes.
    assert (status, warmed["prompts"], warmed["answered"], warmed["refused"]) == (1, 6, 5, 1)
    assert "400" in warmed["refusals"][0]
    assert (warmed["prompt_tokens"], warmed["cached_tokens"]) == (5 * 385, 0)
    assert (warmed["stored_blocks"], warmed["stores_lost"]) == (15, 0)

    file.write_text("\n".join(map(json.dumps, prompts)))
    status, warmed = warm()
    assert (status, warmed["answered"]) == (0, 5)
    assert warmed["cached_tokens"] == 5 * 384
    assert warmed["stored_blocks"] == 0
    assert main(["pool", "verify", (folder / "pool").as_uri(), "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    sound = [one["sound"] for one in report["namespaces"] if one["description"].get("model")]
    assert sum(sound) >= 15
    assert main(["pool", "warm", str(file), f"127.0.0.1:{port + 1}"]) == 1
    assert "no metrics at" in capsys.readouterr().err
