"""Turns the scheduler half's orders into engine jobs and reports them, callback by callback.

No call waits for I/O while there is anything to compute. Two calls of a step may wait:

- `begin_step` waits for copies in progress (at memory speed) if vLLM is about to overwrite their
  source.
- `poll` sleeps for some milliseconds at most, while the engine has nothing to do before a load
  ends.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence

from penstock._native import Engine, Fence
from penstock.vllm.counters import Counters, Counts
from penstock.vllm.messages import (
    IDLE_TO_END_SECONDS,
    ModelShares,
    RankShare,
    StepOrders,
    WorkerReport,
)
from penstock.vllm.panics import take_panics
from penstock.vllm.settings import Settings
from penstock.vllm.worker.facts import KvMemory, Services, WorkerFacts
from penstock.vllm.worker.jobs import Jobs
from penstock.vllm.worker.registration import register
from penstock.vllm.worker.weights import Weights

logger = logging.getLogger("vllm.penstock")

_FLUSH_TIMEOUT = 10.0


class WorkerHalf:
    """One rank's half of the connector."""

    def __init__(self, settings: Settings, facts: WorkerFacts, services: Services) -> None:
        self._settings = settings
        self._facts = facts
        self._services = services
        self._counters = Counters()
        self._engine: Engine | None = None
        self._jobs: Jobs | None = None
        self._share: RankShare | None = None
        self._cuda_device: int | None = None
        """The ordinal of the CUDA device that holds the KV cache; None for host memory."""
        self._owners: Sequence[object] = ()
        """What the KV cache belongs to."""
        self._before_step: Fence | None = None
        """A fence after everything that was computed before this step."""
        self.weights = Weights(services.read_weights, self._on_weights_changed)
        self._is_asleep = False
        """Whether the KV cache's memory is taken away for a time."""
        self._idle_until = 0.0
        """When the engine wants an answer even if no load has ended; mostly a time in the past."""

    def register(self, memory: KvMemory) -> None:
        """Takes in the KV cache and starts the native engine on it.

        Raises:
            Unavailable: the CUDA driver cannot be used.
            LayoutError: the memory's layout cannot be proven.
            ConfigError: the memory is not what vLLM configured.
        """
        registered = register(self._settings, self._facts, memory, self._services)
        self._engine, self._share = registered.engine, registered.share
        self._cuda_device, self._owners = memory.cuda_device, memory.owners
        self._jobs = Jobs(
            registered.engine,
            self._counters,
            whole_loads=len(self._facts.groups) > 1,
            agrees=self._services.agrees,
        )

    @property
    def share(self) -> RankShare | None:
        """What this rank holds; None before the KV cache is registered."""
        return self._share

    def begin(self, models: ModelShares) -> RankShare:
        """Takes what the rank's models are at the start. Returns what it holds, with them."""
        assert self._share is not None
        self.weights.begin(models)
        self._share = dataclasses.replace(self._share, models=models)
        return self._share

    def begin_step(self, orders: StepOrders) -> None:
        """Called before anything of the step is computed. Returns when none of the jobs to flush
        reads its blocks any more.

        The blocks that the step's loads write may have belonged to other requests before. So work
        that the device has now may still read them, and loads must wait for a fence after it. Work
        that the device gets later does not touch these blocks, as vLLM does not zero blocks that
        will be loaded (`get_loaded_kv_cache_group_ids`).
        """
        engine, jobs = self._running()
        if orders.loads:
            self._before_step = self._raise_fence()
        stores = jobs.stores_among(orders.flush)
        if stores and not engine.wait_released(stores, _FLUSH_TIMEOUT):
            raise RuntimeError(
                f"stores of preempted requests still read their blocks after {_FLUSH_TIMEOUT} s"
            )

    def start_loads(self, orders: StepOrders) -> None:
        """Submits the step's loads, prefetches and cancellations. With a step that computes
        nothing, its stores too."""
        _, jobs = self._running()
        jobs.name_groups(orders.namespaces, orders.weights, orders.writer)
        self._idle_until = orders.idle_until
        if orders.step:
            jobs.report.steps.add(orders.step)
        after, self._before_step = self._before_step, None
        if orders.loads and after is None:
            # `begin_step` was not called, so no earlier point is known.
            after = self._raise_fence()
        is_stale = self._is_stale(orders)
        for job in orders.loads:
            jobs.load(job, after, is_stale=is_stale or job.is_stale)
        for number in orders.cancel_loads:
            jobs.cancel_load(number)
        for job in orders.prefetches:
            jobs.prefetch(job)
        for number in orders.release:
            jobs.release(number)
        if not orders.computes:
            self._submit_stores(orders)

    def start_stores(self, orders: StepOrders) -> None:
        """Submits the step's stores. Their blocks are complete now, or will be once the device has
        done the work that it has."""
        # vLLM before 0.31 does not call this after a step that computes nothing.
        if orders.computes:
            self._submit_stores(orders)

    def _submit_stores(self, orders: StepOrders) -> None:
        _, jobs = self._running()
        jobs.name_groups(orders.namespaces, orders.weights, orders.writer)
        after = self._raise_fence() if orders.stores else None
        is_stale = self._is_stale(orders)
        for job in orders.stores:
            jobs.store(job, after, is_stale=is_stale or job.is_stale)
        jobs.finish(orders.finished)

    def _on_weights_changed(self) -> None:
        """Loads under way are given up. Stores under way go on: what they read was computed
        before."""
        if self._jobs is not None:
            self._jobs.give_up_loads()
            self._jobs.report.changes = self.weights.changes

    def end_transfers(self) -> None:
        """Returns when nothing reads or writes the engine's blocks. Loads under way are given
        up.

        Raises:
            RuntimeError: the device did not end what it does with blocks.
        """
        if self._engine is None or self._jobs is None:
            return
        jobs, ends = self._jobs, time.monotonic() + _FLUSH_TIMEOUT
        jobs.give_up_loads()
        while jobs.is_loading and (left := ends - time.monotonic()) > 0:
            self._engine.wait(left)
            jobs.poll()
        if jobs.is_loading or not self._engine.wait_released(jobs.stores, _FLUSH_TIMEOUT):
            raise RuntimeError(
                f"loads and stores still use the engine's blocks after {_FLUSH_TIMEOUT} s"
            )

    def fall_asleep(self) -> None:
        """The memory of the KV cache, and perhaps that of the weights, is about to be taken away
        for a time. Until :meth:`wake_up` nothing reads or writes it. What the weights are is asked
        anew after that.

        Raises:
            RuntimeError: the device did not end what it does with blocks.
        """
        if not self._is_asleep:
            self.end_transfers()
            self.weights.note_sleep()
            self._is_asleep = True

    def wake_up(self) -> None:
        """The memory of the KV cache is there again, at the same addresses."""
        self._is_asleep = False

    def forget_failures(self) -> None:
        """All ranks have ended their transfers, and the engine takes all blocks away: it is told of
        none that a load did not fill."""
        if self._jobs is not None:
            self._jobs.forget_failures()

    def _is_stale(self, orders: StepOrders) -> bool:
        """Whether nothing can be moved for these orders, or they are of weights that are gone."""
        return self._is_asleep or self.weights.is_behind(orders.changes)

    def _raise_fence(self) -> Fence | None:
        """A fence after all work that the device has now; None for host memory."""
        if self._cuda_device is None:
            return None
        engine, _ = self._running()
        stream = self._services.current_stream(self._cuda_device)
        return engine.raise_fence(stream, cuda_device=self._cuda_device)

    def poll(self) -> tuple[set[str], set[str]]:
        """Takes in the jobs that the engine finished.

        Returns:
            Requests whose blocks may be freed, and requests whose load ended.
        """
        engine, jobs = self._running()
        if self._idle_until and jobs.is_loading:
            left = self._idle_until - time.monotonic()
            # On another machine the scheduler has another clock, so the wait is bounded.
            engine.wait(min(max(left, 0.0), IDLE_TO_END_SECONDS))
        jobs.poll()
        self._services.rest(self._idle_until > 0)
        return jobs.take_free(), jobs.take_loaded()

    def take_failed_blocks(self) -> set[int]:
        """Blocks that loads did not fill, since the last call."""
        return set() if self._jobs is None else self._jobs.take_failed_blocks()

    def take_failed_requests(self) -> set[str]:
        """Requests whose load failed as a whole, since the last call."""
        return set() if self._jobs is None else self._jobs.take_failed_requests()

    def take_report(self) -> WorkerReport | None:
        """The report for the scheduler half, since the last call; None if there is nothing."""
        return None if self._jobs is None else self._jobs.take_report()

    def take_counts(self) -> Counts | None:
        """The counts since the last call; None if there are none."""
        for place, count in take_panics().items():
            self._counters.count_at(place, "panics", count)
        return self._counters.take()

    def shutdown(self) -> None:
        """Waits a bounded time for stores to reach the pool, then ends all native threads. What
        then still waits for the pool or the device is left to the end of the process, with the
        memory that it may touch."""
        engine, self._engine = self._engine, None
        owners, self._owners = self._owners, ()
        if engine is None:
            return
        engine.drain(self._settings.drain_timeout)
        if engine.shutdown(self._settings.drain_timeout):
            return
        is_copying = engine.is_copying()
        logger.warning(
            "Penstock: %s have not ended %g s after the engine was told to "
            "(penstock.drain_timeout): they wait for the device or the pool. They and the memory "
            "that they use are left until the process ends",
            "copies of the KV cache" if is_copying else "threads",
            self._settings.drain_timeout,
        )
        Engine.leave(engine, list(owners) if is_copying else [])

    def _running(self) -> tuple[Engine, Jobs]:
        if self._engine is None or self._jobs is None:
            raise RuntimeError("this rank has no KV cache registered with Penstock")
        return self._engine, self._jobs
