"""KV events of the pool through vLLM's own publisher, read by a subscriber as routers are."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec.msgpack import Decoder

from lab.engines.node import Node
from lab.processes import free_port
from lab.waiting import eventually
from penstock._native import Store
from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.stored import LIMIT

pytestmark = pytest.mark.e2e

SEEDS = itertools.count(10_000)
"""Of prompts that nobody has asked before."""


class Subscriber:
    """Follows a publisher, and keeps what it says of storage."""

    def __init__(self, endpoint: str) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        self._decoder = Decoder(KVEventBatch)
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._stop = threading.Event()
        self.sequence: list[int] = []
        self.storage: list[Any] = []
        """Events of the pool, in the order in which they came."""
        self.others = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(100):
                continue
            _, number, payload = self._socket.recv_multipart()
            self.sequence.append(int.from_bytes(number, "big"))
            for event in self._decoder.decode(payload).events:
                if getattr(event, "medium", None) == "STORAGE":
                    self.storage.append(event)
                else:
                    self.others += 1

    def blocks(self, kind: str) -> list[bytes]:
        """The blocks of all events of a kind."""
        return [
            block_hash
            for event in list(self.storage)
            if type(event).__name__ == kind
            for block_hash in event.block_hashes
        ]

    def stored(self) -> list[Any]:
        """The events that tell of new blocks."""
        return [event for event in self.storage if type(event).__name__ == "BlockStored"]

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close(0)


def published(endpoint: str) -> dict[str, Any]:
    """Publishes at an endpoint of this machine alone, as docs/guides/routing.md says: vLLM binds
    what has two colons in it, and connects to other addresses."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint.replace("127.0.0.1", "[::ffff:127.0.0.1]"),
    }


@pytest.fixture
def publisher(
    llama: Path, start: Callable[..., Node], tmp_path: Path
) -> Iterator[tuple[Node, Subscriber, str]]:
    """An engine that publishes, somebody who listens, and the pool."""
    pool = f"file://{tmp_path}/pool?size=1GiB"
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with start(
        llama,
        pool=pool,
        settings={"penstock.event_check": 1.0, "penstock.event_content": True},
        kv_events_config=published(endpoint),
    ) as node:
        subscriber = Subscriber(endpoint)

        def is_heard() -> bool:
            node.ask(tokens(BLOCK + 5, seed=next(SEEDS)), max_tokens=2)
            return bool(subscriber.others)

        # A subscription takes a moment. What is published before is not seen.
        eventually(is_heard, seconds=LIMIT)
        yield node, subscriber, pool
        subscriber.close()


def wait_for(node: Node, is_so: Callable[[], bool], prompt: list[int]) -> None:
    """Until events have come. An engine publishes with its steps, so this asks a prompt again and
    again. What a busy machine did not store in time is stored with that."""

    def has_come() -> bool:
        if is_so():
            return True
        node.ask(prompt, max_tokens=2)
        return False

    eventually(has_come, node.counters, seconds=LIMIT)


def announced(subscriber: Subscriber, prompt: list[int]) -> list[Any]:
    """The events that tell of the prompt's blocks. Others may come at any time: of prompts that
    were asked before."""
    parts = [prompt[first:] for first in range(0, len(prompt), BLOCK)]
    return [
        event
        for event in list(subscriber.storage)
        if type(event).__name__ == "BlockStored"
        and any(event.token_ids == part[: len(event.token_ids)] for part in parts)
    ]


def place(event: Any, prompt: list[int]) -> int:
    """Where in the prompt its tokens begin."""
    count = len(event.token_ids)
    starts = range(0, len(prompt), BLOCK)
    return next(first for first in starts if prompt[first : first + count] == event.token_ids)


