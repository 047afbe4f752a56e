"""Engines' own caches, followed by the events that vLLM's own publisher sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.pretended import BLOCK, Engine, hashes
from lab.processes import free_port
from lab.waiting import eventually
from penstock._native import EngineCache, Store
from penstock.errors import ConfigError
from penstock.lookup import EngineAddress, OnEngine, Service
from penstock.lookup.engines import EngineView
from penstock.lookup.service import Settings

# vLLM's publisher takes seconds to import.
pytestmark = pytest.mark.long

PROMPT = list(range(6 * BLOCK + 1))
CHUNKS = hashes(PROMPT)


class Publisher:
    """vLLM's publisher of KV events."""

    def __init__(self, port: int, replay: int | None = None, **options: Any) -> None:
        events = pytest.importorskip("vllm.distributed.kv_events")
        self._events = events
        self._publisher = _that_tells_who_subscribes(events)(
            0,
            f"tcp://*:{port}",
            None if replay is None else f"tcp://*:{replay}",
            **options,
        )

    def say(self, *events: Any) -> None:
        """Publishes a step's events. Returns when they are on their way."""
        self._publisher.publish(self._events.KVEventBatch(ts=0.0, events=list(events)))
        eventually(lambda: not self._publisher._event_queue.unfinished_tasks, pause=0.001)

    def stored(self, chunks: list[bytes], *, as_bytes: bool = False, **changes: Any) -> Any:
        values: dict[str, Any] = {
            "block_hashes": [chunk if as_bytes else _number(chunk) for chunk in chunks],
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
        }
        return self._events.BlockStored(**(values | changes))

    def removed(self, chunks: list[bytes], medium: str = "GPU") -> Any:
        return self._events.BlockRemoved(
            block_hashes=[_number(chunk) for chunk in chunks], medium=medium, group_idx=0
        )

    def cleared(self) -> Any:
        return self._events.AllBlocksCleared()

    def wait_subscribed(self) -> None:
        """Returns when one more subscription is there: what is said from then on, it gets."""
        assert self._publisher._pub.poll(60_000), "nobody subscribes"
        assert self._publisher._pub.recv() == b"\x01"

    def lose(self, *events: Any) -> None:
        """A batch that nobody gets, as when a subscriber is too slow."""
        socket, self._publisher._pub = self._publisher._pub, _Nowhere()
        self.say(*events)
        self._publisher._pub = socket

    def close(self) -> None:
        self._publisher.shutdown()


def _that_tells_who_subscribes(events: Any) -> Any:
    """vLLM's publisher with the one kind of socket that says so, and is the same else. The
    publisher's thread touches it only while `say` waits."""

    class Publisher(events.ZmqEventPublisher):  # type: ignore[misc]
        def _socket_setup(self) -> None:
            self._pub = self._ctx.socket(events.zmq.XPUB)
            self._pub.set_hwm(self._hwm)
            # Each subscription, also if another one is like it.
            self._pub.setsockopt(events.zmq.XPUB_VERBOSE, 1)
            self._pub.bind(self._endpoint)
            # It makes the other socket alone.
            super()._socket_setup()

    return Publisher


class _Nowhere:
    def send_multipart(self, parts: Any) -> None:
        pass


