"""The scheduler half: decides which blocks to look up, to load and to store.

One rule for stores: a block is stored in the step that fills it, unless it is known to be in
the pool or on its way there. One rule for loads: the longest run of blocks, from the first that
the engine does not have, that a look-up found present on all ranks; never the prompt's last
token, so that a load leaves the engine in the state of its own prefix-cache hit.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock._native import Lookup, Store
from penstock.errors import StoreError
from penstock.vllm import compat
from penstock.vllm.agreement import Agreement
from penstock.vllm.messages import BlockJob, RankShare, StepOrders, WorkerReport
from penstock.vllm.settings import Settings
from penstock.vllm.stats import PenstockStats

logger = logging.getLogger("vllm.penstock")

_KNOWN_BLOCKS = 1 << 18
"""How many blocks' presence is remembered (tens of MB at most); forgetting costs a second put,
which the store recognizes."""


@dataclass
class _Tracked:
    """What is known of one request."""

    request: Any
    lookup: int | None = None
    """Look-up under way."""
    present: list[bool] | None = None
    """The look-up's answer, per block of the prompt."""
    offered_from: int = 0
    """First block of the run last offered to the engine."""
    load: BlockJob | None = None
    unloaded: set[bytes] = field(default_factory=set)
    """Blocks of the present load that did not come."""
    considered: int = 0
    """Blocks before this one have been stored, or need not be."""
    stores: set[int] = field(default_factory=set)
    """Store jobs whose source some rank has yet to read."""