def hashes(events: list[Any], prompt: list[int]) -> list[Any]:
    """Of the prompt's blocks, in their order. Events agree on a block and on the one before."""
    known: dict[int, Any] = {}
    for event in events:
        assert len(event.token_ids) == len(event.block_hashes) * BLOCK
        first = place(event, prompt) // BLOCK
        for number, block_hash in enumerate(event.block_hashes, first):
            assert known.setdefault(number, block_hash) == block_hash
    for event in events:
        first = place(event, prompt) // BLOCK
        # What comes before may be told of later.
        if first == 0 or first - 1 in known:
            assert event.parent_block_hash == known.get(first - 1)
    return [known[number] for number in sorted(known)]


def are_told_once(node: Node, events: list[Any]) -> bool:
    """Whether no block is told of twice. Only one whose store failed meanwhile is stored again."""
    blocks = [block_hash for event in events for block_hash in event.block_hashes]
    return len(blocks) == len(set(blocks)) or node.counters().get("stores_failed", 0) > 0


def test_a_subscriber_learns_what_is_in_the_pool_and_what_is_gone(
    publisher: tuple[Node, Subscriber, str],
) -> None:
    node, subscriber, url = publisher
    prompt = tokens(5 * BLOCK + 20, seed=71)
    node.ask(prompt, max_tokens=2)
    wait_for(node, lambda: len(hashes(announced(subscriber, prompt), prompt)) == 5, prompt)
    stored = announced(subscriber, prompt)
    assert are_told_once(node, stored)
    for event in stored:
        assert (event.block_size, event.group_idx) == (BLOCK, 0)
        assert (event.locality, event.ownership) == ("LOCAL", "penstock")
        assert event.kv_cache_spec_kind == "full_attention"
        assert event.extra_keys == [None] * len(event.block_hashes)

    # A longer prompt: only what is new, with the hash of what comes before.
    longer = prompt[: 5 * BLOCK] + tokens(2 * BLOCK, seed=72)
    node.ask(longer, max_tokens=2)
    wait_for(node, lambda: len(hashes(announced(subscriber, longer), longer)) == 7, longer)
    all_of_it = announced(subscriber, longer)
    assert are_told_once(node, all_of_it)
    assert hashes(all_of_it, longer)[:5] == hashes(stored, prompt)
    assert any(place(event, longer) == 5 * BLOCK for event in all_of_it)

    # Somebody empties the pool. The engine finds out, and says so.
    assert subscriber.blocks("BlockRemoved") == []
    known = set(subscriber.blocks("BlockStored"))
    store = Store.open(url)
    for namespace, *_ in store.usage(timeout=60.0):
        store.remove([key for key, _ in store.list(namespace, timeout=60.0)], timeout=60.0)
    wait_for(node, lambda: set(subscriber.blocks("BlockRemoved")) >= known, [7, 8, 9])
    # Nothing was lost on the way.
    assert subscriber.sequence == list(range(subscriber.sequence[0], subscriber.sequence[-1] + 1))


def is_heard(node: Node, subscriber: Subscriber, salt: str) -> bool:
    """Asks a new prompt with a salt; whether the subscriber has heard of one."""
    node.ask(tokens(BLOCK + 5, seed=next(SEEDS)), max_tokens=2, cache_salt=salt)
    return any(event.extra_keys[0] for event in subscriber.stored())


def test_a_subscriber_learns_no_salt_and_no_token(
    llama: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    salt = "a long secret of red's"
    shown = []
    pool = f"file://{tmp_path}/pool?size=1GiB"
    for _ in range(2):
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        with start(llama, pool=pool, kv_events_config=published(endpoint)) as node:
            subscriber = Subscriber(endpoint)
            # A subscription takes a moment. So prompts are asked until one is heard of.
            eventually(functools.partial(is_heard, node, subscriber, salt), seconds=LIMIT)
            subscriber.close()
        for event in subscriber.stored():
            assert event.token_ids == []
            assert salt not in repr(event)
            shown += [keys for keys in event.extra_keys if keys]
    # The same salt is the same in both engines.
    assert len(set(shown)) == 1
