"""What engines have in their own caches, from the KV events that they publish.

A view lasts as long as the connection to the engine. It begins with nothing; the engine's replay
endpoint, if there is one, tells what came before. If events are lost and cannot be had again, the
view begins anew: what it has from then on is in the engine's cache, but not all that is.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from penstock._native import EngineCache, PromptPrefix
from penstock.errors import ConfigError
from penstock.lookup.models import Model
from penstock.supervised import Running, Threads, ThreadState

if TYPE_CHECKING:
    from penstock.lookup.messages import Decoder

logger = logging.getLogger("penstock.lookup")

_HEARTBEAT_MS = 1000
_SILENT_MS = 3000
"""An engine's machine or process that does not answer a heartbeat for so long counts as gone."""
_POLL_MS = 500
_REPLAY_SECONDS = 2.0
"""The longest that an engine may be silent while it tells again what was lost."""
_WAITING_BATCHES = 100_000
"""Batches that may wait to be read; vLLM's own default."""
_NUMBER_BYTES = 8
"""Bytes of a batch's number."""
_OWN = (None, "GPU")
"""Media of vLLM's own cache. `AllBlocksCleared` speaks of no other; what is in storage, pools are
asked for."""


@dataclass(frozen=True)
class EngineAddress:
    """An engine, and where it publishes its KV events."""

    name: str
    events: str
    """vLLM's `endpoint`, as tcp://HOST:PORT."""
    replay: str | None = None
    """vLLM's `replay_endpoint`: there it tells again what was lost."""
    model: str | None = None
    """The model that it serves, by any of its names; None if all engines serve the same."""
    pool: str | None = None
    """The URL of its pool, as answers have it; None for the one that has the most."""

    _PARTS: ClassVar = ("replay", "model", "pool")

    @classmethod
    def parse(cls, text: str) -> EngineAddress:
        """Reads ``NAME=ENDPOINT[,replay=ENDPOINT][,model=NAME][,pool=URL]``.

        Raises:
            ConfigError: it is no such text.
        """
        name, sign, rest = text.partition("=")
        events, *others = rest.split(",")
        made = cls(name, events)
        for other in others:
            part, _, value = other.partition("=")
            if part not in cls._PARTS or not value:
                raise ConfigError(
                    f"the engine {text!r}: after the endpoint come {', '.join(cls._PARTS)}, each "
                    "as PART=VALUE"
                )
            made = replace(made, **{part: value})
        if not (name and sign and all(_is_endpoint(at) for at in (events, made.replay or events))):
            raise ConfigError(
                f"the engine {text!r}: write NAME=tcp://HOST:PORT, the endpoint of its KV events"
            )
        return made


def _is_endpoint(text: str) -> bool:
    scheme, sign, rest = text.partition("://")
    return bool(sign and rest) and scheme in ("tcp", "ipc") and "*" not in rest


@dataclass(frozen=True)
class State:
    """How much a view is worth."""

    name: str
    """`complete`, `partial` or `gone`."""
    heard: float | None
    """Seconds since the engine told something; None if it never did."""


class EngineView:
    """What one engine has, as far as it has told."""

    def __init__(self, address: EngineAddress, blocks: int) -> None:
        self.address = address
        self._cache = EngineCache(blocks)
        self._next: int | None = None
        """The number of the batch that comes next; None if any may."""
        self._is_connected = False
        self._is_whole = False
        self._heard: float | None = None
        self.lost = 0
        """How often events were lost for good."""

    def tokens(self, model: Model, prefix: PromptPrefix) -> int | None:
        """The tokens that the engine would find in its own cache; None if that is not known."""
        if not self._is_connected:
            return None
        return self._cache.tokens(model.variant, model.groups, prefix)

    @property
    def state(self) -> State:
        """How much the view is worth."""
        heard = None if self._heard is None else time.monotonic() - self._heard
        if not self._is_connected:
            return State("gone", heard)
        is_complete = self._is_whole and not self._cache.stats()[1]
        return State("complete" if is_complete else "partial", heard)

    @property
    def blocks(self) -> int:
        """Blocks that the view has."""
        return self._cache.stats()[0]

    def connect(self) -> None:
        """The engine can be heard from now on. What it said before may not hold any more."""
        self._begin(None)
        self._is_connected = True

    def disconnect(self) -> None:
        """The engine cannot be heard."""
        self._begin(None)
        self._is_connected = False

    def _begin(self, number: int | None) -> None:
        """Forgets all; the batch of this number comes next."""
        self._cache.clear()
        self._next = number
        self._is_whole = False

    def missing(self, number: int) -> int | None:
        """The first of the batches that should have come before this one; None if none is."""
        if self._next is None:
            return 0 if number > 0 else None
        return self._next if number > self._next else None

    def lose(self) -> None:
        """What is missing cannot be had again: removals may be among it."""
        self.lost += self._next is not None
        self._begin(None)

    def nothing_before(self) -> None:
        """The engine has told nothing yet."""
        self._is_whole, self._next = True, 0

    def take(self, number: int, events: Iterable[Any]) -> None:
        """A batch of events."""
        if self._next is not None and number < self._next:
            if number > 0:
                # It came twice: as it was published, and again as it was asked for.
                return
            # The engine was started anew, faster than its connection was seen to end.
            self._begin(0)
        if number == 0:
            self._begin(0)
            self._is_whole = True
        self._next = number + 1
        self._heard = time.monotonic()
        for event in events:
            if event.kind == "cleared":
                self._cache.clear()
                self._is_whole = True
            elif event.medium in _OWN:
                group = event.group_idx or 0
                if event.kind == "stored":
                    self._cache.stored(group, event.block_size, event.block_hashes)
                else:
                    self._cache.removed(group, event.block_hashes)


