"""A pool whose server takes connections and never answers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def silent_pool() -> Iterator[str]:
    """Its URL. At the end, the connections end too."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        yield f"redis://127.0.0.1:{silent.getsockname()[1]}"
