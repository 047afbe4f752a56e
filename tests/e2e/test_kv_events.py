"""KV events of the pool through vLLM's own publisher, read by a subscriber as routers are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec.msgpack import Decoder

from penstock._native import Store
from penstock.demo.processes import free_port
from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.node import Node

pytestmark = [pytest.mark.e2e, pytest.mark.alone]


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

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close(0)


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
        settings={"penstock.event_check": 1.0},
        kv_events_config={
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint.replace("127.0.0.1", "*"),
        },
    ) as node:
        subscriber = Subscriber(endpoint)
        # A subscription takes a moment. What is published before is not seen.
        while not subscriber.others:
            node.ask(tokens(BLOCK + 5, seed=time.monotonic_ns()), max_tokens=2)
            time.sleep(0.1)
        yield node, subscriber, pool
        subscriber.close()


def wait_for(node: Node, is_so: Callable[[], bool]) -> None:
    """Until events have come. An engine publishes with its steps."""
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        node.ask([7, 8, 9], max_tokens=2)
        time.sleep(0.05)


def test_a_subscriber_learns_what_is_in_the_pool_and_what_is_gone(
    publisher: tuple[Node, Subscriber, str],
) -> None:
    node, subscriber, url = publisher
    prompt = tokens(5 * BLOCK + 20, seed=71)
    before = len(subscriber.blocks("BlockStored"))
    node.ask(prompt, max_tokens=2)
    wait_for(node, lambda: len(subscriber.blocks("BlockStored")) >= before + 5)
    stored = [event for event in subscriber.storage if event.token_ids == prompt[: 5 * BLOCK]]
    assert len(stored) == 1
    [event] = stored
    assert len(event.block_hashes) == 5
    assert event.parent_block_hash is None
    assert (event.block_size, event.group_idx) == (BLOCK, 0)
    assert (event.locality, event.ownership) == ("LOCAL", "penstock")
    assert event.kv_cache_spec_kind == "full_attention"
    assert event.extra_keys == [None] * 5

    # A longer prompt: only what is new, with the hash of what comes before.
    longer = prompt[: 5 * BLOCK] + tokens(2 * BLOCK, seed=72)
    node.ask(longer, max_tokens=2)
    wait_for(node, lambda: len(subscriber.blocks("BlockStored")) >= before + 7)
    [more] = [each for each in subscriber.storage if each.parent_block_hash is not None]
    assert more.parent_block_hash == event.block_hashes[-1]
    assert more.token_ids == longer[5 * BLOCK :]

    # Somebody empties the pool. The engine finds out, and says so.
    assert subscriber.blocks("BlockRemoved") == []
    known = set(subscriber.blocks("BlockStored"))
    store = Store.open(url)
    for namespace, *_ in store.usage(timeout=10.0):
        store.remove([key for key, _ in store.list(namespace, timeout=10.0)], timeout=10.0)
    wait_for(node, lambda: set(subscriber.blocks("BlockRemoved")) >= known)
    # Nothing was lost on the way.
    assert subscriber.sequence == list(range(subscriber.sequence[0], subscriber.sequence[-1] + 1))
