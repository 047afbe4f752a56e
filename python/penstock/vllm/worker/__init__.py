"""The worker half: a rank's share of the KV cache, its native engine, and its jobs.

It makes no policy decisions, and nothing in it imports vLLM. It gets its knowledge of vLLM as facts
(`facts.py`).
"""

from penstock.vllm.worker.facts import KvMemory, Services, WorkerFacts
from penstock.vllm.worker.half import WorkerHalf
from penstock.vllm.worker.weights import PARTIAL, Reading, Weights

__all__ = ["PARTIAL", "KvMemory", "Reading", "Services", "Weights", "WorkerFacts", "WorkerHalf"]
