"""What the look-up service says of each engine is what the engine then finds: in its own cache, as
its KV events tell, and in the pool."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock.lookup
from lab.engines.node import Node
from lab.processes import free_port
from lab.waiting import LIMIT, eventually
from penstock.lookup import EngineAddress, OnEngine, Service
from penstock.lookup.service import Settings
from tests.e2e.conftest import BLOCK, KV_BYTES_PER_BLOCK, tokens
from tests.servers import Server

pytestmark = pytest.mark.e2e

OWN_BLOCKS = 24
"""Of an engine's own cache: so few that it evicts all the time."""


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts that share beginnings of many lengths."""
    rng = random.Random(seed)
    roots = [tokens(6 * BLOCK, seed=seed + number) for number in range(6)]
    made = []
    for number in range(count):
        root = rng.choice(roots)
        tail = tokens(rng.randrange(1, 2 * BLOCK), seed=seed + 100 + number)
        made.append(root[: rng.randrange(1, len(root) + 1)] + tail)
    return made


def hits(node: Node) -> tuple[int, int]:
    """Tokens found so far in the engine's own cache, and in the pool."""
    counters = node.counters()
    own, pool = (counters.get(f"{kind}prefix_cache_hits", 0) for kind in ("", "external_"))
    return int(own), int(pool)


def opened(pool: str, addresses: list[EngineAddress], model: Path) -> Service:
    """The service, once an engine has described its model and both have told all that they have."""
    # A missing block is not believed to be missing: engines store all the time.
    settings = Settings(believe_missing=0.001, timeout=LIMIT)
    service = penstock.lookup.open([pool], settings, engines=addresses)

    def is_complete() -> bool:
        service.refresh()
        return bool(service.models) and all(
            view.state.name == "complete" for view in service.engines
        )

    eventually(
        is_complete,
        lambda: (service.refused, [each.state for each in service.engines]),
        pause=0.1,
    )
    return service


def on(service: Service, model: Path, prompt: list[int], name: str) -> OnEngine:
    found = service.find(str(model), prompt)
    [engine] = [engine for engine in found.engines if engine.name == name]
    return engine


def said_and_found(
    service: Service, model: Path, node: Node, prompt: list[int], name: str
) -> tuple[OnEngine, int, int]:
    """What the service says of an engine, and the tokens that this then finds in its own cache and
    in the pool."""
    said = on(service, model, prompt, name)
    before = hits(node)
    answer = node.ask(prompt, max_tokens=2)
    own, pool = (late - early for late, early in zip(hits(node), before, strict=True))
    assert own + pool == answer.cached
    return said, own, pool


def is_right(said: OnEngine, own: int, pool: int) -> bool:
    return (said.own, said.tokens) == (own, own + pool)


def agree(service: Service, model: Path, node: Node, prompt: list[int], name: str) -> bool:
    """Whether an engine finds what the service says of it."""
    return is_right(*said_and_found(service, model, node, prompt, name))


def is_stored(service: Service, model: Path, node: Node, prompt: list[int]) -> bool:
    """Whether all blocks of a prompt are in the pool. What is not there is stored again."""
    # An engine computes the last token.
    [pool] = service.find(str(model), [*prompt, 3]).pools
    if pool.tokens == len(prompt) // BLOCK * BLOCK:
        return True
    node.forget()
    node.ask(prompt, max_tokens=2)
    return False


def wait_told(service: Service, model: Path, node: Node, name: str, seed: int) -> None:
    """Waits until the service was told all that an engine has: events come in their order."""
    fresh = tokens(BLOCK + 1, seed=seed)
    # One step, whose events come together.
    node.ask(fresh, max_tokens=1)
    eventually(lambda: on(service, model, fresh, name).own == BLOCK)


@pytest.mark.parametrize("kind", ["numbers", pytest.param("bytes", marks=pytest.mark.full)])
def test_answers_are_what_each_engine_finds(
    kind: str,
    llama: Path,
    start: Callable[..., Node],
    tmp_path: Path,
) -> None:
    ports = {name: (free_port(), free_port()) for name in ("a", "b")}
    with Server("valkey", tmp_path) as server:

        def engine(name: str) -> Node:
            events, replay = ports[name]
            return start(
                llama,
                pool=server.unix_url,
                env={"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": str(int(kind == "numbers"))},
                max_model_len=2048,
                kv_cache_memory_bytes=OWN_BLOCKS * KV_BYTES_PER_BLOCK,
                kv_events_config={
                    "enable_kv_cache_events": True,
                    "publisher": "zmq",
                    "endpoint": f"tcp://*:{events}",
                    "replay_endpoint": f"tcp://*:{replay}",
                },
            )

        with engine("a") as a, engine("b") as b:
            nodes = {"a": a, "b": b}
            asked = prompts(120, seed=53)
            # Both have computed something before anybody listens.
            for number, prompt in enumerate(asked[:20]):
                nodes["ab"[number % 2]].ask(prompt, max_tokens=2)
            a.wait_for("stored_blocks", 4)
            addresses = [
                EngineAddress(name, f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")
                for name, (events, replay) in ports.items()
            ]
            owned, loaded = 0, 0
            with opened(server.unix_url, addresses, llama) as service:
                rng = random.Random(7)
                for prompt, other in zip(asked[20:], reversed(asked[20:]), strict=True):
                    name, busy = rng.choice(["ab", "ba"])
                    # The other engine computes and stores, while the service answers.
                    behind = nodes[busy].start(other, 2)
                    found = said_and_found(service, llama, nodes[name], prompt, name)
                    said, own, pool = found
                    assert said.state == "complete", said
                    owned, loaded = owned + own, loaded + pool
                    nodes[busy].answer(behind)
                    # Something may have been stored or evicted meanwhile, and not been told yet.
                    # Then they agree once all is told.
                    if not is_right(*found):
                        eventually(
                            functools.partial(agree, service, llama, nodes[name], prompt, name)
                        )
                assert min(owned, loaded) > 20 * BLOCK
                for prompt in asked:
                    eventually(functools.partial(is_stored, service, llama, a, prompt))
                # Nobody else computes, and all is told: each answer is right at once.
                for number in range(60):
                    name, prompt = rng.choice("ab"), rng.choice(asked)
                    begun = prompt[: rng.randrange(1, len(prompt) + 1)]
                    begun += tokens(rng.randrange(1, BLOCK), seed=5300 + number)
                    wait_told(service, llama, nodes[name], name, seed=5400 + number)
                    found = said_and_found(service, llama, nodes[name], begun, name)
                    assert is_right(*found), (number, found)

                # An engine that ends is said to be gone. Its blocks count no more.
                b.kill()
                eventually(lambda: on(service, llama, asked[-1], "b").state == "gone")
                assert on(service, llama, asked[-1], "b").own is None
                assert on(service, llama, asked[-1], "a").state == "complete"
