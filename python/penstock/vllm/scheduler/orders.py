"""The orders of the next step. The parts of the scheduler half add to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from penstock._native import Blocks
from penstock.vllm.messages import BlockJob, StepOrders
from penstock.vllm.scheduler.facts import AdapterOf
from penstock.vllm.scheduler.requests import RequestState


class Orders:
    """The orders that go to the workers with the next step, and the numbers for jobs."""

    def __init__(self, adapter_of: AdapterOf) -> None:
        self._adapter_of = adapter_of
        self._next = StepOrders()
        """The orders of the next step so far."""
        self._numbers = 0

    def number(self) -> int:
        """A new number for a job or a step; never the same twice."""
        self._numbers += 1
        return self._numbers

    def load(
        self, number: int, state: RequestState, blocks: Blocks, timeout: float, pace: float
    ) -> BlockJob:
        """Orders a load into a request's blocks. Returns its job."""
        job = self._job(number, state, blocks, timeout, pace)
        self._next.loads.append(job)
        return job

    def cancel_load(self, number: int) -> None:
        """Orders the end of a load whose request is gone."""
        self._next.cancel_loads.append(number)

    def store(
        self, number: int, state: RequestState, blocks: Blocks, *, witnesses: int = 0
    ) -> None:
        """Orders a store of a request's blocks. The last `witnesses` of them are compared with what
        the pool has of them, if it has them."""
        job = self._job(number, state, blocks)
        self._next.stores.append(replace(job, witnesses=witnesses) if witnesses else job)

    def flush(self, stores: Iterable[int]) -> None:
        """Orders workers to read the blocks of these stores before the step."""
        self._next.flush.extend(stores)

    def prefetch(
        self, number: int, state: RequestState, blocks: Blocks, timeout: float, pace: float
    ) -> None:
        """Orders a prefetch of a request's blocks."""
        self._next.prefetches.append(self._job(number, state, blocks, timeout, pace))

    def release(self, number: int) -> None:
        """Orders the release of a prefetch: nobody waits for it any more."""
        self._next.release.append(number)

    def finish(self, request_id: str) -> None:
        """Orders that a finished request's blocks stay until its stores have read them."""
        self._next.finished.append(request_id)

    def void(self) -> None:
        """Loads and stores that were ordered for the next step move nothing."""
        self._next.loads = [replace(job, is_stale=True) for job in self._next.loads]
        self._next.stores = [replace(job, is_stale=True) for job in self._next.stores]

    def take(self) -> StepOrders:
        """Returns the orders, and begins those of the step after."""
        taken, self._next = self._next, StepOrders()
        return taken

    def _job(
        self,
        number: int,
        state: RequestState,
        blocks: Blocks,
        timeout: float = 0.0,
        pace: float = 0.0,
    ) -> BlockJob:
        """The workers' description of a job on a request's blocks."""
        return BlockJob(
            job=number,
            request_id=state.id,
            blocks=blocks,
            timeout=timeout,
            pace=pace,
            salt=state.salt,
            tenant=state.tenant,
            is_awaited=state.is_handed_over,
            adapter=self._adapter_of(state.request),
        )
