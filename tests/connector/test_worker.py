"""The worker half beside its engine: what waits for which fence, faults, room for a step."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.waiting import eventually
from penstock._native import Blocks, Descriptor, Engine, Event, Store, TensorView
from penstock.layout.geometry import Geometry
from penstock.vllm.counters import Counters
from penstock.vllm.groups import Group, Groups
from penstock.vllm.host import default_host_bytes, host_blocks, stage_slots, step_blocks
from penstock.vllm.messages import BlockJob, StepOrders
from penstock.vllm.settings import Settings
from penstock.vllm.worker import Services, WorkerFacts, WorkerHalf
from penstock.vllm.worker.jobs import Jobs

NAMESPACE = bytes(16)


class Recorder:
    """Notes what is asked of an engine on a CUDA device, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def name_group(self, group: int, namespace: bytes) -> None:
        pass

    def set_writer(self, writer: int) -> None:
        pass

    def stats(self) -> dict[str, int]:
        return {}

    def raise_fence(self, stream: int, *, cuda_device: int) -> str:
        name = f"fence {sum(call[0] == 'fence' for call in self.calls)}"
        self.calls.append(("fence", stream, cuda_device))
        return name

    def wait_released(self, jobs: list[int], timeout: float) -> bool:
        self.calls.append(("wait", jobs))
        return True

    def submit_load(self, job: int, *_: Any, after: Any, **__: Any) -> None:
        self.calls.append(("load", job, after))

    def submit_store(self, job: int, *_: Any, after: Any, **__: Any) -> None:
        self.calls.append(("store", job, after))


def jobs_of(engine: Any, counters: Counters) -> Jobs:
    return Jobs(engine, counters, whole_loads=False, agrees=lambda adapter: True)


def job(number: int) -> BlockJob:
    return BlockJob(
        job=number,
        request_id=str(number),
        blocks=Blocks([(0, number, bytes(32), None)]),
        timeout=1.0,
    )


@pytest.fixture
def worker() -> tuple[WorkerHalf, Recorder]:
    facts = WorkerFacts(
        groups=Groups([Group(0, "full_attention", 16, None, "", ())]),
        num_blocks=1,
        layers=1,
        heads=1,
        stages=[(0, 1)],
        tensor_ranks=1,
        tokens_per_step=16,
        requests_per_step=1,
    )
    services = Services(current_stream=lambda device: 70 + device)
    half, recorder = WorkerHalf(Settings("memory:"), facts, services), Recorder()
    half._engine, half._cuda_device = recorder, 3  # type: ignore[assignment]
    half._jobs = jobs_of(recorder, Counters())
    return half, recorder


def test_loads_wait_for_what_was_computed_before_their_step_and_stores_for_the_step_itself(
    worker: tuple[WorkerHalf, Recorder],
) -> None:
    half, recorder = worker
    half.begin_step(first := StepOrders(namespaces=(NAMESPACE,), stores=[job(1)]))
    recorder.calls.append(("forward", 1))
    half.start_loads(first)
    half.start_stores(first)
    second = StepOrders(namespaces=(NAMESPACE,), loads=[job(2)], stores=[job(3)], flush=[1])
    half.begin_step(second)
    recorder.calls.append(("forward", 2))
    half.start_loads(second)
    half.start_stores(second)
    assert recorder.calls == [
        ("forward", 1),
        ("fence", 73, 3),
        ("store", 1, "fence 0"),
        # Before the second step computes anything.
        ("fence", 73, 3),
        ("wait", [1]),
        ("forward", 2),
        ("load", 2, "fence 1"),
        ("fence", 73, 3),
        ("store", 3, "fence 2"),
    ]


def test_loads_of_a_step_that_nobody_announced_wait_for_the_step(
    worker: tuple[WorkerHalf, Recorder],
) -> None:
    half, recorder = worker
    half.start_loads(StepOrders(namespaces=(NAMESPACE,), loads=[job(1)]))
    assert recorder.calls == [("fence", 73, 3), ("load", 1, "fence 0")]


