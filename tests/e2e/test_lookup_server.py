"""What the look-up service says is what an engine then loads."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock.lookup
from lab.engines.node import Adapter, Node
from lab.models import attention
from lab.waiting import LIMIT, eventually
from penstock.lookup import Lora, Service
from penstock.lookup.service import Settings
from tests.e2e.conftest import BLOCK, tokens
from tests.servers import Server

pytestmark = pytest.mark.e2e

PROMPTS = 40
PATIENT = Settings(timeout=LIMIT)
"""So that a busy machine does not turn hits into misses."""


@pytest.fixture(params=["valkey", pytest.param("file", marks=pytest.mark.full)])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/pool?size=1GiB"
        return
    with Server("valkey", tmp_path) as server:
        yield server.unix_url


def conversations(seed: int) -> list[tuple[list[int], str | None]]:
    """Prompts that share beginnings of many lengths, some with a salt of their own."""
    rng = random.Random(seed)
    roots = [tokens(rng.randrange(1, 6) * BLOCK, seed=seed + n) for n in range(5)]
    made: list[tuple[list[int], str | None]] = []
    for number in range(PROMPTS):
        root = rng.choice(roots)
        shared = root[: rng.randrange(1, len(root) + 1)]
        tail = tokens(rng.randrange(1, 3 * BLOCK), seed=seed + 100 + number)
        made.append((shared + tail, rng.choice([None, None, None, "red", "blue"])))
        if rng.random() < 0.3:
            # The next turn of the same conversation.
            made.append((shared + tail + tokens(BLOCK, seed=seed + 900 + number), made[-1][1]))
    return made


def opened(pool: str, model: Path) -> Service:
    """The service, once the engine has described its model."""
    service = penstock.lookup.open([pool], PATIENT)

    def is_described() -> bool:
        service.refresh()
        return bool(service.models)

    eventually(is_described, lambda: service.refused, pause=0.1)
    assert service.models[0].name == str(model)
    return service


def said_and_loaded(
    service: Service, model: Path, node: Node, prompt: list[int], salt: str | None
) -> tuple[int, int]:
    """The tokens that the service finds, and those that an engine without any loads then."""
    node.forget()
    [found] = service.find(str(model), prompt, cache_salt=salt).pools
    return found.tokens, node.ask(prompt, max_tokens=2, cache_salt=salt).cached


def agree(service: Service, model: Path, node: Node, prompt: list[int], salt: str | None) -> bool:
    """Whether an engine loads what the service finds."""
    found, loaded = said_and_loaded(service, model, node, prompt, salt)
    return found == loaded


def is_stored(
    service: Service, model: Path, node: Node, prompt: list[int], salt: str | None
) -> bool:
    """Whether all blocks of a prompt are in the pool. What is not there is stored again."""
    # An engine computes the last token.
    [found] = service.find(str(model), [*prompt, 3], cache_salt=salt).pools
    if found.tokens == len(prompt) // BLOCK * BLOCK:
        return True
    node.forget()
    node.ask(prompt, max_tokens=2, cache_salt=salt)
    return False


def test_answers_are_what_an_engine_loads(
    pool: str, llama: Path, start: Callable[..., Node]
) -> None:
    asked = conversations(seed=24)
    with start(llama, pool=pool) as first, start(llama, pool=pool) as second:
        for prompt, salt in asked[: len(asked) // 2]:
            first.ask(prompt, max_tokens=2, cache_salt=salt)
        first.wait_for("stored_blocks", 20)
        loaded = 0
        with opened(pool, llama) as service:
            for (prompt, salt), (other, its_salt) in zip(asked, reversed(asked), strict=True):
                # Both engines store what they compute, while the service answers.
                behind = first.start(other, 2, cache_salt=its_salt)
                found, cached = said_and_loaded(service, llama, second, prompt, salt)
                loaded += cached
                first.answer(behind)
                # A block may have been stored between the two. Then they agree once all is stored.
                if found != cached:
                    eventually(functools.partial(agree, service, llama, second, prompt, salt))
            assert loaded > 20 * BLOCK
            for prompt, salt in asked:
                eventually(functools.partial(is_stored, service, llama, second, prompt, salt))
            # Nobody stores what the next prompt begins with. So each answer is right at once.
            rng = random.Random(25)
            for number, (prompt, salt) in enumerate(asked):
                begun = prompt[: rng.randrange(1, len(prompt) + 1)]
                begun += tokens(rng.randrange(1, BLOCK), seed=2500 + number)
                found, cached = said_and_loaded(service, llama, second, begun, salt)
                assert found == cached, number


def test_an_adapter_is_found_by_its_content(
    llama: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    folder = attention.lora(tmp_path / "adapter", llama, seed=1)
    adapter = Adapter("sql", 1, str(folder))
    pool = f"file://{tmp_path}/pool?size=1GiB"
    prompt = tokens(4 * BLOCK + 5, seed=77)
    with start(llama, pool=pool, enable_lora=True, max_lora_rank=8) as node:
        node.ask(prompt, adapter=adapter)
        node.wait_for("stored_blocks", 4)
        with opened(pool, llama) as service:
            [model] = service.models
            assert model.hashing.forms == {"plain", "salted", "lora"}
        adapters = {"sql": str(folder)}
        with penstock.lookup.open([pool], PATIENT, adapters=adapters) as service:
            node.forget()
            [found] = service.find(str(llama), prompt, lora="sql").pools
            assert found.tokens == node.ask(prompt, adapter=adapter).cached == 4 * BLOCK
            other = Lora("sql", str(folder), "another")
            assert service.find(str(llama), prompt, lora=other).pools[0].tokens == 0
            assert service.find(str(llama), prompt).pools[0].tokens == 0
