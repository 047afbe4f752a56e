"""vLLM's own proxies and its router for disaggregated prefill, as they are, in front of two servers
of Penstock.

`scripts/vllm-examples.sh` fetches the proxies: they are in vLLM's source distribution only.
`scripts/vllm-router.sh` fetches the router, a package of its own.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from lab.demo.engine import Engine
from lab.models import attention
from lab.processes import Interruption, Processes, Server, ServerFailed, free_port
from lab.waiting import LIMIT, eventually
from tests.e2e.conftest import BLOCK
from tests.watched import START_SECONDS

EXAMPLES = os.environ.get("PENSTOCK_TEST_VLLM_EXAMPLES")
ROUTER = os.environ.get("PENSTOCK_TEST_VLLM_ROUTER")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        EXAMPLES is None, reason="vLLM's proxies are not here: run it by scripts/vllm-examples.sh"
    ),
]

MODEL = "model"
TEXT = "Water turns the wheel, and the wheel turns the stone. "
PROMPTS = 12
AT_ONCE = 4
ANSWER_TOKENS = 8


@dataclass
class Pair:
    """A prefill server and a decode server over one pool."""

    prefill: Engine
    decode: Engine
    prefill_port: int
    decode_port: int
    bootstrap_port: int


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("proxies")
    model = attention.qwen3(folder / MODEL, text=TEXT)
    ports = [free_port() for _ in range(3)]
    with Processes(Interruption()) as processes:
        engines = []
        for core, (role, port) in enumerate(zip(("producer", "consumer"), ports, strict=False)):
            command = [
                *(str(Path(sys.executable).with_name("penstock")), "serve", str(model)),
                *("--served-model-name", MODEL, "--port", str(port), "--host", "127.0.0.1"),
                *("--pool", f"file://{folder}/pool?size=1GiB", "--role", role),
                *("--load-policy", "always", "--max-model-len", "4096", "--enforce-eager"),
                *("--set", "handover_timeout=60"),
                *("--set", "lookup_timeout=120", "--set", "load_timeout=240"),
            ]
            if role == "producer":
                command += ["--set", f"bootstrap=127.0.0.1:{ports[2]}"]
            environment = {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": str(core % (os.cpu_count() or 1)),
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
            }
            server = processes.start(role, command, folder / f"{role}.log", environment)
            engines.append(Engine(role, server, port))
        for engine in engines:
            eventually(engine.is_ready, seconds=START_SECONDS)
        yield Pair(engines[0], engines[1], *ports)


def proxy_command(family: str, pair: Pair, port: int) -> list[str]:
    """How vLLM's documentation starts the proxy."""
    found = {path.name: path for path in Path(str(EXAMPLES)).rglob("*proxy*.py")}
    prefill, decode = (f"127.0.0.1:{each}" for each in (pair.prefill_port, pair.decode_port))
    match family:
        case "serial":
            return [
                *(sys.executable, str(found["toy_proxy_server.py"]), "--port", str(port)),
                *("--prefiller-hosts", "127.0.0.1", "--prefiller-ports", str(pair.prefill_port)),
                *("--decoder-hosts", "127.0.0.1", "--decoder-ports", str(pair.decode_port)),
            ]
        case "blind":
            return [
                *(sys.executable, str(found["disagg_proxy_demo.py"]), "--port", str(port)),
                *("--model", MODEL, "--prefill", prefill, "--decode", decode),
            ]
        case "router, serial" | "router, concurrent":
            # The router asks a prefill server for its name under the port that follows the URL.
            is_concurrent = family.endswith("concurrent")
            return [
                *(str(ROUTER), "--host", "127.0.0.1"),
                *("--port", str(port), "--prometheus-port", str(free_port())),
                *("--policy", "round_robin", "--vllm-pd-disaggregation"),
                *("--kv-connector", "mooncake" if is_concurrent else "nixl"),
                *("--prefill", f"http://{prefill}"),
                *([str(pair.bootstrap_port)] if is_concurrent else []),
                *("--decode", f"http://{decode}"),
            ]
        case _:
            return [
                *(sys.executable, str(found["mooncake_connector_proxy.py"]), "--port", str(port)),
                *("--prefill", f"http://{prefill}", str(pair.bootstrap_port)),
                *("--decode", f"http://{decode}"),
            ]


def tokens_of(port: int, prompt: list[int]) -> tuple[int, list[int]]:
    """The HTTP status, and the tokens of a greedy answer."""
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(
        f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120, trust_env=False
    )
    if answer.status_code != 200:
        return answer.status_code, []
    return 200, answer.json()["choices"][0]["token_ids"]


def wait_until_it_serves(server: Server, port: int, prompt: list[int]) -> None:
    """A proxy listens before it can serve; the one for Mooncake answers 503 until then."""

    def serves() -> bool:
        server.check(LIMIT)
        try:
            return tokens_of(port, prompt)[0] == 200
        except httpx.TransportError:
            return False

    eventually(serves, pause=0.2)


@pytest.mark.parametrize(
    "family", ["serial", "blind", "concurrent", "router, serial", "router, concurrent"]
)
def test_a_proxy_as_it_is(family: str, pair: Pair, tmp_path: Path) -> None:
    if family.startswith("router") and ROUTER is None:
        pytest.skip("vLLM's router is not here: run it by scripts/vllm-router.sh")
    rng = random.Random(family)
    prompts = [
        [rng.randrange(3, 250) for _ in range(rng.randrange(BLOCK, 6 * BLOCK))]
        for _ in range(PROMPTS)
    ]
    port = free_port()
    proxy = Server(f"the {family} proxy", proxy_command(family, pair, port), tmp_path / "log")
    try:
        wait_until_it_serves(proxy, port, [5] * 10)
        before = pair.decode.counters()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(lambda prompt: tokens_of(port, prompt), prompts))
    except ServerFailed as error:
        pytest.fail(str(error))
    finally:
        proxy.terminate()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == tokens_of(pair.prefill_port, prompt)
    wanted = sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts)
    loaded = pair.decode.counters().loaded_tokens - before.loaded_tokens
    assert loaded >= 0.99 * wanted
    assert pair.decode.counters().stored_bytes == 0
    assert pair.prefill.counters().loaded_tokens == 0
