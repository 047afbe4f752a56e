"""A web server on loopback, for as long as a test needs one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], port: int = 0) -> Iterator[int]:
    """Answers requests by `handler`. Gives the port: a free one, if none is asked for."""
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    # A connection that stays open must not keep the test from ending.
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
