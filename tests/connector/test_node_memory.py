"""The scheduler half of an engine that shares its host tier with others of the machine."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.waiting import LIMIT
from penstock._native import Store
from penstock.vllm.groups import Group
from tests.connector.engine import HASH_TOKENS, PlainEngine

FULL = Group(0, "full_attention", HASH_TOKENS, None, "bfloat16", ())
PROMPT = list(range(24))
"""Six blocks. A load ends before the last token, so five can be loaded."""


@pytest.fixture
def url() -> Iterator[str]:
    name = f"test-{secrets.token_hex(8)}"
    try:
        yield f"shm://{name}?size=16MiB"
    finally:
        Path(f"/dev/shm/penstock-{name}").unlink(missing_ok=True)


def bring(engine: PlainEngine, url: str, blocks: int) -> None:
    """Puts the beginning of the prompt into node memory, as another engine would."""
    node = Store.open(url)
    request = engine.ask("first", PROMPT)
    for name in engine.names(request, 0)[:blocks]:
        for key in engine.keys((0, name)):
            node.put(key, b"value", timeout=LIMIT)


def test_what_is_there_is_a_hit_at_once_and_counts_as_host_memory(url: str) -> None:
    engine = PlainEngine([FULL], host_memory=url)
    bring(engine, url, 6)
    request = engine.ask("second", PROMPT)
    assert engine.half._catalogue.is_asked("second") is False, "the pool was not asked"
    assert engine.match(request) == 20
    [reach] = engine.half._catalogue.reaches("second", 0, 20)
    assert (reach.host_bytes > 0, reach.pool_bytes) == (True, 0)


def test_the_rest_comes_from_the_pool(url: str) -> None:
    engine = PlainEngine([FULL], host_memory=url)
    bring(engine, url, 2)
    engine.put_prompt(PROMPT)
    request = engine.ask("second", PROMPT)
    assert engine.match(request) == 20
    near, far = engine.half._catalogue.reaches("second", 0, 20)
    assert (near.end, near.pool_bytes) == (8, 0)
    assert (far.end, far.host_bytes) == (20, near.host_bytes)
    assert far.pool_bytes > 0


def test_what_was_given_up_is_looked_for_anew(url: str) -> None:
    engine = PlainEngine([FULL], host_memory=url)
    bring(engine, url, 6)
    assert engine.match(engine.ask("second", PROMPT)) == 20
    node = Store.open(url)
    listed = node.list(engine.agreement.namespaces[0], timeout=LIMIT)
    assert node.remove([key for key, _ in listed], timeout=LIMIT) == 6
    assert engine.match(engine.ask("third", PROMPT)) == 0