def _number(chunk: bytes) -> int:
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    found = maybe_convert_block_hash(chunk)
    assert isinstance(found, int)
    return found


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine here falls silent: on a slow machine it only takes longer."""
    monkeypatch.setattr("penstock.lookup.engines._SILENT_MS", 60_000)
    monkeypatch.setattr("penstock.lookup.engines._REPLAY_SECONDS", 60.0)


@pytest.fixture
def ports() -> tuple[int, int]:
    return free_port(), free_port()


@pytest.fixture
def store() -> Store:
    store = Store.open("memory://?size=16MiB")
    Engine(store)
    return store


@pytest.fixture
def made() -> Iterator[Callable[..., Publisher]]:
    publishers: list[Publisher] = []

    def make(*arguments: Any, **options: Any) -> Publisher:
        publishers.append(Publisher(*arguments, **options))
        return publishers[-1]

    yield make
    for publisher in publishers:
        publisher.close()


def address(port: int, replay: int | None = None, **more: Any) -> EngineAddress:
    again = None if replay is None else f"tcp://127.0.0.1:{replay}"
    return EngineAddress("a", f"tcp://127.0.0.1:{port}", again, **more)


def following(store: Store, where: EngineAddress, publisher: Publisher, **settings: Any) -> Service:
    """The service, once it can hear the engine."""
    service = Service([store], Settings(believe_missing=1e-6, **settings), engines=[where])
    hears(service, publisher)
    return service


def hears(service: Service, publisher: Publisher) -> None:
    """Waits until the service hears what the engine publishes. What is published before is lost.

    It takes the handshake, which the service knows of, and the subscription that follows, which the
    publisher knows of.
    """
    until(service, lambda said: said.state != "gone")
    publisher.wait_subscribed()


def until(service: Service, is_so: Callable[[OnEngine], bool], prompt: Any = None) -> OnEngine:
    """What the service says of the only engine, once it is so."""

    def said() -> OnEngine:
        [one] = service.find("llama", prompt or PROMPT).engines
        return one

    def so() -> OnEngine | None:
        found = said()
        return found if is_so(found) else None

    found = eventually(so, said)
    assert found is not None
    return found


@pytest.mark.parametrize("as_bytes", [False, True])
def test_what_an_engine_has_and_what_its_pool_adds(
    store: Store, ports: tuple[int, int], made: Callable[..., Publisher], as_bytes: bool
) -> None:
    publisher = made(ports[0])
    with following(store, address(ports[0]), publisher) as service:
        publisher.say(publisher.stored(CHUNKS[:2], as_bytes=as_bytes))
        said = until(service, lambda said: said.own == 2 * BLOCK)
        assert (said.state, said.tokens) == ("complete", 2 * BLOCK)
        assert said.heard is not None
        # The pool has what comes next, and lacks what the engine has.
        Engine(store).put(CHUNKS[2:4])
        [found] = service.find("llama", PROMPT).pools
        assert found.tokens == 0
        said = until(service, lambda said: said.tokens == 4 * BLOCK)
        assert said.own == 2 * BLOCK
        # The prompt's last token is left to compute.
        [said] = service.find("llama", PROMPT[: 2 * BLOCK]).engines
        assert (said.own, said.tokens) == (BLOCK, BLOCK)
        # What lies in storage, or in other memory, is not its own cache.
        publisher.say(publisher.removed(CHUNKS[:1], "STORAGE"))
        publisher.say(publisher.stored(CHUNKS[2:3], medium="CPU"))
        publisher.say(publisher.stored(CHUNKS[3:4]))
        until(service, lambda _: service.engines[0].blocks == 3)
        [said] = service.find("llama", PROMPT).engines
        assert said.own == 2 * BLOCK
        # It has the first block twice.
        publisher.say(publisher.stored(CHUNKS[:1]), publisher.removed(CHUNKS[:1]))
        publisher.say(publisher.removed(CHUNKS[1:2]))
        assert until(service, lambda said: said.own != 2 * BLOCK).own == BLOCK
        publisher.say(publisher.removed(CHUNKS[:1]))
        assert until(service, lambda said: said.own == 0).state == "complete"
        publisher.say(publisher.stored(CHUNKS[:1]), publisher.cleared())
        until(service, lambda _: service.engines[0].blocks == 0)


def test_what_came_before_is_told_again_or_said_to_be_unknown(
    store: Store, ports: tuple[int, int], made: Callable[..., Publisher]
) -> None:
    publisher = made(*ports)
    publisher.say(publisher.stored(CHUNKS[:2]))
    with (
        following(store, address(*ports), publisher) as knowing,
        following(store, address(ports[0]), publisher) as late,
    ):
        assert until(knowing, lambda said: said.own == 2 * BLOCK).state == "complete"
        [said] = late.find("llama", PROMPT).engines
        assert (said.own, said.state) == (0, "partial")
        publisher.say(publisher.stored(CHUNKS[2:3]), publisher.removed(CHUNKS[1:2]))
        assert until(knowing, lambda said: said.own == BLOCK).state == "complete"
        publisher.say(publisher.cleared())
        until(late, lambda said: said.state == "complete")


def test_lost_events_are_had_again_or_make_the_view_begin_anew(
    store: Store, ports: tuple[int, int], made: Callable[..., Publisher]
) -> None:
    publisher = made(*ports)
    with (
        following(store, address(*ports), publisher) as knowing,
        following(store, address(ports[0]), publisher) as losing,
    ):
        publisher.say(publisher.stored(CHUNKS[:4]))
        for service in (knowing, losing):
            until(service, lambda said: said.own == 4 * BLOCK)
        publisher.lose(publisher.removed(CHUNKS[2:3]))
        publisher.say(publisher.stored(CHUNKS[:1]))
        assert until(knowing, lambda said: said.own == 2 * BLOCK).state == "complete"
        assert until(losing, lambda said: said.own == BLOCK).state == "partial"
        assert (knowing.engines[0].lost, losing.engines[0].lost) == (0, 1)


def test_an_engine_that_does_not_remember_all_is_known_in_part(
    store: Store, ports: tuple[int, int], made: Callable[..., Publisher]
) -> None:
    publisher = made(*ports, buffer_steps=1)
    publisher.say(publisher.stored(CHUNKS[:2]))
    publisher.say(publisher.stored(CHUNKS[:1]))
    with following(store, address(*ports), publisher) as service:
        assert until(service, lambda said: said.own == BLOCK).state == "partial"


def test_an_engine_that_ends_is_gone_and_comes_back_empty(
    store: Store, ports: tuple[int, int], made: Callable[..., Publisher]
) -> None:
    publisher = made(*ports)
    Engine(store).put(CHUNKS[:3])
    with following(store, address(*ports), publisher) as service:
        publisher.say(publisher.stored(CHUNKS[:4]))
        until(service, lambda said: said.own == 4 * BLOCK)
        publisher.close()
        said = until(service, lambda said: said.state == "gone")
        # What the pool has, it would find all the same.
        assert (said.own, said.tokens) == (None, 3 * BLOCK)
        again = made(*ports)
        hears(service, again)
        again.say(again.stored(CHUNKS[:1]))
        assert until(service, lambda said: said.own == BLOCK).state == "complete"


def test_memory_is_bounded(
    store: Store, ports: tuple[int, int], made: Callable[..., Publisher]
) -> None:
    publisher = made(ports[0])
    with following(store, address(ports[0]), publisher, engine_blocks=3) as service:
        publisher.say(publisher.stored(CHUNKS[:5]))
        said = until(service, lambda said: said.own == 3 * BLOCK)
        assert (said.state, service.engines[0].blocks) == ("partial", 3)


def test_what_cannot_be_read_makes_the_view_begin_anew(
    store: Store, ports: tuple[int, int], made: Callable[..., Publisher]
) -> None:
    publisher = made(ports[0])
    with following(store, address(ports[0]), publisher) as service:
        publisher.say(publisher.stored(CHUNKS[:2]))
        until(service, lambda said: said.own == 2 * BLOCK)
        publisher.say({"type": "BlocksForgotten"})
        until(service, lambda said: (said.own, said.state) == (0, "partial"))
        publisher.say(publisher.stored(CHUNKS[:1]))
        until(service, lambda said: said.own == BLOCK)


WRONG_EVENTS: list[dict[str, Any]] = [
    {"block_hashes": [-1]},
    {"block_hashes": [1.5]},
    {"block_size": -1},
    {"block_size": 1 << 63},
    {"group_idx": 1 << 32},
    {"group_idx": -1},
]


@pytest.mark.parametrize("wrong", WRONG_EVENTS)
def test_numbers_out_of_bounds_make_a_batch_unreadable(wrong: dict[str, Any]) -> None:
    import msgspec

    from penstock.lookup.messages import Decoder

    event = {"type": "BlockStored", "block_hashes": [(1 << 64) - 1], "block_size": BLOCK}
    for batch, is_readable in ((event, True), (event | wrong, False)):
        found = Decoder().events(msgspec.msgpack.encode([0.0, [batch]]))
        assert (found is not None) == is_readable


def test_what_events_have_beside_is_not_read() -> None:
    """As vLLM's have since 0.33 where hashes look ahead."""
    import msgspec

    from penstock.lookup.messages import Decoder

    event = {"type": "BlockStored", "block_hashes": [7], "block_size": BLOCK}
    newer = event | {"lookahead_token_ids": [[11]], "session_id": "s"}
    first, second = (
        Decoder().events(msgspec.msgpack.encode([0.0, [each]])) for each in (event, newer)
    )
    assert first is not None
    assert first == second


