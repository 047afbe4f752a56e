"""A short way for look-ups that come in one piece and can be answered at once: nearly all.

uvicorn makes a task and several objects of each request, which takes longer than a look-up. Here a
request that is plain in every way is answered where it is read. Whatever else comes goes the long
way, to uvicorn's own protocol. It is read again there, and refused there if it has to be.

Whichever way it comes, a connection's place is bounded by `Connections`.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import uvicorn

from penstock.lookup.connections import Connection
from penstock.lookup.framing import Framing, Headers, content_length, read_headers
from penstock.lookup.http import ANSWERED, WHOLE, Application

_BEGINNING = b"POST /lookup HTTP/1.1\r\n"
_NOT_PLAIN = frozenset((b"transfer-encoding", b"expect", b"upgrade"))


class _Turn(enum.Enum):
    """What a connection waits for."""

    REQUEST = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    ANSWER = enum.auto()


class ShortProtocol(asyncio.Protocol):
    """A connection, with the short way in front of `long`: uvicorn's protocol for it.

    All that comes over the connection is handed on but for the requests that are answered here.
    """

    def __init__(self, application: Application, long: asyncio.Protocol) -> None:
        self._application = application
        self._connections = application.connections
        self._long = long
        self._framing = Framing()
        """The requests that went the long way."""
        self._answered = 0
        """How many of them are answered."""
        self._turn = _Turn.HEAD
        self._is_read = True
        """Whether the client reads its answers."""
        self._is_ending = False
        """Whether uvicorn has closed the connection, and the client is to read what is left."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection begins: a head is expected from its first moment on."""
        self._transport = transport
        self._place: Connection = self._connections.open(transport)
        self._long.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._connections.close(self._place)
        self._long.connection_lost(exc)

    def eof_received(self) -> bool | None:
        """The client sends nothing more."""
        return self._long.eof_received()

    def pause_writing(self) -> None:
        """The client does not read its answers."""
        self._is_read = False
        self._connections.expect_reading(self._place)
        self._long.pause_writing()

    def resume_writing(self) -> None:
        """The client has read."""
        self._is_read = True
        self._long.resume_writing()
        if not self._is_ending:
            self._expect(self._turn)

    def data_received(self, data: bytes) -> None:
        """Answers, or hands the bytes on."""
        if (
            not self._is_under_way
            and data.startswith(_BEGINNING)
            and self._is_read
            and not self._transport.is_closing()
            and (request := read_plain(data)) is not None
            and (answer := self._application.answer_at_once(*request)) is not None
        ):
            self._transport.write(_response(answer))
            self._turn = _Turn.REQUEST
            self._connections.expect_request(self._place)
            return
        self._framing.feed(data)
        self._long.data_received(data)
        is_served = self._turn is _Turn.ANSWER
        self._go_on(lost=_Turn.ANSWER if is_served else _Turn.BODY)

    @property
    def _is_under_way(self) -> bool:
        """Whether anything of a request has come that is not answered."""
        framing = self._framing
        return (
            framing.is_lost
            or framing.is_in_head
            or framing.is_in_body
            or framing.whole != self._answered
        )

    def note_body(self) -> None:
        """The application has the whole body of a request that went the long way."""
        self._go_on(lost=_Turn.ANSWER)

    def note_answer(self) -> None:
        """A request that went the long way is answered."""
        self._answered += 1
        self._go_on(lost=_Turn.REQUEST)

    def _go_on(self, *, lost: _Turn) -> None:
        """Sets whose turn it is: `lost`, if no end of a request is seen any more. What trickles in
        puts no deadline off."""
        framing = self._framing
        if self._transport.is_closing():
            # No request is answered any more, and what the client does not read would keep its
            # place for ever.
            if not self._is_ending:
                self._is_ending = True
                self._connections.expect_reading(self._place)
            return
        if framing.is_lost:
            turn = lost
        elif framing.whole > self._answered:
            turn = _Turn.ANSWER
        elif framing.is_in_body:
            turn = _Turn.BODY
        elif framing.is_in_head or self._turn is _Turn.HEAD:
            turn = _Turn.HEAD
        else:
            turn = _Turn.REQUEST
        if turn is not self._turn:
            self._turn = turn
            self._expect(turn)

    def _expect(self, turn: _Turn) -> None:
        if not self._is_read:
            return
        match turn:
            case _Turn.REQUEST:
                self._connections.expect_request(self._place)
            case _Turn.HEAD:
                self._connections.expect_head(self._place)
            case _Turn.BODY:
                self._connections.expect_body(self._place)
            case _Turn.ANSWER:
                self._connections.serve(self._place)


def in_front(application: Application) -> type[ShortProtocol]:
    """The class of the connections of a server, as `uvicorn.Config.http` takes it."""
    own = uvicorn.Config(application, http="httptools", log_config=None, ws="none")
    own.load()
    long: Callable[..., asyncio.Protocol] = own.http_protocol_class

    class InFront(ShortProtocol):
        """A connection of this server, made with whatever uvicorn's own are made with."""

        def __init__(self, *, app_state: dict[str, Any], **of_the_server: Any) -> None:
            state = app_state | {WHOLE: self.note_body, ANSWERED: self.note_answer}
            super().__init__(application, long(app_state=state, **of_the_server))

    return InFront


def read_plain(data: bytes) -> tuple[Headers, bytes] | None:
    """Headers and body, if this is one whole look-up and plain."""
    head, _, body = data.partition(b"\r\n\r\n")
    headers = read_headers(head[len(_BEGINNING) :])
    if headers is None or content_length(headers) != len(body):
        return None
    for name, value in headers:
        if name in _NOT_PLAIN or (name == b"connection" and value.lower() != b"keep-alive"):
            return None
    return headers, body


_date: tuple[int, bytes] = (0, b"")


def _response(answer: bytes) -> bytes:
    global _date
    if (now := int(time.time())) != _date[0]:
        _date = now, formatdate(now, usegmt=True).encode()
    return (
        b"HTTP/1.1 200 OK\r\ndate: %b\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (_date[1], len(answer), answer)
    )
