"""A router of the vLLM project in front of two real servers, steered by the look-up service.

`scripts/vllm-router.sh` installs the router: vLLM does not bring it.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from lab.demo.engine import Engine
from lab.models import attention
from lab.processes import Interruption, Processes, Server, free_port
from lab.waiting import LIMIT, eventually
from tests.e2e.conftest import BLOCK
from tests.watched import START_SECONDS

ROUTER = os.environ.get("PENSTOCK_TEST_VLLM_ROUTER")
STEER = Path(__file__).parents[2] / "deploy/routing/steer.py"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        ROUTER is None, reason="vllm-router is not here: run it by scripts/vllm-router.sh"
    ),
]

MODEL = "model"
TEXT = "Water turns the wheel, and the wheel turns the stone. "
TALKS, TURNS = 8, 4


@dataclass
class Fleet:
    """Two servers, the router in front of them, and what steers it."""

    ports: list[int]
    """Of the servers."""
    router: int
    steered: int

    def own_hits(self) -> list[int]:
        """Tokens that each server has found in its own cache so far."""
        found = []
        for port in self.ports:
            text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
            hits = re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", text, re.M)
            found.append(int(sum(map(float, hits))))
        return found


def penstock(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("penstock")), *arguments]


def listens(server: Server, url: str) -> None:
    """Until somebody answers there."""

    def answers() -> bool:
        server.check(LIMIT)
        try:
            httpx.get(url, timeout=5, trust_env=False)
        except httpx.TransportError:
            return False
        return True

    eventually(answers, pause=0.2)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("router")
    model = attention.qwen3(folder / MODEL, text=TEXT)
    pool = f"file://{folder}/pool?size=1GiB"
    engines, followed, served = [], [], []
    with Processes(Interruption()) as processes:
        for core, name in enumerate("ab"):
            port, events, replay = free_port(), free_port(), free_port()
            publishes = (
                '{"enable_kv_cache_events": true, "publisher": "zmq", '
                f'"endpoint": "tcp://*:{events}", "replay_endpoint": "tcp://*:{replay}"}}'
            )
            command = penstock(
                *("serve", str(model), "--served-model-name", MODEL, "--host", "127.0.0.1"),
                *("--port", str(port), "--pool", pool, "--load-policy", "always"),
                *("--max-model-len", "4096", "--enforce-eager", "--kv-events-config", publishes),
            )
            environment = {
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": str(core % (os.cpu_count() or 1)),
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
            }
            server = processes.start(name, command, folder / f"{name}.log", environment)
            engines.append(Engine(name, server, port))
            served.append(port)
            where = f"tcp://127.0.0.1:{events},replay=tcp://127.0.0.1:{replay}"
            followed += ["--engine", f"{name}={where}"]
        for engine in engines:
            eventually(engine.is_ready, seconds=START_SECONDS)
        ports = [free_port() for _ in range(4)]
        lookup = processes.start(
            "look-up service",
            penstock("lookup-server", pool, "--port", str(ports[0]), "--refresh", "1", *followed),
            folder / "lookup.log",
        )
        listens(lookup, f"http://127.0.0.1:{ports[0]}/health")
        router = processes.start(
            "vllm-router",
            [
                *(str(ROUTER), "--host", "127.0.0.1", "--port", str(ports[1])),
                *("--policy", "consistent_hash", "--prometheus-port", str(ports[2])),
                *("--worker-urls", *(f"http://127.0.0.1:{port}" for port in served)),
            ],
            folder / "router.log",
            # Nothing of this environment is the router's.
            {"PYTHONPATH": ""},
        )
        listens(router, f"http://127.0.0.1:{ports[1]}/health")

        def routes() -> bool:
            router.check(LIMIT)
            return ask(ports[1], [7] * (BLOCK + 1), "first") == 200

        eventually(routes, pause=0.2)
        steering = processes.start(
            "steer.py",
            [
                *(sys.executable, str(STEER), "--port", str(ports[3]), "--model", MODEL),
                *("--lookup", f"http://127.0.0.1:{ports[0]}"),
                *("--router", f"http://127.0.0.1:{ports[1]}"),
            ],
            folder / "steer.log",
        )
        listens(steering, f"http://127.0.0.1:{ports[3]}/health")
        yield Fleet(served, ports[1], ports[3])


def ask(port: int, prompt: list[int], session: str | None = None) -> int:
    """The HTTP status of a completion."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0}
    headers = {} if session is None else {"x-session-id": session}
    url = f"http://127.0.0.1:{port}/v1/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=120, trust_env=False)
    if answer.status_code == 200:
        assert answer.json()["choices"]
    return answer.status_code


def talks(port: int, seed: int, *, is_random: bool) -> int:
    """Some talks, each turn of which repeats all before: the tokens that could be found."""
    rng = random.Random(seed)

    def words(blocks: int) -> list[int]:
        return [rng.randrange(5, 200) for _ in range(blocks * BLOCK + 9)]

    histories = [words(2) for _ in range(TALKS)]
    before = [0] * TALKS
    could = 0
    for turn in range(TURNS):
        for number in rng.sample(range(TALKS), TALKS):
            history = histories[number]
            session = f"{seed}-{turn}-{number}" if is_random else None
            assert ask(port, history, session) == 200
            could += before[number] // BLOCK * BLOCK
        before = [len(history) for history in histories]
        histories = [history + words(1) for history in histories]
    return could


def test_requests_go_where_most_of_their_prompt_is(fleet: Fleet) -> None:
    shares, places = {}, {}
    for name, port in (("router", fleet.router), ("steered", fleet.steered)):
        before = fleet.own_hits()
        could = talks(port, seed=len(name), is_random=name == "router")
        places[name] = [late - early for late, early in zip(fleet.own_hits(), before, strict=True)]
        shares[name] = sum(places[name]) / could
    print(f"of what could be found, engines found in their own caches: {shares}; {places}")
    # Without steering, each turn goes to either engine.
    assert shares["router"] < 0.9
    assert shares["steered"] > 0.95
    # It is no answer to send all to one.
    assert min(places["steered"]) > 0.1 * sum(places["steered"])
