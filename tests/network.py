"""A way through a worse network: a proxy on loopback that delays, throttles, stalls and cuts."""

from __future__ import annotations

import asyncio
import contextlib
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
        self._random = random.Random(1)
        self._loop = asyncio.new_event_loop()
        self._is_open = asyncio.Event()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._is_ready = threading.Event()

    def __enter__(self) -> Way:
        self._thread.start()
        assert self._is_ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(10)

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
        await self._is_open.wait()
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.close()
            return
        with contextlib.suppress(asyncio.CancelledError):
            back = self._pump(far_reader, writer, self._count)
            await asyncio.gather(self._pump(reader, far_writer), back)

    def _count(self, nbytes: int) -> None:
        self.came_back += nbytes

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        count: Callable[[int], None] = lambda nbytes: None,
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
                writer.write(data)
                await writer.drain()
                count(len(data))
            writer.close()

        both: list[Callable[[], Awaitable[None]]] = [take, give]
        with contextlib.suppress(OSError):
            await asyncio.gather(*(each() for each in both))
