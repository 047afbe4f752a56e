"""Asynchronous scheduling on vLLM's CPU build, which switches it off as it gains nothing there.

It is the default on GPUs: a step is scheduled while the one before still runs, and before its
tokens are known. Called in a test's engine before it starts; the engine's other processes are
forked from it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from lab.engines.forks import AHEAD

ASYNCHRONOUS: dict[str, Any] = {"prepare": AHEAD}
"""Options of a node with asynchronous scheduling."""
RUNS_AHEAD = "steps are scheduled ahead"
"""What its log says then, before it serves."""


def keep_asynchronous_scheduling() -> None:
    """Leaves asynchronous scheduling as vLLM decides it on other platforms, and has the engine core
    say whether it has it."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.engine.core import EngineCore

    check, start = CpuPlatform.check_and_update_config.__func__, EngineCore.__init__

    def checked(cls: Any, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    @functools.wraps(start)
    def started(self: Any, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        if self.batch_queue_size > 1:
            print(RUNS_AHEAD, file=sys.stderr, flush=True)

    CpuPlatform.check_and_update_config = classmethod(checked)
    EngineCore.__init__ = started
