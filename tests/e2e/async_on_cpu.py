"""Asynchronous scheduling on vLLM's CPU build, which switches it off as it gains nothing there.

It is the default on GPUs: a step is scheduled while the one before still runs, and before its tokens
are known. Called in a test's engine before it starts; the engine's other processes are forked from
it.
"""

from __future__ import annotations

from typing import Any


def keep_asynchronous_scheduling() -> None:
    """Leaves asynchronous scheduling as vLLM decides it on other platforms."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def wrapped(cls: Any, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(wrapped)
