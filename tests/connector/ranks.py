"""Ranks of a pretended engine: real worker halves with real native engines, over KV memory that is
numpy's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lab.waiting import LIMIT, eventually
from penstock._native import Blocks, TensorView
from penstock.vllm.groups import Group, Groups
from penstock.vllm.messages import BlockJob, StepOrders, WorkerReport
from penstock.vllm.settings import Settings
from penstock.vllm.worker import KvMemory, Services, WorkerFacts, WorkerHalf

BLOCKS, HEADS, TOKENS, CONTENT = 16, 2, 8, 32
"""Of each layer."""
LAYER_BYTES = HEADS * TOKENS * CONTENT
"""Of a block."""
NAMESPACES = (bytes(16), bytes([1] * 16))

FULL = Group(0, "full_attention", TOKENS, None, "uint8", ("0", "1"))
WINDOW = Group(1, "sliding_window", TOKENS, 2 * TOKENS, "uint8", ("2", "3"))


def chunk(number: int) -> bytes:
    return number.to_bytes(4, "little") + bytes(28)


def blocks(*named: tuple[int, int], group: int = 0) -> Blocks:
    """Of pairs: what a block holds, and which it is."""
    return Blocks([(group, block, chunk(n), None) for n, block in named])


def job(number: int, of: Blocks, **more: object) -> BlockJob:
    return BlockJob(number, f"request-{number}", of, timeout=LIMIT, **more)  # type: ignore[arg-type]


class Rank:
    """One rank, and its memory."""

    def __init__(
        self,
        settings: Settings,
        groups: Sequence[Group] = (FULL,),
        layers: Sequence[int] | None = None,
        services: Services | None = None,
        **facts: object,
    ) -> None:
        """With all the groups' layers, or with those of `layers`."""
        of_groups = [[int(name) for name in group.layer_names] for group in groups]
        own = [[n for n in names if layers is None or n in layers] for names in of_groups]
        total = sum(map(len, of_groups))
        self.facts = WorkerFacts(
            groups=Groups(groups),
            num_blocks=BLOCKS,
            layers=total,
            heads=HEADS,
            stages=[(0, total)],
            tensor_ranks=1,
            tokens_per_step=64,
            requests_per_step=4,
        )
        self.facts = replace(self.facts, **facts)  # type: ignore[arg-type]
        first, end = self.facts.own_heads
        shape = (BLOCKS, end - first, TOKENS, CONTENT)
        self.layers = {n: np.zeros(shape, dtype=np.uint8) for names in own for n in names}
        self.half = WorkerHalf(settings, self.facts, services or Services())
        self.half.register(KvMemory([[self._view(n) for n in names] for names in own]))
        self.loaded: set[str] = set()
        self.free: set[str] = set()

    def _view(self, layer: int) -> TensorView:
        memory = self.layers[layer]
        return TensorView(
            layer,
            address=memory.ctypes.data,
            shape=memory.shape,
            strides=memory.strides,
            itemsize=1,
            storage_address=memory.ctypes.data,
            storage_bytes=memory.nbytes,
        )

    def fill(self, block: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for memory in self.layers.values():
            memory[block] = rng.integers(0, 256, memory[block].shape, dtype=np.uint8)

    def block(self, block: int) -> bytes:
        return b"".join(memory[block].tobytes() for memory in self.layers.values())

    def step(self, **orders: object) -> None:
        """One step of the engine, with these orders."""
        namespaces = NAMESPACES[: len(self.facts.groups)]
        step = StepOrders(namespaces=namespaces, **orders)  # type: ignore[arg-type]
        self.half.begin_step(step)
        self.half.start_loads(step)
        self.half.start_stores(step)

    def poll(self) -> WorkerReport:
        free, loaded = self.half.poll()
        self.free |= free
        self.loaded |= loaded
        return self.half.take_report() or WorkerReport()

    def until_over(self, *numbers: int) -> WorkerReport:
        """Steps on until these jobs are over: all that was reported meanwhile."""
        report = WorkerReport()

        def are_over() -> bool:
            report.merge(self.poll())
            return all(
                n in report.stored or n in report.prefetched or f"request-{n}" in self.loaded
                for n in numbers
            )

        eventually(are_over, lambda: report, pause=0.001)
        return report

    def run(self, **orders: object) -> WorkerReport:
        """A step, and all that its jobs report."""
        self.step(**orders)
        jobs = [
            job.job
            for kind in ("stores", "loads", "prefetches")
            for job in orders.get(kind, ())  # type: ignore[attr-defined]
        ]
        return self.until_over(*jobs)

    def counts(self) -> dict[str, int]:
        return self.half.take_counts() or {}
