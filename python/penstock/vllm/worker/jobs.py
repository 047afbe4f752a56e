"""A rank's jobs: hands them to its native engine, and reports their results to vLLM and the
scheduler half."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from penstock._native import Completion, Engine, Event, Fence
from penstock.vllm.adapters import Adapter
from penstock.vllm.counters import Counters
from penstock.vllm.messages import BlockJob, WorkerReport

logger = logging.getLogger("vllm.penstock")


class Jobs:
    """The jobs of one engine that are under way, and the reports of those that are over."""

    def __init__(
        self,
        engine: Engine,
        counters: Counters,
        *,
        whole_loads: bool,
        agrees: Callable[[Adapter], bool],
    ) -> None:
        """With `whole_loads`, a load that misses a block fails as a whole, because vLLM cannot use
        a part of it. `agrees` tells whether this rank computes with the same content as the adapter
        in the block hashes."""
        self._engine = engine
        self._counters = counters
        self._whole_loads = whole_loads
        self._agrees = agrees
        self._loads: dict[int, BlockJob] = {}
        self._stores: dict[int, BlockJob] = {}
        self._unread: dict[str, set[int]] = {}
        """Request → its stores that have not read all their blocks."""
        self._finished: set[str] = set()
        self._loaded: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._counted = engine.stats()
        """What the engine had counted at the last look."""
        self._names: tuple[bytes, ...] = ()
        self._stale: set[int] = set()
        """Loads that are given up, or of weights that are gone."""
        self._has_warned = False
        """Whether the log already has the warning about values that cannot be decrypted."""
        self._weights = 0
        self.report = WorkerReport()
        self._on_event = {
            Event.RELEASED: self._on_released,
            Event.STORED: self._on_stored,
            Event.LOADED: self._on_loaded,
            Event.PREFETCHED: self._on_prefetched,
        }

    # --- orders ---------------------------------------------------------------------------

    def name_groups(self, namespaces: Sequence[bytes], weights: int, writer: int) -> None:
        """Takes in the groups' namespaces, and who computes what is stored there. They come with
        the first job, and with the first one after the weights have changed."""
        names = tuple(namespaces)
        if not names or (names, weights) == (self._names, self._weights):
            return
        if names != self._names:
            for group, namespace in enumerate(names):
                self._engine.name_group(group, namespace)
        self._engine.set_writer(writer)
        self._names = names
        # What was reported is of other blocks.
        self.report.held, self.report.weights = b"", weights
        self._weights = weights

    def give_up_loads(self) -> None:
        """What loads bring is not wanted any more. They end as if nothing had come."""
        for number in self._loads.keys() - self._stale:
            self._stale.add(number)
            self._engine.cancel(number)

    def forget_failures(self) -> None:
        """The engine takes the blocks of all loads away, also of those that it has yet to be told
        of. It is told of none of them."""
        self._failed_blocks.clear()
        self._failed_requests.clear()

    def load(self, job: BlockJob, after: Fence | None, *, is_stale: bool = False) -> None:
        """Loads blocks into vLLM's blocks, once the device has passed the fence `after`. Loads
        nothing if the job is of weights that are gone."""
        self._loads[job.job] = job
        self._counters.count("loads")
        if is_stale:
            self._stale.add(job.job)
        if is_stale or not self._is_agreed(job):
            self._engine.decline_load(job.job, job.blocks)
            return
        # Blocks after a missing block are of no use. In a group that attends to all tokens, the
        # engine cannot continue from them. With several groups, a load is all or nothing.
        self._engine.submit_load(
            job.job,
            job.blocks,
            job.timeout,
            prefix=True,
            pace=job.pace,
            salt=job.salt,
            tenant=job.tenant,
            after=after,
        )

    def cancel_load(self, number: int) -> None:
        """Nobody wants this load any more. It is over as soon as nothing writes."""
        if number in self._loads:
            self._engine.cancel(number)

    def prefetch(self, job: BlockJob) -> None:
        """Gets blocks into host memory."""
        self._engine.submit_prefetch(
            job.job, job.blocks, job.timeout, salt=job.salt, tenant=job.tenant
        )

    def release(self, number: int) -> None:
        """Nobody waits any more for the blocks of this prefetch."""
        self._engine.release(number)

    def store(self, job: BlockJob, after: Fence | None, *, is_stale: bool = False) -> None:
        """Stores vLLM's blocks, once the device has passed the fence `after`. Stores nothing if the
        job is of weights that are gone."""
        self._stores[job.job] = job
        self._unread.setdefault(job.request_id, set()).add(job.job)
        if not is_stale and self._is_agreed(job):
            self._engine.submit_store(
                job.job,
                job.blocks,
                salt=job.salt,
                tenant=job.tenant,
                awaited=job.is_awaited,
                witnesses=job.witnesses,
                after=after,
            )
        else:
            self._engine.decline_store(job.job, job.blocks)

    def finish(self, requests: Iterable[str]) -> None:
        """Notes that requests are over. Their blocks may be freed once no store reads them."""
        self._finished.update(requests)

    def _is_agreed(self, job: BlockJob) -> bool:
        """Whether the adapter in the job's block hashes has the content that this rank computes
        with."""
        return job.adapter is None or self._agrees(job.adapter)

    # --- jobs under way -------------------------------------------------------------------

    @property
    def is_loading(self) -> bool:
        """Whether a load is under way."""
        return bool(self._loads)

    @property
    def stores(self) -> list[int]:
        """The stores under way."""
        return list(self._stores)

    def stores_among(self, numbers: Iterable[int]) -> list[int]:
        """The jobs among `numbers` that are stores under way."""
        return [number for number in numbers if number in self._stores]

    # --- results --------------------------------------------------------------------------

    def poll(self) -> None:
        """Takes in the jobs that the engine finished."""
        for completion in self._engine.poll():
            self._on_event[completion.event](completion)
        if self._names:
            self.report.held += self._engine.take_host_changes()
        for fault, unpinned_bytes in self._engine.take_faults():
            logger.warning("Penstock: %s", fault)
            self._counters.count("unpinned_bytes", unpinned_bytes)

    def take_free(self) -> set[str]:
        """Finished requests whose blocks may be freed, each once."""
        free = {request for request in self._finished if request not in self._unread}
        self._finished -= free
        return free

    def take_loaded(self) -> set[str]:
        """Requests whose load ended, since the last call."""
        loaded, self._loaded = self._loaded, set()
        return loaded

    def take_failed_blocks(self) -> set[int]:
        """Blocks that loads did not fill, since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Requests whose load failed as a whole, since the last call."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_report(self) -> WorkerReport | None:
        """The report for the scheduler half, since the last call; None if there is nothing."""
        if self.report.is_empty():
            return None
        report, self.report = self.report, WorkerReport(weights=self._weights)
        return report

    def _on_released(self, done: Completion) -> None:
        self.report.released[done.job] = 1
        request_id = self._stores[done.job].request_id
        unread = self._unread[request_id]
        unread.discard(done.job)
        if not unread:
            del self._unread[request_id]

    def _on_stored(self, done: Completion) -> None:
        del self._stores[done.job]
        self.report.stored[done.job] = 1
        if unstored := done.missing:
            self.report.unstored[done.job] = set(unstored)
        if disagreed := done.lost:
            self.report.disagreed[done.job] = set(disagreed)
            self._counters.count("witness_disagreements", len(disagreed))
        self._counters.count("stored_bytes", done.stored_bytes)
        self._count_stats()
        self._counters.count("stores_dropped", done.dropped_objects)
        self._counters.count("stores_failed", done.failed_objects)

    def _count_stats(self) -> None:
        """Takes in what the engine counts beside its jobs."""
        stats = self._engine.stats()
        before, self._counted = self._counted, stats
        self._counters.count(
            "stored_value_bytes", stats["stored_value_bytes"] - before["stored_value_bytes"]
        )
        self.report.witnessed += stats["witnessed_objects"] - before["witnessed_objects"]
        self.report.witness_seconds += (stats["witness_nanos"] - before["witness_nanos"]) * 1e-9

    def _on_prefetched(self, done: Completion) -> None:
        self.report.prefetched[done.job] = 1
        self._counters.count("prefetched_bytes", done.loaded_bytes)
        self._on_fetched(done)

    def _on_loaded(self, done: Completion) -> None:
        job = self._loads.pop(done.job)
        self._loaded.add(job.request_id)
        self._counters.count("loaded_bytes", done.loaded_bytes)
        self._counters.count("kept_bytes", done.kept_bytes)
        self._on_fetched(done)
        missing = done.missing
        if is_stale := done.job in self._stale:
            self._stale.discard(done.job)
            missing = list(range(len(job.blocks)))
        if not missing:
            return
        if self._whole_loads:
            self._failed_requests.add(job.request_id)
            missing = list(range(len(job.blocks)))
        else:
            block_ids = job.blocks.block_ids
            self._failed_blocks.update(block_ids[place] for place in missing)
        self.report.unloaded[done.job] = set(missing)
        if is_stale:
            # Given up, which is no failure.
            return
        self._counters.count("load_failed_blocks", len(missing))
        if not done.lost and not done.foreign:
            self._counters.count("load_late_blocks", len(missing))

    def _on_fetched(self, done: Completion) -> None:
        """Notes how long a load or prefetch took, and why blocks did not come."""
        self.report.seconds[done.job] = done.seconds
        if done.missing_bytes:
            self.report.missing_bytes[done.job] = done.missing_bytes
        if lost := done.lost:
            self.report.lost[done.job] = set(lost)
        if foreign := done.foreign:
            self.report.foreign[done.job] = set(foreign)
            self._warn_of_foreign()
        self._counters.count("rejected_objects", done.rejected_objects)
        self._counters.count("foreign_objects", done.foreign_objects)

    def _warn_of_foreign(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Penstock: values in the pool are encrypted with a key that this engine does not "
                "have; they are recomputed. Give all engines of the pool the same keys in "
                "penstock.encryption_key_file or PENSTOCK_ENCRYPTION_KEYS (said once; counted as "
                "foreign_objects)"
            )
