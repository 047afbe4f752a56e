"""Connections that ask nothing: each keeps its place for a bounded time, and all of them together
never keep others out."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from lab.pretended import Engine
from lab.waiting import LIMIT, eventually_async
from penstock._native import Store
from penstock.lookup import Service
from penstock.lookup.connections import Connections, Patience
from penstock.lookup.http import Application
from penstock.lookup.service import Limits
from penstock.lookup.short import ShortProtocol, in_front
from penstock.lookup.tokenizing import Tokenizers
from tests.lookup.test_http import BODY, CHUNKED, PLAIN, WHOLE, Frozen, Running

PATIENCE = Patience(head_seconds=10.0, body_seconds=20.0, idle_seconds=30.0, connections=16)
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
WAITS = PLAIN + b"Expect: 100-continue\r\n\r\n"
CONTINUES = b"HTTP/1.1 100 Continue\r\n\r\n"


class Client:
    """A connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def status(self, skip: int | None = None) -> int:
        """The status of the next answer that is not the one to `skip`, which has no body."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), LIMIT)
        if skip is not None and head.startswith(b"HTTP/1.1 %d " % skip):
            return await self.status()
        lines = head.lower().split(b"\r\n")
        [length] = [line for line in lines if line.startswith(b"content-length:")]
        await asyncio.wait_for(self.reader.readexactly(int(length.split(b":")[1])), LIMIT)
        return int(head.split(b" ", 2)[1])

    async def ask(self, request: bytes = HEALTH) -> int:
        await self.send(request)
        return await self.status()

    async def is_closed(self) -> bool:
        """Returns once the server has ended the connection."""
        with contextlib.suppress(ConnectionError):
            while await asyncio.wait_for(self.reader.read(1 << 16), LIMIT):
                pass
        return True


class Place:
    """A server in this event loop, whose connections are timed by the test."""

    def __init__(self, service: Any) -> None:
        self.now = 0.0
        self.connections = Connections(PATIENCE, lambda: self.now)
        # Bodies are timed by the connections alone.
        limits = Limits(body_seconds=100 * LIMIT)
        self.application = Application(
            service, Tokenizers({}), limits=limits, connections=self.connections
        )
        self.state = ServerState()
        self.made: list[ShortProtocol] = []
        self.port = 0

    async def listen(self) -> asyncio.Server:
        # Nothing but the test's clock ends a connection.
        config = uvicorn.Config(
            self.application, log_config=None, ws="none", timeout_keep_alive=int(100 * LIMIT)
        )
        config.load()
        protocol = in_front(self.application)

        def make() -> ShortProtocol:
            self.made.append(protocol(config=config, server_state=self.state, app_state={}))
            return self.made[-1]

        self.make = make
        server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def connect(self, host: str = "127.0.0.1") -> Client:
        """A client, once the server knows of it."""
        made = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(host, 0))
        name = made[1].get_extra_info("sockname")
        await eventually_async(
            lambda: any(
                each.transport.get_extra_info("peername") == name for each in self.connections._open
            )
        )
        return Client(*made)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.connections.sweep()


def serving(
    test: Callable[[Place], Awaitable[None]], wrap: Callable[[Any], Any] = lambda s: s
) -> None:
    """Runs a test beside a server."""
    store = Store.open("memory://?size=16MiB")
    Engine(store)
    with Service([store]) as service:

        async def run() -> None:
            place = Place(wrap(service))
            server = await place.listen()
            await test(place)
            for each in list(place.state.connections):
                each.transport.abort()
            server.close()

        asyncio.run(run())


def test_who_asks_nothing_is_closed() -> None:
    async def test(place: Place) -> None:
        silent, other = await place.connect(), await place.connect()
        place.pass_time(9.9)
        assert await other.ask() == 200
        place.pass_time(0.2)
        assert await silent.is_closed()
        # Between two requests there is more time, and each request gives it anew.
        for _ in range(3):
            place.pass_time(29.0)
            assert await other.ask(WHOLE) == 200
        place.pass_time(30.1)
        assert await other.is_closed()
        await eventually_async(lambda: len(place.connections) == 0)

    serving(test)


@pytest.mark.parametrize("first", [b"", HEALTH])
@pytest.mark.parametrize("byte", [b"\r\n", b"G"], ids=["empty line", "letter"])
def test_bytes_that_trickle_in_put_nothing_off(first: bytes, byte: bytes) -> None:
    async def test(place: Place) -> None:
        client = await place.connect()
        if first:
            assert await client.ask(first) == 200
        with contextlib.suppress(ConnectionError):
            for _ in range(8):
                await client.send(byte)
                place.pass_time(5.0)
        assert await client.is_closed()

    serving(test)


def test_a_body_has_its_time_and_no_more() -> None:
    async def test(place: Place) -> None:
        slow, never = await place.connect(), await place.connect()
        for client in (slow, never):
            await client.send(WAITS)
            # The server waits for the body from here on.
            assert await client.reader.readexactly(len(CONTINUES)) == CONTINUES
        place.pass_time(19.9)
        assert await slow.ask(BODY) == 200
        place.pass_time(0.2)
        assert await never.is_closed()

    serving(test)


def test_the_rest_of_a_refused_request_has_its_time_and_no_more() -> None:
    async def test(place: Place) -> None:
        client = await place.connect()
        assert await client.ask(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n") == 404
        place.pass_time(19.9)
        await client.send(b"123456789")
        assert await client.ask() == 200
        assert await client.ask(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n") == 404
        with contextlib.suppress(ConnectionError):
            for _ in range(8):
                await client.send(b"1")
                place.pass_time(5.0)
        assert await client.is_closed()

    serving(test)


@pytest.mark.parametrize(
    "long", [HEALTH, WAITS + BODY, WHOLE + WHOLE], ids=["no look-up", "it waits", "two at once"]
)
def test_the_short_way_is_open_again_after_the_long_one(
    long: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once: list[bytes] = []
    answer_at_once = Application.answer_at_once

    def noted(self: Application, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes | None:
        at_once.append(body)
        return answer_at_once(self, headers, body)

    monkeypatch.setattr(Application, "answer_at_once", noted)

    async def test(place: Place) -> None:
        client = await place.connect()
        await client.send(long)
        for _ in range(2 if long == WHOLE + WHOLE else 1):
            assert await client.status(skip=100) == 200
        assert at_once == []
        assert await client.ask(WHOLE) == 200
        assert at_once == [BODY]

    serving(test)


UNKNOWN = WHOLE.replace(b"llama", b"other")
ANSWERS = {
    WHOLE: 200,
    HEALTH: 200,
    CHUNKED: 200,
    WAITS + BODY: 200,
    UNKNOWN: 404,
    # A body is no request, whatever it looks like, and whether anybody reads it.
    b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE: 404,
    b"GET /lookup HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(HEALTH) + HEALTH: 405,
    PLAIN + b"X_y: z\r\n\r\n" + BODY: 200,
}


def test_answers_come_in_the_order_of_the_requests_however_these_come() -> None:
    async def test(place: Place) -> None:
        for seed in range(200):
            rng = random.Random(seed)
            asked = rng.choices(list(ANSWERS), k=rng.randrange(1, 9))
            sent = b"".join(asked)
            cuts = sorted(rng.randrange(len(sent)) for _ in range(rng.randrange(6)))
            client = await place.connect()
            for begin, end in pairwise([0, *cuts, len(sent)]):
                await client.send(sent[begin:end])
                # The server may read in between, or may not.
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
            expected = [ANSWERS[request] for request in asked]
            assert [await client.status(skip=100) for _ in asked] == expected, seed
            client.writer.close()
        await eventually_async(lambda: len(place.connections) == 0)

    serving(test)


def test_a_request_of_unknown_length_has_its_time_and_no_more() -> None:
    async def test(place: Place) -> None:
        client = await place.connect()
        assert await client.ask(CHUNKED) == 200
        place.pass_time(29.0)
        with contextlib.suppress(ConnectionError):
            for byte in CHUNKED[:8]:
                await client.send(bytes([byte]))
                place.pass_time(5.0)
        assert await client.is_closed()

    serving(test)


@pytest.mark.parametrize(
    "last",
    [HEALTH[:-2] + b"Connection: close\r\n\r\n" + HEALTH, HEALTH[:-2] + b"A: \x00\r\n\r\n"],
    ids=["it asks for the end", "it is refused"],
)
def test_who_does_not_read_the_last_answer_is_closed(last: bytes) -> None:
    class Unread:
        """A connection whose client reads nothing: it is closing until it is aborted."""

        def __init__(self) -> None:
            self.is_aborted = self._is_closing = False

        def is_closing(self) -> bool:
            return self._is_closing

        def close(self) -> None:
            self._is_closing = True

        def abort(self) -> None:
            self.is_aborted = True

        def get_extra_info(self, _name: str) -> None:
            return None

        def write(self, _data: bytes) -> None:
            pass

        def pause_reading(self) -> None:
            pass

        resume_reading = pause_reading

    async def test(place: Place) -> None:
        protocol, transport = place.make(), Unread()
        protocol.connection_made(transport)
        protocol.data_received(last)
        await eventually_async(transport.is_closing)
        await eventually_async(lambda: protocol._is_ending)
        place.pass_time(30.1)
        assert transport.is_aborted
        protocol.connection_lost(None)

    serving(test)


@pytest.mark.parametrize(
    ("request_text", "body"),
    [(WAITS, BODY), (CHUNKED[:-5], b"0\r\n\r\n")],
    ids=["of known length", "of unknown length"],
)
def test_who_waits_for_an_answer_is_never_closed(request_text: bytes, body: bytes) -> None:
    frozen: list[Frozen] = []

    def freeze(service: Service) -> Frozen:
        frozen.append(Frozen(service))
        return frozen[0]

    async def test(place: Place) -> None:
        client = await place.connect()
        # Not the short way, which does not wait.
        await client.send(request_text)
        if request_text == WAITS:
            assert await client.reader.readexactly(len(CONTINUES)) == CONTINUES
        await client.send(body)
        place_of = next(iter(place.connections._open))
        await eventually_async(lambda: place_of.deadline is None)
        place.pass_time(1e6)
        frozen[0].gate.set()
        assert await client.status() == 200

    serving(test, freeze)


def test_who_does_not_read_is_closed() -> None:
    async def test(place: Place) -> None:
        client = await place.connect()
        [protocol] = place.made
        assert await client.ask() == 200
        # What the event loop does when a client's answers pile up, and when they do no more.
        protocol.pause_writing()
        place.pass_time(29.0)
        protocol.resume_writing()
        assert await client.ask() == 200
        protocol.pause_writing()
        place.pass_time(30.1)
        assert await client.is_closed()

    serving(test)


def test_however_many_ask_nothing_another_is_answered() -> None:
    async def test(place: Place) -> None:
        idle = [await place.connect() for _ in range(40)]
        assert len(place.connections) == PATIENCE.connections
        assert await (await place.connect()).ask() == 200
        # Those that have waited longest have made room.
        for client in idle[:24]:
            assert await client.is_closed()
        assert await idle[-1].ask() == 200

    serving(test)


def test_the_client_that_has_most_makes_room() -> None:
    async def test(place: Place) -> None:
        quiet = await place.connect("127.0.0.2")
        for _ in range(40):
            await place.connect("127.0.0.3")
        assert await quiet.ask() == 200

    serving(test)


@pytest.mark.long
def test_the_service_closes_who_asks_nothing(tmp_path: Path) -> None:
    with Running(f"file://{tmp_path}/pool?size=16MiB") as running:
        port = int(running.said["url"].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=10 * LIMIT) as connection:
            assert connection.recv(1) == b""