class Followers:
    """Follows engines, each by a thread of its own: a slow one holds up no other."""

    def __init__(self, addresses: Sequence[EngineAddress], blocks: int) -> None:
        """`blocks` is the most blocks that are remembered of each engine.

        Raises:
            ConfigError: two engines have the same name, or something is not installed.
        """
        names = [address.name for address in addresses]
        if len(set(names)) < len(names):
            raise ConfigError(f"two engines have the same name: {', '.join(sorted(names))}")
        self.views = [EngineView(address, blocks) for address in addresses]
        self._threads = Threads(logger)
        self._context: Any = None
        if not addresses:
            return
        try:
            import zmq

            from penstock.lookup.messages import Decoder
        except ImportError as error:
            raise ConfigError(
                f"engines cannot be followed: {error.name} is not installed; "
                "pip install 'penstock[lookup]'"
            ) from None
        self._context = zmq.Context()
        for view in self.views:
            self._threads.start(
                f"penstock-lookup-{view.address.name}",
                partial(self._follow, view, Decoder()),
                advice="Until then, what the engine has in its own cache is not known. See that "
                "its KV events are those of vLLM.",
            )

    def close(self) -> None:
        """Ends the threads."""
        self._threads.stop()
        if self._context is not None:
            self._context.term()

    @property
    def threads(self) -> list[ThreadState]:
        """How the threads are."""
        return self._threads.states()

    def _follow(self, view: EngineView, decoder: Decoder, running: Running) -> None:
        try:
            with _Following(self._context, view, decoder, running) as following:
                following.run()
        finally:
            # What it would still say of the engine would be older and older.
            view.disconnect()


class _Following:
    """The connection to one engine. Of one thread."""

    def __init__(self, context: Any, view: EngineView, decoder: Decoder, running: Running) -> None:
        import zmq

        self._zmq = zmq
        self._context, self._view, self._decoder = context, view, decoder
        self._running = running
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, _WAITING_BATCHES)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        kinds = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = self._socket.get_monitor_socket(kinds)

    def __enter__(self) -> _Following:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.disable_monitor()
        self._socket.close(0)

    def run(self) -> None:
        """Reads what comes, until the end."""
        self._socket.connect(self._view.address.events)
        poller = self._zmq.Poller()
        poller.register(self._monitor, self._zmq.POLLIN)
        poller.register(self._socket, self._zmq.POLLIN)
        while not self._running.stopping.is_set():
            ready = dict(poller.poll(_POLL_MS))
            if self._monitor in ready:
                self._read_monitor()
            if self._socket in ready:
                with contextlib.suppress(self._zmq.Again):
                    self._take(self._socket.recv_multipart(self._zmq.NOBLOCK)[-2:])

    def _read_monitor(self) -> None:
        from zmq.utils.monitor import recv_monitor_message

        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            name = self._view.address.name
            if event == self._zmq.EVENT_DISCONNECTED:
                self._view.disconnect()
                self._drop()
                logger.warning("the engine %s cannot be heard any more", name)
            else:
                self._view.connect()
                logger.info("the engine %s is followed", name)
                if self._view.address.replay is not None and not self._replay(0):
                    logger.warning("the engine %s does not tell what came before", name)
                self._running.progressed()

    def _take(self, parts: Sequence[bytes]) -> None:
        """A batch as it is published: its number and its events. Anything else that comes is
        dropped: it is not vLLM's."""
        if not _is_batch(parts):
            logger.debug("the engine %s published what is no batch", self._view.address.name)
            return
        number = int.from_bytes(parts[0], "big")
        first = self._view.missing(number)
        if first is not None and self._view.address.replay is not None and self._replay(first):
            first = self._view.missing(number)
        if first is not None:
            if first > 0:
                name = self._view.address.name
                logger.warning("events %s to %s of the engine %s are lost", first, number - 1, name)
            self._view.lose()
        self._understand(number, parts[1])

    def _understand(self, number: int, payload: bytes) -> None:
        events = self._decoder.events(payload)
        if events is None:
            name = self._view.address.name
            logger.warning("batch %s of the engine %s cannot be read", number, name)
            self._view.lose()
        self._view.take(number, events or ())
        self._running.progressed()

    def _drop(self) -> None:
        """Drops what has come of a connection that ended: its numbers mean nothing to the next."""
        with contextlib.suppress(self._zmq.Again):
            while True:
                self._socket.recv_multipart(self._zmq.NOBLOCK)

    def _replay(self, first: int) -> bool:
        """Asks the engine to tell again what it told from a batch on. Whether it answered."""
        zmq, view = self._zmq, self._view
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(view.address.replay)
            socket.send_multipart((b"", first.to_bytes(8, "big")))
            is_first = True
            for number, payload in self._answers(socket):
                if number < 0:
                    if is_first and first == 0:
                        view.nothing_before()
                    return True
                if is_first and number > first:
                    # The engine does not remember all of it.
                    view.lose()
                is_first = False
                self._understand(number, payload)
        return False

    def _answers(self, socket: Any) -> Iterator[tuple[int, bytes]]:
        """What the engine tells again: the numbers of batches, and the batches; at the end, -1."""
        end = time.monotonic() + _REPLAY_SECONDS
        while not self._running.stopping.is_set() and (left := end - time.monotonic()) > 0:
            if socket.poll(min(left * 1e3, _POLL_MS)):
                parts = socket.recv_multipart()[-2:]
                if not _is_batch(parts):
                    return
                end = time.monotonic() + _REPLAY_SECONDS
                yield int.from_bytes(parts[0], "big", signed=True), parts[1]


def _is_batch(parts: Sequence[bytes]) -> bool:
    """Whether these are a number of eight bytes and a payload."""
    return len(parts) == 2 and len(parts[0]) == _NUMBER_BYTES