@given(st.binary(max_size=200) | st.just(b"\x91" * 100_000))
def test_arbitrary_payloads_are_events_or_nothing(payload: bytes) -> None:
    from penstock.lookup.messages import Decoder

    cache = EngineCache(10)
    for event in Decoder().events(payload) or ():
        if event.kind == "stored":
            cache.stored(event.group_idx or 0, event.block_size, event.block_hashes)


def test_messages_that_are_no_batches_are_dropped(
    store: Store, ports: tuple[int, int], made: Callable[..., Publisher]
) -> None:
    publisher = made(ports[0])
    with following(store, address(ports[0]), publisher) as service:
        for parts in ([b""], [b"a"], [b"", b"", b"\x91" * 100], [b"", b"x" * 9, b""]):
            publisher._publisher._pub.send_multipart(parts)
        publisher.say(publisher.stored(CHUNKS[:2]))
        until(service, lambda said: said.own == 2 * BLOCK)
        assert [state.failures for state in service.threads] == [0, 0]


def test_engines_of_other_models_pools_and_block_sizes_are_told_apart(
    store: Store, ports: tuple[int, int], made: Callable[..., Publisher]
) -> None:
    publisher = made(ports[0])
    where = address(ports[0], model="llama-served", pool=store.url)
    Engine(store, "other")
    with following(store, where, publisher) as service:
        assert service.find("other", PROMPT).engines == ()
        publisher.say(publisher.stored(CHUNKS[:2], block_size=2 * BLOCK))
        said = until(service, lambda said: said.own is None)
        assert (said.state, said.tokens) == ("complete", 0)


