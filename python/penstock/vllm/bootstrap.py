"""Answers proxies that ask a prefill engine for its name before they send it requests.

vLLM's proxy for Mooncake asks ``GET /query`` once, and hands what it gets to the decode engine. No
block is got from this address: blocks go through the pool.
"""

from __future__ import annotations

import json
import logging
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from penstock.errors import ConfigError
from penstock.supervised import Threads

logger = logging.getLogger("vllm.penstock")

_PATH = "/query"
_POLL_SECONDS = 1.0


def read_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``.

    >>> read_address("127.0.0.1:8998")
    ('127.0.0.1', 8998)
    >>> read_address("[::1]:8998")
    ('::1', 8998)

    Raises:
        ValueError: it is something else.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError("HOST:PORT, such as 127.0.0.1:8998")
    return host.removeprefix("[").removesuffix("]"), int(port)


class Bootstrap:
    """Answers at an address until it is shut down."""

    def __init__(self, address: str, engine_id: str, ranks: int) -> None:
        """`ranks` is the number of data-parallel ranks, which the proxy takes turns with.

        Raises:
            ConfigError: the address cannot be listened at.
        """
        body = json.dumps(
            {str(rank): {"engine_id": engine_id, "worker_addr": {}} for rank in range(ranks)}
        ).encode()
        try:
            self._server = ThreadingHTTPServer(read_address(address), _handler(body))
        except OSError as error:
            raise ConfigError(
                f"penstock.bootstrap: cannot listen at {address}: {error.strerror}"
            ) from error
        self._server.daemon_threads = True
        self._threads = Threads(logger)
        self._threads.start(
            "penstock-bootstrap",
            lambda _: self._server.serve_forever(_POLL_SECONDS),
            advice="proxies are not answered meanwhile (penstock.bootstrap)",
            wake=self._server.shutdown,
        )

    @property
    def port(self) -> int:
        """The port that it listens at."""
        return self._server.server_port

    def shutdown(self) -> None:
        """Answers no more."""
        self._threads.stop()
        self._server.server_close()


def _handler(body: bytes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            is_known = self.path == _PATH
            self.send_response(200 if is_known else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body) if is_known else 0))
            self.end_headers()
            if is_known:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Engines do not log who asks."""

    return Handler
