"""A way through a worse network: a proxy on loopback that delays, throttles, stalls and cuts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Awaitable, Callable

PIECE = 16 << 10
"""Bytes handled at a time; a lost packet holds up one of them."""
QUEUED_BYTES = 4 << 20
"""What the way holds, after which the sender has to wait, as for a full window."""
RETRANSMISSION = 0.2
"""Seconds that a lost packet takes to be sent again: Linux's least."""
LIMIT = 300.0
"""Seconds that a test waits for what certainly comes, on a machine that stands still meanwhile."""


@dataclasses.dataclass
class _Hold:
    """What the server sends is held up after so many bytes of each connection."""

    after: int
    begun: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set when a connection holds something."""
    over: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    is_lost: bool = False
    _came: dict[int, int] = dataclasses.field(default_factory=dict)

    def take(self, connection: int, wanted: int) -> int:
        """How many of so many bytes may come through now."""
        came = self._came.get(connection, 0)
        taken = min(wanted, self.after - came)
        self._came[connection] = came + taken
        return taken


class Way:
    """Forwards connections to a server. What it does to them may be changed at any time.

    A proxy sees no packets: loss is what it looks like from above, a stall now and then.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self.delay = 0.0
        """Seconds each way."""
        self.bytes_per_second: float | None = None
        """Each way."""
        self.loss = 0.0
        """Share of pieces that are held up."""
        self.port = 0
        self.came_back = 0
        """Bytes that the server sent and that came through, of all connections so far."""
        self.opened = 0
        """Connections so far, also those that were opened while the way was cut."""
        self._random = random.Random(1)
        self._loop = asyncio.new_event_loop()
        self._is_open = asyncio.Event()
        self._hold: _Hold | None = None
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._is_ready = threading.Event()

    def __enter__(self) -> Way:
        self._thread.start()
        assert self._is_ready.wait(LIMIT)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(LIMIT)

    def be(self, *, delay: float = 0.0, mbit: float | None = None, loss: float = 0.0) -> None:
        """Becomes such a way; what is not named is as good as it gets."""
        self.delay, self.loss = delay, loss
        self.bytes_per_second = mbit and mbit * 1e6 / 8

    def cut(self) -> None:
        """Nothing comes through any more, and nobody is told."""
        self._loop.call_soon_threadsafe(self._is_open.clear)

    def mend(self) -> None:
        """What was under way comes through after all."""
        self._loop.call_soon_threadsafe(self._is_open.set)

    def hold(self, after: int = 0) -> None:
        """Holds up what the server sends. Each connection lets through `after` more bytes of it,
        and then nothing until `release`. So short replies come, and long ones stop at a known byte.
        What clients send comes through."""
        self._hold = _Hold(after)

    def wait_held(self) -> None:
        """Returns when a reply is held up: from then on it is under way until `release`."""
        assert self._hold is not None
        assert self._hold.begun.wait(LIMIT), "nothing was held up"

    def release(self, *, is_lost: bool = False) -> None:
        """What is held up, if anything is, comes through after all; or else it is lost, and its
        connections end in the middle of a reply."""
        hold = self._hold
        if hold is None:
            return
        hold.is_lost = is_lost

        def end() -> None:
            if self._hold is hold:
                self._hold = None
            hold.over.set()

        self._loop.call_soon_threadsafe(end)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._is_open.set()
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._is_ready.set()
        await self._stopped.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        number = self.opened
        await self._is_open.wait()
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.close()
            return
        with contextlib.suppress(asyncio.CancelledError):

            async def come_back(data: bytes) -> None:
                await self._come_back(number, writer, data)

            async def go(data: bytes) -> None:
                far_writer.write(data)
                await far_writer.drain()

            await asyncio.gather(
                self._pump(reader, far_writer, go), self._pump(far_reader, writer, come_back)
            )

    async def _come_back(self, number: int, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Sends what the server sent to the client, unless it is held up."""
        while data:
            hold = self._hold
            room = len(data) if hold is None else hold.take(number, len(data))
            if hold is not None and not room:
                hold.begun.set()
                await hold.over.wait()
                if hold.is_lost:
                    writer.transport.abort()
                    raise ConnectionAbortedError
                await self._is_open.wait()
                continue
            part, data = data[:room], data[room:]
            writer.write(part)
            await writer.drain()
            self.came_back += len(part)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        send: Callable[[bytes], Awaitable[None]],
    ) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUED_BYTES // PIECE)

        async def take() -> None:
            # A connection that is reset ends like one that is closed.
            with contextlib.suppress(OSError):
                while data := await reader.read(PIECE):
                    await queue.put((time.monotonic() + self.delay, data))
            await queue.put((time.monotonic() + self.delay, b""))

        async def give() -> None:
            free = 0.0
            while True:
                due, data = await queue.get()
                if self._random.random() < self.loss:
                    due += RETRANSMISSION
                if self.bytes_per_second is not None:
                    due = free = max(free, due) + len(data) / self.bytes_per_second
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await self._is_open.wait()
                if not data:
                    break
                await send(data)
            writer.close()

        both: list[Callable[[], Awaitable[None]]] = [take, give]
        with contextlib.suppress(OSError):
            await asyncio.gather(*(each() for each in both))
