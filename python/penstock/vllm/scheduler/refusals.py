"""Refusals of hints: counted each time, and logged once for each reason."""

from __future__ import annotations

import logging
from functools import lru_cache

from penstock.vllm.counters import Counters

logger = logging.getLogger("vllm.penstock")


class UnusableHintError(Exception):
    """A hint that is not followed, and why."""


def refuse(counters: Counters, name: str, reason: str) -> None:
    """Counts a hint that is not followed, and logs why."""
    counters.count("hints_refused")
    warn(name, reason)


@lru_cache(maxsize=64)
def warn(name: str, reason: str) -> None:
    """Logs why a hint is not followed. Once for each reason: a client may send such with every
    request."""
    logger.warning("Penstock: a request's hint %s is not followed: %s", name, reason)
