"""The scheduler half: decides which blocks to look up, to load and to store."""

from penstock.vllm.scheduler.assemble import scheduler_half
from penstock.vllm.scheduler.half import SchedulerHalf

__all__ = ["SchedulerHalf", "scheduler_half"]
