"""A short way for look-ups that come in one piece and can be answered at once: nearly all.

uvicorn makes a task and several objects of each request, which takes longer than a look-up. Here a
request that is plain in every way is answered where it is read. Whatever else comes goes uvicorn's
way: it is read again there, and refused there if it has to be.

Whichever way it comes, a connection's place is bounded by `Connections`.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.lookup.http import Application

_BEGINNING = b"POST /lookup HTTP/1.1\r\n"
_NOT_PLAIN = frozenset((b"transfer-encoding", b"expect", b"upgrade"))


class ShortProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with the short way in front. `Application` is what it serves."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection begins."""
        super().connection_made(transport)
        self._application: Application = self.config.app  # type: ignore[assignment]
        self._connections = self._application.connections
        self._place = self._connections.open(transport)
        # Whether what comes next is the beginning of a request.
        self._is_between = True

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._connections.close(self._place)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """uvicorn reads a request."""
        self._is_between = False
        self._connections.expect_head(self._place)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """uvicorn has read a request's headers."""
        if self._is_answered:
            self._connections.expect_body(self._place)
        else:
            # uvicorn reads no body before it has answered the request before.
            self._connections.serve(self._place)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """uvicorn has read a request."""
        self._is_between = True
        super().on_message_complete()
        if self._is_answered:
            self._connections.expect_request(self._place)
        else:
            self._connections.serve(self._place)

    def on_response_complete(self) -> None:
        """A request is answered."""
        if self.pipeline:
            self._connections.serve(self._place)
        elif self._is_between:
            self._connections.expect_request(self._place)
        else:
            self._connections.expect_body(self._place)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client does not read its answer."""
        super().pause_writing()
        self._connections.expect_reading(self._place)

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        if not self._is_answered:
            self._connections.serve(self._place)

    @property
    def _is_answered(self) -> bool:
        """Whether no request waits for its answer."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Answers, or leaves it to uvicorn."""
        if (
            self._is_between
            and data.startswith(_BEGINNING)
            and self._is_answered
            and not (self.flow.write_paused or self.transport.is_closing())
            and (request := _read(data)) is not None
            and (answer := self._application.answer_at_once(*request)) is not None
        ):
            head = [b"HTTP/1.1 200 OK\r\n"]
            for name, value in self.server_state.default_headers:
                head += name, b": ", value, b"\r\n"
            head.append(
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer)
            )
            self.transport.write(b"".join((*head, answer)))
            self.on_response_complete()
            return
        super().data_received(data)


def _read(data: bytes) -> tuple[list[tuple[bytes, bytes]], bytes] | None:
    """Headers and body, if this is one whole request and plain."""
    head, _, body = data.partition(b"\r\n\r\n")
    headers: list[tuple[bytes, bytes]] = []
    length: bytes | None = None
    for line in head[len(_BEGINNING) :].split(b"\r\n"):
        name, sign, value = line.partition(b":")
        name, value = name.lower(), value.strip()
        if not sign or not name.replace(b"-", b"").isalnum() or b"\n" in value or b"\r" in value:
            return None
        if name in _NOT_PLAIN or (name == b"connection" and value.lower() != b"keep-alive"):
            return None
        if name == b"content-length":
            if length is not None:
                return None
            length = value
        headers.append((name, value))
    if length is None or not length.isdigit() or int(length) != len(body):
        return None
    return headers, body
