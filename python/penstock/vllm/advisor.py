"""The native advisor, with its decisions in the log at debug level.

The advisor watches and answers. The scheduler half acts. The caller gives all times.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from penstock import _native
from penstock._native import Choice, Reach, attended

__all__ = ["ALWAYS", "AUTO", "NEVER", "POLICIES", "Advisor", "Choice", "Reach", "attended"]

logger = logging.getLogger("vllm.penstock")

ALWAYS, NEVER, AUTO = "always", "never", "auto"
POLICIES = (AUTO, ALWAYS, NEVER)
"""Load policies, by the names that the native module knows: load where it is expected to pay,
always, or never."""


class Advisor(_native.Advisor):
    """Learns how long steps and loads take, and advises what to load."""

    def on_end(self, number: int, seconds: float, missing_bytes: int) -> int | None:
        arrived = super().on_end(number, seconds, missing_bytes)
        if arrived is not None:
            logger.debug("Penstock: of a probe %d bytes came in %s s", arrived, seconds)
        return arrived

    def advise(
        self,
        first: int,
        reaches: Sequence[Reach],
        prompt: int,
        policy: str = AUTO,
        *,
        may_check: bool = False,
    ) -> Choice:
        choice = super().advise(first, reaches, prompt, policy, may_check=may_check)
        if policy == AUTO and logger.isEnabledFor(logging.DEBUG):
            loads = (f"to {each.end} {self.load_seconds(each)} s" for each in reaches)
            logger.debug(
                "Penstock: of tokens %d to %d load up to %d: recomputing %s s, loading %s",
                first,
                reaches[-1].end,
                choice.end,
                choice.recompute,
                ", ".join(loads),
            )
        return choice
