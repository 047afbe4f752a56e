"""How vLLM's processes wait for each other."""

from __future__ import annotations

import functools
from typing import Any

_REST_MILLISECONDS = 5


class _Rest:
    """Whether this process has nothing to hurry for."""

    on = False


def rest(on: bool) -> None:
    """Has this process sleep until the next message between engine core and workers, while `on`,
    instead of asking its queue over and over.

    vLLM's processes spin on their queues for a second after each message, which saves some
    microseconds a step. While all requests wait for loads that takes a core from the loads and
    saves nothing.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    _Rest.on = on
    wait = SpinCondition.wait
    if hasattr(wait, "__wrapped__"):
        return

    @functools.wraps(wait)
    def wrapped_wait(self: Any, timeout_ms: int | None = None) -> None:
        if _Rest.on:
            # As if the last message had come long ago: the queue then waits for its socket.
            self.last_read = float("-inf")
            timeout_ms = min(_REST_MILLISECONDS, timeout_ms or _REST_MILLISECONDS)
        wait(self, timeout_ms)

    SpinCondition.wait = wrapped_wait
