"""The connections of one server, and how long each may keep a place without asking anything.

Whoever connects takes a descriptor of this process before any token is asked for. So a connection
on which the client is due has a deadline, which no byte that trickles in puts off. There is a bound
on their number, too: beyond it, who has waited longest makes room, of the client that has most.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger("penstock.lookup")

_RESERVED = 128
"""Descriptors of the process that are not for connections: pools, engines, files."""
_LEAST = 16


@dataclass(frozen=True)
class Patience:
    """Bounds of a server's connections. Times are seconds."""

    head_seconds: float = 10.0
    """The longest from a connection's beginning, or from a request's first byte, to the end of the
    request's headers."""
    body_seconds: float = 20.0
    """The longest from there to the end of its body. Look-ups are refused earlier, in words."""
    idle_seconds: float = 35.0
    """The longest between two requests."""
    connections: int = 1024
    """Connections at the same time; fewer where the process may have fewer descriptors."""


class Connection:
    """One connection."""

    def __init__(self, transport: asyncio.Transport, host: str) -> None:
        self.transport = transport
        self.host = host
        """The client's address; a proxy's clients have one together."""
        self.since = 0.0
        """When the client was last seen to do its part."""
        self.deadline: float | None = None
        """When the client must have done its next part; None while it waits for this server."""


class Connections:
    """All connections of one server. Belongs to its event loop."""

    def __init__(self, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._most = max(_LEAST, min(patience.connections, _descriptors() - _RESERVED))
        self._open: dict[Connection, None] = {}
        """In the order in which they were made."""
        self._is_told = False

    def __len__(self) -> int:
        return len(self._open)

    def open(self, transport: asyncio.Transport) -> Connection:
        """A connection has been made. Another one may be closed for it, or it itself."""
        peer = transport.get_extra_info("peername")
        made = Connection(transport, str(peer[0]) if isinstance(peer, tuple) else "")
        self._open[made] = None
        self.expect_head(made)
        if len(self._open) > self._most:
            self._make_room(made)
        return made

    def close(self, connection: Connection) -> None:
        """The connection is over."""
        self._open.pop(connection, None)

    def expect_head(self, connection: Connection) -> None:
        """The client has to send a request's headers."""
        self._expect(connection, self._patience.head_seconds)

    def expect_body(self, connection: Connection) -> None:
        """The client has to send the rest of a request."""
        self._expect(connection, self._patience.body_seconds)

    def expect_request(self, connection: Connection) -> None:
        """The client has its answer, and may send another request."""
        self._expect(connection, self._patience.idle_seconds)

    def serve(self, connection: Connection) -> None:
        """The client has sent a whole request, and waits for the answer."""
        connection.deadline = None

    def expect_reading(self, connection: Connection) -> None:
        """The client has to read what it was sent."""
        self._expect(connection, self._patience.idle_seconds)

    def _expect(self, connection: Connection, seconds: float) -> None:
        connection.since = self._clock()
        connection.deadline = connection.since + seconds

    def sweep(self) -> None:
        """Closes the connections whose clients have not done their part in time."""
        now = self._clock()
        for connection in list(self._open):
            if connection.deadline is not None and now >= connection.deadline:
                self._abort(connection)

    def _make_room(self, new: Connection) -> None:
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "more than %s connections: those that ask nothing are closed from now on",
                self._most,
            )
        due = [each for each in self._open if each.deadline is not None]
        counts = Counter(each.host for each in self._open)
        # The new one is among them, and so there is one.
        longest = min(due, key=lambda each: (-counts[each.host], each.since, each is new))
        self._abort(longest)

    def _abort(self, connection: Connection) -> None:
        # Not `close`: that waits for a client that does not read.
        self._open.pop(connection, None)
        connection.transport.abort()


def _descriptors() -> int:
    """How many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
