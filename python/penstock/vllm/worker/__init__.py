"""The worker half: a rank's share of the KV cache, its native engine, and its jobs.

It holds no policy, and nothing in it imports vLLM: what it needs to know comes as facts
(`facts.py`).
"""

from penstock.vllm.worker.facts import KvMemory, Services, View, WorkerFacts
from penstock.vllm.worker.half import WorkerHalf

__all__ = ["KvMemory", "Services", "View", "WorkerFacts", "WorkerHalf"]
