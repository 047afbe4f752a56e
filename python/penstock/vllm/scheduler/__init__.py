"""The scheduler half: decides which blocks to look up, to load and to store. Imports no vLLM."""

from penstock.vllm.scheduler.facts import Arrival, EngineFacts, Step
from penstock.vllm.scheduler.half import SchedulerHalf

__all__ = ["Arrival", "EngineFacts", "SchedulerHalf", "Step"]