def test_host_memory_needs_no_fence(worker: tuple[WorkerHalf, Recorder]) -> None:
    half, recorder = worker
    half._cuda_device = None
    orders = StepOrders(namespaces=(NAMESPACE,), loads=[job(1)], stores=[job(2)])
    half.begin_step(orders)
    half.start_loads(orders)
    half.start_stores(orders)
    assert recorder.calls == [("load", 1, None), ("store", 2, None)]


@pytest.mark.parametrize("says_when_it_is_over", [True, False])
def test_a_step_that_computes_nothing_stores_and_frees_once(
    worker: tuple[WorkerHalf, Recorder], says_when_it_is_over: bool
) -> None:
    half, recorder = worker
    orders = StepOrders(
        namespaces=(NAMESPACE,), computes=False, stores=[job(1)], finished=["1", "2"]
    )
    half.begin_step(orders)
    half.start_loads(orders)
    if says_when_it_is_over:
        half.start_stores(orders)
    assert recorder.calls == [("fence", 73, 3), ("store", 1, "fence 0")]
    assert half._jobs is not None
    assert half._jobs.take_free() == {"2"}


def test_what_failed_in_the_background_is_said_once_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing:
        def stats(self) -> dict[str, int]:
            return {}

        def __init__(self) -> None:
            self.faults = [("4096 bytes of host memory could not be pinned", 4096)]
            self.faults.append(("not measured", 0))

        def take_faults(self) -> list[tuple[str, int]]:
            taken, self.faults = self.faults, []
            return taken

        def poll(self) -> list[object]:
            return []

    counters = Counters()
    jobs = jobs_of(Failing(), counters)
    with caplog.at_level("WARNING", "vllm.penstock"):
        for _ in range(3):
            jobs.poll()
    assert caplog.messages == [
        "Penstock: 4096 bytes of host memory could not be pinned",
        "Penstock: not measured",
    ]
    assert counters.take() == {"unpinned_bytes": 4096}


LAYERS, HEADS, BLOCK_TOKENS = 32, 8, 16
LAYER_BYTES = BLOCK_TOKENS * HEADS * 128 * 2 * 2
"""Llama-3.1-8B in bfloat16: 2 MiB a block of 16 tokens."""


@pytest.mark.parametrize("tokens", [8192, 16384])
def test_a_step_of_a_large_gpu_drops_no_store_by_default(tokens: int, tmp_path: Path) -> None:
    """While the pool stands still: a step's objects all have a slot. They are small here, their
    number is the real one."""
    rank = stage_slots((0, LAYERS), (0, HEADS), LAYER_BYTES, Geometry(None, None, None))
    blocks = step_blocks(tokens, [BLOCK_TOKENS])
    assert (blocks * rank.payload_bytes, rank.per_block) == (tokens * (128 << 10), 1)
    room = default_host_bytes(blocks * rank.bytes_per_block, 512 << 30)
    slots = host_blocks(room, [rank]) * rank.per_block

    layer = np.zeros((blocks, 1, 4, 16), dtype=np.uint8)
    view = TensorView(
        0,
        address=layer.ctypes.data,
        shape=layer.shape,
        strides=layer.strides,
        itemsize=1,
        storage_address=layer.ctypes.data,
        storage_bytes=layer.nbytes,
    )
    descriptor = Descriptor.detect([view])
    with socket.socket() as silent:
        # It takes connections and never answers.
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        store = Store.open(f"redis://127.0.0.1:{silent.getsockname()[1]}")
        engine = Engine(store, slot_bytes=64, slots=slots, step_objects=blocks)
        engine.register(descriptor)
        engine.name_group(0, NAMESPACE)
        hashes = [i.to_bytes(32, "big") for i in range(blocks)]
        engine.submit_store(1, Blocks([(0, i, name, None) for i, name in enumerate(hashes)]))
        eventually(lambda: any(done.event == Event.RELEASED for done in engine.poll()))
        assert engine.stats()["dropped_objects"] == 0
        engine.shutdown(10)
