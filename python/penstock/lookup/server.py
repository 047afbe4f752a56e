"""Runs the HTTP server until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError
from penstock.lookup.http import Application

_KEEP_ALIVE_SECONDS = 24 * 3600
"""uvicorn's own limit of an idle connection, which sees only requests that go the long way.
`Connections` ends idle connections."""
_TICKS_A_SWEEP = 10
"""uvicorn ticks ten times a second."""
_SWITCH_SECONDS = 0.0002
"""The longest that one of the process's threads may keep the others from Python."""
_GRACE_SECONDS = 5
"""At the end, requests under way have so long."""


@dataclass(frozen=True)
class Address:
    """Where a server listens, and with which certificate."""

    host: str
    port: int
    """0: any free one."""
    certificate: Path | None = None
    key: Path | None = None

    @property
    def is_loopback(self) -> bool:
        """Whether this machine alone can reach it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def serve(
    application: Application, address: Address, ready: Callable[[str], None]
) -> signal.Signals | None:
    """Serves until SIGTERM or SIGINT, and returns which it was. Requests under way are answered.
    Calls `ready` with the server's URL once it listens.

    Raises:
        ConfigError: the address, the certificate or the key cannot be used.
    """
    import uvicorn

    from penstock.lookup.short import in_front

    scheme = "http" if address.certificate is None else "https"
    if address.certificate is not None:
        _check_certificate(address)
    listener = _listen(address)
    with listener:
        config = uvicorn.Config(
            application,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            http=in_front(application),
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            ssl_certfile=address.certificate,
            ssl_keyfile=address.key,
        )

        class Server(uvicorn.Server):
            """Ends at a signal, and does not raise it again."""

            ended_by: signal.Signals | None = None

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                loop = asyncio.get_running_loop()
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.add_signal_handler(number, self._end, number)
                yield

            def _end(self, number: signal.Signals) -> None:
                self.ended_by = number
                self.should_exit = True

            async def on_tick(self, counter: int) -> bool:
                if counter % _TICKS_A_SWEEP == 0:
                    application.connections.sweep()
                return await super().on_tick(counter)

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                host, port = listener.getsockname()[:2]
                shown = f"[{host}]" if ":" in host else host
                ready(f"{scheme}://{shown}:{port}")

        # A thread that comes back with a pool's answer must not wait until many requests are read.
        sys.setswitchinterval(_SWITCH_SECONDS)
        server = Server(config)
        server.run(sockets=[listener])
        return server.ended_by


def _listen(address: Address) -> socket.socket:
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, place = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {address.host}:{address.port}: {error.strerror or error}; "
            "choose another (--host, --port)"
        ) from None
    return listener


def _check_certificate(address: Address) -> None:
    """Raises:
    ConfigError: no server can use the files.
    """
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(address.certificate or "", address.key)
    except OSError as error:
        what = "they are no PEM files that belong together"
        if not isinstance(error, ssl.SSLError):
            what = f"{error.strerror}; name other files"
        raise ConfigError(
            f"the certificate {address.certificate} and the key {address.key} cannot be used: "
            f"{what}"
        ) from None