class SchedulerHalf:
    """State of all requests of one engine, and the look-ups of the pool."""

    def __init__(self, settings: Settings, vllm_config: Any, kv_cache_config: Any) -> None:
        spec = compat.check_supported(vllm_config, kv_cache_config)
        self._settings = settings
        self._block_size: int = spec.block_size
        self._hash_block_size: int | None = kv_cache_config.hash_block_size
        self._agreement = Agreement(settings, vllm_config, spec)
        self._store = Store.open(settings.pool, client_name="penstock-scheduler").guarded()
        self._lookup = Lookup(self._store)
        self._answers: dict[int, list[bool] | None] = {}
        self._requests: dict[str, _Tracked] = {}
        self._loading: dict[bytes, str] = {}
        self._storing: dict[bytes, int] = {}
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._store_jobs: dict[int, _StoreJob] = {}
        self._orders = StepOrders()
        self._next_id = 0
        self._stats = PenstockStats()

    def accept_shares(self, shares: Mapping[tuple[int, int], RankShare]) -> None:
        """Takes in what every rank holds, keyed by (pipeline rank, tensor-parallel rank).

        Raises:
            ConfigError: they do not make up the model's KV cache.
        """
        self._agreement.accept(shares)

    # --- loading --------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Starts the request's look-up, if it has a full block."""
        tracked = _Tracked(request)
        self._requests[request.request_id] = tracked
        self._start_lookup(tracked)

    def _start_lookup(self, tracked: _Tracked) -> None:
        hashes = self._hashes(tracked.request)
        if not hashes:
            tracked.present = []
            return
        self._next_id += 1
        tracked.lookup = self._next_id
        tracked.present = None
        self._stats.count("lookups")
        self._stats.count("lookup_blocks", len(hashes))
        try:
            self._lookup.submit(
                self._next_id,
                self._agreement.namespace,
                list(hashes),
                self._agreement.spans,
                self._settings.lookup_timeout,
            )
        except StoreError:
            # More look-ups wait than may: this request does without.
            self._stats.count("lookup_failures")
            tracked.lookup, tracked.present = None, []

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens to load beyond `num_computed_tokens` (a multiple of the block size).

        Returns:
            `(n, True)`; `(0, False)` where nothing is to be loaded; `(None, False)` while the
            look-up, which has a deadline, is under way.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return 0, False
        size = self._block_size
        first = num_computed_tokens // size
        last = (request.num_tokens - 1) // size
        if request.skip_reading_prefix_cache or last <= first:
            return 0, False
        if tracked.present is None and tracked.lookup is None:
            self._start_lookup(tracked)
        present = self._answer(tracked)
        if present is None:
            return None, False
        end = first
        hashes = self._hashes(request)
        while end < min(last, len(present)) and present[end]:
            end += 1
        if end == first:
            return 0, False
        if self._loading.get(hashes[first], request.request_id) != request.request_id:
            # Another request is loading the same block: once it has, this is a local hit.
            return None, False
        tracked.offered_from = first
        return (end - first) * size, True

    def _answer(self, tracked: _Tracked) -> list[bool] | None:
        """The look-up's answer, if it is there; a look-up that failed found nothing."""
        if tracked.present is None:
            self._collect_answers()
            assert tracked.lookup is not None
            if tracked.lookup not in self._answers:
                return None
            answer = self._answers.pop(tracked.lookup)
            tracked.lookup = None
            if answer is None:
                tracked.present = []
            else:
                tracked.present = answer
                self._learn(self._hashes(tracked.request), answer)
        return tracked.present

    def _collect_answers(self) -> None:
        for number, answer in self._lookup.poll():
            if isinstance(answer, str):
                self._stats.count("lookup_failures")
                self._answers[number] = None
            else:
                self._stats.count("lookup_hit_blocks", sum(answer))
                self._answers[number] = answer

    def _learn(self, hashes: Sequence[bytes], present: Sequence[bool]) -> None:
        for block_hash, is_present in zip(hashes, present, strict=False):
            if is_present:
                self._remember(block_hash)
            else:
                self._known.pop(block_hash, None)

    def _remember(self, block_hash: bytes) -> None:
        self._known[block_hash] = None
        self._known.move_to_end(block_hash)
        if len(self._known) > _KNOWN_BLOCKS:
            self._known.popitem(last=False)

    def on_allocated(self, request: Any, block_ids: Sequence[int], num_tokens: int) -> None:
        """The engine allocated `block_ids`, the last of them for `num_tokens` to be loaded."""
        tracked = self._requests[request.request_id]
        first = tracked.offered_from
        end = first + num_tokens // self._block_size
        job = self._job(request.request_id, block_ids, self._hashes(request), range(first, end))
        tracked.load = job
        self._loading.update(dict.fromkeys(job.hashes, request.request_id))
        self._orders.loads.append(job)

    # --- storing --------------------------------------------------------------------------

    def build_orders(self, scheduler_output: Any) -> StepOrders:
        """The orders of this step, with the stores of the blocks that it fills."""
        for request_id in scheduler_output.preempted_req_ids or ():
            self._on_preempted(request_id)
        resolve = compat.block_table(scheduler_output)
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is None or not self._is_answered(tracked):
                # A look-up under way may find the block in the pool: the next step decides.
                continue
            # The request's count is not yet advanced by this step.
            num_computed = tracked.request.num_computed_tokens + num_scheduled
            if num_computed // self._block_size > tracked.considered:
                self._store_filled(tracked, resolve(request_id), num_computed)
        orders, self._orders = self._orders, StepOrders()
        if orders.loads or orders.stores:
            orders.namespace = self._agreement.namespace
        return orders

    def _store_filled(self, tracked: _Tracked, block_ids: Sequence[int], num_computed: int) -> None:
        """Orders the store of every block that is full after `num_computed` tokens.

        Only blocks whose hash is known count: the hash exists once all the block's tokens are
        final, so tokens that are merely speculated never get into a stored block.
        """
        hashes = self._hashes(tracked.request)
        full = min(num_computed // self._block_size, len(hashes), len(block_ids))
        new = [
            index
            for index in range(tracked.considered, full)
            if hashes[index] not in self._known and hashes[index] not in self._storing
        ]
        tracked.considered = max(tracked.considered, full)
        if not new:
            return
        job = self._job(tracked.request.request_id, block_ids, hashes, new)
        self._storing.update(dict.fromkeys(job.hashes, job.job))
        self._store_jobs[job.job] = _StoreJob(job, self._agreement.ranks)
        tracked.stores.add(job.job)
        self._orders.stores.append(job)

    def _is_answered(self, tracked: _Tracked) -> bool:
        return tracked.lookup is None or self._answer(tracked) is not None

    def _on_preempted(self, request_id: str) -> None:
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        self._orders.flush.extend(tracked.stores)
        self._drop_lookup(tracked)
        tracked.present = None
        tracked.considered = 0

    def _drop_lookup(self, tracked: _Tracked) -> None:
        if tracked.lookup is not None:
            self._lookup.cancel(tracked.lookup)
            self._answers.pop(tracked.lookup, None)
            tracked.lookup = None

    def on_request_finished(self, request: Any, block_ids: Sequence[int]) -> bool:
        """Orders the last stores; True if the blocks must be kept until they are read."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return False
        self._drop_lookup(tracked)
        if tracked.load is not None:
            # vLLM keeps the blocks until the load is reported as ended; make that soon.
            self._orders.cancel_loads.append(tracked.load.job)
            return False
        self._store_filled(tracked, block_ids, request.num_computed_tokens)
        if not tracked.stores:
            del self._requests[request.request_id]
            return False
        self._orders.finished.append(request.request_id)
        return True

    # --- what became of it ----------------------------------------------------------------

    def on_worker_output(
        self, report: WorkerReport | None, loaded: Iterable[str], freed: Iterable[str]
    ) -> None:
        """Takes in what the workers report with a step."""
        if report is not None:
            for block_hash in report.lost:
                self._known.pop(block_hash, None)
            for request_id, hashes in report.unloaded.items():
                if (tracked := self._requests.get(request_id)) is not None:
                    tracked.unloaded |= hashes
            for number, ranks in report.released.items():
                self._on_released(number, ranks)
            for number, results in report.stored.items():
                self._on_stored(number, results)
        for request_id in loaded:
            self._on_loaded(request_id)
        for request_id in freed:
            self._requests.pop(request_id, None)

    def _on_released(self, number: int, ranks: int) -> None:
        state = self._store_jobs[number]
        state.unread -= ranks
        tracked = self._requests.get(state.job.request_id)
        if state.unread == 0 and tracked is not None:
            tracked.stores.discard(number)

    def _on_stored(self, number: int, results: list[list[bool]]) -> None:
        state = self._store_jobs[number]
        state.results.extend(results)
        if len(state.results) < self._agreement.ranks:
            return
        del self._store_jobs[number]
        for index, block_hash in enumerate(state.job.hashes):
            self._storing.pop(block_hash, None)
            if all(result[index] for result in state.results):
                self._remember(block_hash)
                self._stats.count("stored_blocks")
                self._agreement.publish(self._store)

    def _on_loaded(self, request_id: str) -> None:
        tracked = self._requests[request_id]
        job, tracked.load = tracked.load, None
        assert job is not None
        for block_hash in job.hashes:
            self._loading.pop(block_hash, None)
        if tracked.request.is_finished():
            del self._requests[request_id]
            return
        if tracked.unloaded:
            # Recompute them; asking the pool again could fail the same way for ever.
            tracked.present = []
        num_loaded = len(job.hashes) - len(tracked.unloaded)
        tracked.unloaded = set()
        self._stats.count("loaded_tokens", num_loaded * self._block_size)

    # --- common ---------------------------------------------------------------------------

    def _hashes(self, request: Any) -> Sequence[bytes]:
        return compat.block_hashes(request, self._hash_block_size, self._block_size)

    def _job(
        self,
        request_id: str,
        block_ids: Sequence[int],
        hashes: Sequence[bytes],
        indices: Iterable[int],
    ) -> BlockJob:
        self._next_id += 1
        chosen = list(indices)
        return BlockJob(
            job=self._next_id,
            request_id=request_id,
            block_ids=tuple(block_ids[i] for i in chosen),
            hashes=tuple(bytes(hashes[i]) for i in chosen),
        )

    def forget_presence(self) -> None:
        """Forgets which blocks are in the pool; look-ups will tell again."""
        self._known.clear()

    def take_stats(self) -> PenstockStats | None:
        """Counters since the last call."""
        return self._stats.take()

    def shutdown(self) -> None:
        """Ends the look-up threads; unanswered look-ups are dropped."""
        self._lookup.shutdown()


@dataclass
class _StoreJob:
    job: BlockJob
    unread: int
    results: list[list[bool]] = field(default_factory=list)
