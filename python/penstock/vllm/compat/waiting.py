"""How vLLM's processes wait for each other."""

from __future__ import annotations

import functools
from typing import Any

_REST_MILLISECONDS = 5


class _Rest:
    """Whether this process sleeps between messages."""

    on = False


def rest(on: bool) -> None:
    """While `on`, makes this process sleep until the next message between engine core and workers,
    instead of asking its queue over and over.

    vLLM's processes spin on their queues for a second after each message. This saves some
    microseconds in each step. But while all requests wait for loads, it saves nothing and takes a
    core from the loads.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    _Rest.on = on
    wait = SpinCondition.wait
    if hasattr(wait, "__wrapped__"):
        return

    @functools.wraps(wait)
    def wrapped_wait(self: Any, timeout_ms: int | None = None) -> None:
        if _Rest.on:
            # Pretend that the last message came long ago, so that the queue waits for its socket.
            self.last_read = float("-inf")
            timeout_ms = min(_REST_MILLISECONDS, timeout_ms or _REST_MILLISECONDS)
        wait(self, timeout_ms)

    SpinCondition.wait = wrapped_wait