def test_a_view_of_nobody_is_gone() -> None:
    view = EngineView(EngineAddress("a", "tcp://127.0.0.1:1"), 10)
    assert (view.state.name, view.state.heard) == ("gone", None)


def test_counts_of_equal_blocks_stay_whole() -> None:
    cache = EngineCache(10)
    cache.removed(0, [1])
    cache.stored(0, BLOCK, [1, 1, CHUNKS[0]])
    cache.removed(0, [1])
    assert cache.stats() == (2, False)
    cache.removed(0, [1, 1])
    assert cache.stats() == (1, False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=tcp://h:1", EngineAddress("a", "tcp://h:1")),
        (
            "a=tcp://h:1,replay=tcp://h:2,model=m,pool=valkey://p:3",
            EngineAddress("a", "tcp://h:1", "tcp://h:2", "m", "valkey://p:3"),
        ),
        ("a=ipc:///tmp/x", EngineAddress("a", "ipc:///tmp/x")),
    ],
)
def test_an_address_is_read(text: str, expected: EngineAddress) -> None:
    assert EngineAddress.parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "a", "a=", "=tcp://h:1", "a=h:1", "a=tcp://*:1", "a=http://h:1"),
        *("a=tcp://h:1,x=1", "a=tcp://h:1,model=", "a=tcp://h:1,replay=h"),
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the engine"):
        EngineAddress.parse(text)


def test_names_of_engines_differ(store: Store) -> None:
    one = EngineAddress("a", "tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="same name"):
        Service([store], engines=[one, one])
