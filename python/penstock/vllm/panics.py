"""Panics of native threads: counted by place, and logged once each with what to do. Failures of
Python's threads, which log themselves, are counted with them."""

from __future__ import annotations

import logging
import threading

from penstock import _native
from penstock.supervised import failures

logger = logging.getLogger("vllm.penstock")

_MOST_LOGGED = 100
"""The most different panics of a process that are logged."""

_lock = threading.Lock()
_taken: dict[str, int] = {}
_logged: set[tuple[str, str]] = set()


def take_panics() -> dict[str, int]:
    """How often each place of this process has panicked since the last call of anybody in it. A
    panic that says something new is logged."""
    new: dict[str, int] = {}
    with _lock:
        of_python = [(place, count, "") for place, count in failures().items()]
        for place, count, last in [*_native.panics(), *of_python]:
            if count == _taken.get(place, 0):
                continue
            new[place] = count - _taken.get(place, 0)
            _taken[place] = count
            if last and (place, last) not in _logged and len(_logged) < _MOST_LOGGED:
                _logged.add((place, last))
                logger.error(
                    "Penstock: the native thread %s panicked: %s. This is a fault of Penstock, not "
                    "of the pool. It cost what the thread was doing, and nothing else. "
                    "Further panics of this kind are counted (vllm:penstock_panics_total). "
                    "Please report it with this line",
                    place,
                    last,
                )
    return new
