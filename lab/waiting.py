"""Waits until something holds. Neither tests nor the laboratory have a loop of their own for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

LIMIT = 120.0
"""Seconds: far more than anything takes here. Only what hangs lasts so long."""

T = TypeVar("T")


def eventually(
    holds: Callable[[], T],
    what: Callable[[], object] | str | None = None,
    *,
    seconds: float = LIMIT,
    pause: float = 0.01,
) -> T:
    """Waits until something holds, and returns it. How long that takes is the machine's business:
    the limit only ends what would hang.

    `what` is shown if it never holds: text, or what a call then returns. `pause` is for a question
    that disturbs whom it asks.

    Raises:
        TimeoutError: it never did.
    """
    until = time.monotonic() + seconds
    while not (found := holds()):
        if time.monotonic() > until:
            raise TimeoutError(_said(holds, what))
        time.sleep(pause)
    return found


async def eventually_async(
    holds: Callable[[], T], what: Callable[[], object] | str | None = None
) -> T:
    """Waits as `eventually` does, while the event loop goes on.

    Raises:
        TimeoutError: it never did.
    """
    until = time.monotonic() + LIMIT
    while not (found := holds()):
        if time.monotonic() > until:
            raise TimeoutError(_said(holds, what))
        await asyncio.sleep(0.01)
    return found


def _said(holds: Callable[[], object], what: Callable[[], object] | str | None) -> str:
    shown = what() if callable(what) else what
    return f"this never came true: {holds if shown is None else shown}"
