"""The scheduler half: decides which blocks to look up, to load and to store.

One rule for stores: a block is stored in the step that fills it, unless it is known to be in
the pool or on its way there. One rule for loads: the longest run of tokens, from the first that
the engine does not have, whose blocks a look-up found present on all ranks (of a group with a
window only those of the last window); never the prompt's last token, so that a load leaves the
engine in the state of its own prefix-cache hit; and no more of it than is expected to be there
sooner than it could be computed. What a request will load comes into host memory while it waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from penstock._native import Store
from penstock.vllm import compat
from penstock.vllm.adapters import NamedAdapters
from penstock.vllm.advisor import AUTO, Advisor, Reach
from penstock.vllm.agreement import Agreement
from penstock.vllm.costs import Choice, attended
from penstock.vllm.groups import Group, either
from penstock.vllm.host import HostIndex
from penstock.vllm.messages import (
    IDLE_SECONDS,
    BlockJob,
    RankShare,
    StepOrders,
    WorkerReport,
    block_name,
)
from penstock.vllm.prefetch import Prefetches
from penstock.vllm.presence import Presence
from penstock.vllm.settings import Settings
from penstock.vllm.stats import PenstockStats
from penstock.vllm.tracked import StoreJob, Tracked

logger = logging.getLogger("vllm.penstock")


class SchedulerHalf:
    """State of all requests of one engine, and the look-ups of the pool."""

    def __init__(self, settings: Settings, vllm_config: Any, kv_cache_config: Any) -> None:
        self._settings = settings
        self._groups = compat.transfer_groups(vllm_config, kv_cache_config)
        self._single_token_left = not compat.continues_prefixes(vllm_config)
        self._has_peers = vllm_config.parallel_config.data_parallel_size > 1
        """Whether other engines compute in step with this one, and would wait for it."""
        self._hash_block_size = compat.hash_block_size(vllm_config, kv_cache_config)
        self._adapters = NamedAdapters()
        if vllm_config.lora_config is not None:
            compat.name_adapters(vllm_config, self._adapters)
        self._agreement = Agreement(settings, vllm_config, self._groups)
        self._store = Store.open(settings.pool, client_name="penstock-scheduler").guarded()
        self._stats = PenstockStats()
        self._presence = Presence(self._store, settings.lookup_timeout, self._stats)
        self._requests: dict[str, Tracked] = {}
        self._host = HostIndex()
        self._advisor = Advisor(compat.tokens_per_step(vllm_config), settings.get_lanes)
        self._is_cached: Callable[[bytes, int], bool] = lambda block_hash, group: False
        self._prefetches = Prefetches()
        self._took: dict[int, tuple[float, int]] = {}
        """How long loads and prefetches took, and bytes that they did not get, as far as ranks have
        said."""
        self._loading: dict[bytes, str] = {}
        self._storing: dict[bytes, int] = {}
        self._store_jobs: dict[int, StoreJob] = {}
        self._reading: dict[int, int] = {}
        """Blocks that vLLM may give away while their request runs, since they leave the window,
        and the store job that has yet to read them."""
        self._orders = StepOrders()
        self._next_id = 0

    def accept_shares(self, shares: Mapping[tuple[int, int], RankShare]) -> None:
        """Takes in what every rank holds, keyed by (pipeline rank, tensor-parallel rank).

        Raises:
            ConfigError: they do not make up the model's KV cache.
        """
        self._agreement.accept(shares)
        self._host.expect(self._agreement.ranks_of_group)

    def bind(self, block_pool: Any) -> None:
        """Takes vLLM's block pool: what it holds need not be prefetched."""
        self._is_cached = compat.cache_probe(block_pool)

    # --- loading --------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Starts the request's look-up, if it has a full block."""
        policy = self._settings.policy_for(request.kv_transfer_params)
        tracked = Tracked(request, policy, considered=[0] * len(self._groups))
        self._requests[request.request_id] = tracked
        self._start_lookup(tracked)

    def _start_lookup(self, tracked: Tracked) -> None:
        tracked.present = tracked.advice = None
        tracked.awaits = tracked.unawaited_from = None
        hashes = [self._hashes(tracked.request, group) for group in self._groups]
        if not all(hashes) or not self._is_shared(tracked.request):
            tracked.present = [[] for _ in hashes]
            return
        last = self._last(tracked.request)
        if last and self._groups.reach(self._held(tracked.request), 0, last) == last:
            # Host memory has all of it: the pool need not be asked.
            tracked.present = [[] for _ in hashes]
            return
        tracked.lookups = self._presence.ask(
            zip(self._agreement.namespaces, hashes, self._agreement.spans, strict=True)
        )
        if not tracked.lookups:
            # More look-ups wait than may: this request does without.
            tracked.present = [[] for _ in hashes]

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens to load beyond `num_computed_tokens` (whole blocks in every group).

        Returns:
            `(n, True)`; `(0, False)` where nothing is to be loaded; `(None, False)` while the
            look-up, which has a deadline, is under way and worth waiting for.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return 0, False
        first = num_computed_tokens
        if request.skip_reading_prefix_cache or tracked.is_failed or self._last(request) <= first:
            return 0, False
        if not self._is_shared(request):
            return 0, False
        if tracked.present is None and not tracked.lookups:
            self._start_lookup(tracked)
        in_pool = self._answer(tracked)
        if in_pool is None:
            if self._awaits(tracked, first):
                return None, False
            if tracked.unawaited_from is None:
                self._stats.count("lookups_not_awaited")
            tracked.unawaited_from = first
            in_pool = [[] for _ in self._groups]
        choice = self._advise(tracked, in_pool, first)
        if choice is None:
            return 0, False
        position, index = next(self._groups.needed(first, choice.end))
        if self._loading.get(self._name(request, position, index), request.request_id) != (
            request.request_id
        ):
            # Another request is loading the same block: once it has, this is a local hit.
            return None, False
        tracked.offer, tracked.choice = (first, choice.end), choice
        return choice.end - first, True

    def _is_shared(self, request: Any) -> bool:
        """Whether it is known what the request is computed with, and was the same all along."""
        adapter = compat.adapter(request)
        return adapter is None or self._adapters.shares(adapter)

    def _last(self, request: Any) -> int:
        """Where loads end at the latest: before the prompt's last token."""
        unit = self._groups.alignment
        return int(request.num_tokens - 1) // unit * unit

    def _awaits(self, tracked: Tracked, first: int) -> bool:
        """Whether a request that could be computed from the token `first` waits for its look-up."""
        if tracked.awaits is None:
            request = tracked.request
            tracked.awaits = self._advisor.awaits_lookup(
                first,
                self._reach(self._held(request), first, self._last(request)),
                request.num_tokens,
                self._presence.latency,
                tracked.policy,
            )
        return tracked.awaits

    def _reach(self, held: Sequence[Sequence[bool]], first: int, end: int) -> Reach:
        """A load of the tokens from `first` to `end`, of which host memory has what is held."""
        return Reach(end, *self._bytes_by_tier(held, self._groups.needed(first, end)))

    def _advise(
        self, tracked: Tracked, in_pool: Sequence[Sequence[bool]], first: int
    ) -> Choice | None:
        """How far to load from the token `first`; None for not at all."""
        if tracked.advice is None or tracked.advice[:2] != (first, self._host.version):
            choice = self._weigh(tracked, in_pool, first)
            tracked.advice = first, self._host.version, choice
        return tracked.advice[2]

    def _weigh(
        self, tracked: Tracked, in_pool: Sequence[Sequence[bool]], first: int
    ) -> Choice | None:
        request = tracked.request
        last, held = self._last(request), self._held(request)
        present = either(held, in_pool)
        ends = {self._groups.reach(has, first, last) for has in (held, present)}
        reaches = [
            self._reach(held, first, end)
            for end in sorted(ends)
            if end > first and not (self._single_token_left and end != request.num_tokens - 1)
        ]
        if not reaches:
            return None
        choice = self._advisor.advise(
            first, reaches, request.num_tokens, tracked.policy, may_check=not tracked.is_declined
        )
        furthest = reaches[-1]
        if choice.end < furthest.end:
            self._decline(tracked, held, choice.end, furthest.end)
        return choice if choice.end > first else None

    def _held(self, request: Any) -> list[list[bool]]:
        """By group, which blocks of the request host memory has."""
        return [
            [
                self._host.has(position, block_name(position, h))
                for h in self._hashes(request, group)
            ]
            for position, group in enumerate(self._groups)
        ]

    def _bytes_by_tier(
        self, held: Sequence[Sequence[bool]], blocks: Iterable[tuple[int, int]]
    ) -> tuple[int, int]:
        """Bytes of blocks, over all ranks: in host memory, and not."""
        sums = [0, 0]
        for position, index in blocks:
            sums[not held[position][index]] += self._agreement.block_bytes[position]
        return sums[0], sums[1]

    def _answer(self, tracked: Tracked) -> list[list[bool]] | None:
        """The look-ups' answers, if they are there; one that failed found nothing."""
        if tracked.present is None:
            answers = self._presence.answers(tracked.lookups)
            if answers is None:
                return None
            tracked.lookups, tracked.advice = [], None
            tracked.present = [
                self._presence.learn(position, self._hashes(tracked.request, group), answer)
                for position, (group, answer) in enumerate(zip(self._groups, answers, strict=True))
            ]
        return tracked.present

    def on_allocated(
        self, request: Any, block_ids: Sequence[Sequence[int]], num_tokens: int
    ) -> None:
        """The engine allocated `block_ids`, by its groups, the last of them for `num_tokens` to be
        loaded: what was offered last."""
        tracked = self._requests[request.request_id]
        first, end = tracked.offer
        if num_tokens > end - first:
            raise RuntimeError(f"{num_tokens} tokens are to be loaded, {end - first} were offered")
        blocks = list(self._groups.needed(first, first + num_tokens))
        job = self._begin(request, block_ids, blocks, tracked.choice)
        tracked.load = job
        self._release_prefetch(tracked)
        self._loading.update(dict.fromkeys(job.names, request.request_id))
        self._flush_given_away(job.block_ids)
        self._orders.loads.append(job)

    def _begin(
        self,
        request: Any,
        block_ids: Sequence[Sequence[int]] | None,
        blocks: Sequence[tuple[int, int]],
        choice: Choice | None = None,
        *,
        is_probe: bool = False,
    ) -> BlockJob:
        """A load, or a prefetch without block ids, that begins now."""
        host_bytes, pool_bytes = self._bytes_by_tier(self._held(request), blocks)
        timeout, pace, patience = self._settings.load_deadline(host_bytes + pool_bytes), 0.0, None
        if choice is not None:
            objects = sum(self._agreement.block_objects[position] for position, _ in blocks)
            patience = self._advisor.patience(choice, host_bytes, pool_bytes, objects)
        if choice is not None and patience is not None:
            timeout, pace = min(timeout, patience), choice.recompute or 0.0
        job = self._job(request, block_ids, blocks, timeout, pace)
        self._advisor.on_begin(
            time.monotonic(),
            job.job,
            host_bytes,
            pool_bytes,
            patience=patience,
            is_probe=is_probe,
        )
        return job

    # --- prefetching ----------------------------------------------------------------------

    def _prefetch_waiting(self) -> None:
        """Orders what requests that wait for their turn will load."""
        for tracked in self._requests.values():
            if len(self._prefetches) >= self._agreement.prefetch_blocks:
                return
            if (
                not tracked.is_considered
                and not tracked.is_scheduled
                and tracked.load is None
                and not tracked.request.is_finished()
            ):
                self._prefetch(tracked)

    def _prefetch(self, tracked: Tracked) -> None:
        request, in_pool = tracked.request, self._answer(tracked)
        if in_pool is None or request.skip_reading_prefix_cache or not self._is_shared(request):
            return
        tracked.is_considered = True
        first = self._cached_tokens(request)
        choice = self._advise(tracked, in_pool, first)
        if choice is None:
            return
        held, blocks = self._held(request), list(self._groups.needed(first, choice.end))
        if all(held[position][index] for position, index in blocks):
            return
        room = self._agreement.prefetch_blocks - len(self._prefetches)
        tracked.prefetch = self._order_prefetch(request, blocks[:room])
        self._stats.count("prefetches", tracked.prefetch is not None)

    def _cached_tokens(self, request: Any) -> int:
        """Tokens at the prompt's beginning that the engine has in its own cache."""
        end = self._last(request)
        for group in self._groups:
            if group.window is None:
                hashes, block = self._hashes(request, group), 0
                while block < len(hashes) and self._is_cached(hashes[block], group.index):
                    block += 1
                end = min(end, block * group.block_size)
        return end // self._groups.alignment * self._groups.alignment

    def _decline(
        self, tracked: Tracked, held: Sequence[Sequence[bool]], first: int, end: int
    ) -> None:
        """Tokens are computed that could be loaded: once a request, they are counted, and some of
        them are got all the same, if the pool was not measured for long."""
        if tracked.is_declined or end <= first:
            return
        tracked.is_declined = True
        self._stats.count("declined_tokens", end - first)
        missing = [(p, i) for p, i in self._groups.needed(first, end) if not held[p][i]]
        if missing and tracked.policy == AUTO:
            group = missing[0][0]
            wanted = self._advisor.wants_probe(
                time.monotonic(),
                first,
                self._reach(held, first, end),
                tracked.request.num_tokens,
                (self._agreement.block_bytes[group], self._agreement.block_objects[group]),
            )
            if wanted and self._order_prefetch(tracked.request, missing[:wanted], is_probe=True):
                self._stats.count("probes")

    def _decline_unawaited(self, tracked: Tracked) -> None:
        """Once the answer has come for which the request did not wait."""
        first = tracked.unawaited_from
        if first is None or (in_pool := self._answer(tracked)) is None:
            return
        tracked.unawaited_from = None
        held, last = self._held(tracked.request), self._last(tracked.request)
        end = self._groups.reach(either(held, in_pool), first, last)
        self._decline(tracked, held, first, end)

    def _order_prefetch(
        self, request: Any, blocks: Sequence[tuple[int, int]], *, is_probe: bool = False
    ) -> int | None:
        new = [block for block in blocks if self._name(request, *block) not in self._prefetches]
        if not new:
            return None
        job = self._begin(request, None, new, is_probe=is_probe)
        self._prefetches.begin(job.job, job.names, self._agreement.ranks, is_probe=is_probe)
        self._orders.prefetches.append(job)
        return job.job

    def _release_prefetch(self, tracked: Tracked) -> None:
        if tracked.prefetch is not None:
            self._prefetches.release(tracked.prefetch)
            tracked.prefetch = None

    # --- storing --------------------------------------------------------------------------

    def build_orders(self, scheduler_output: Any) -> StepOrders:
        """The orders of this step, with the stores of the blocks that it fills."""
        for request_id in scheduler_output.preempted_req_ids or ():
            self._on_preempted(request_id)
        if self._reading:
            self._flush_given_away(compat.newly_allocated(scheduler_output))
        self._prefetch_waiting()
        resolve = compat.block_table(scheduler_output)
        prompt_tokens = pairs = 0
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            if (tracked := self._requests.get(request_id)) is None:
                continue
            tracked.is_scheduled = True
            self._release_prefetch(tracked)
            # The request's count is not yet advanced by this step.
            computed = tracked.request.num_computed_tokens
            if computed < tracked.request.num_prompt_tokens:
                prompt_tokens += num_scheduled
                pairs += attended(computed, computed + num_scheduled)
            if not self._is_answered(tracked):
                # A look-up under way may find the block in the pool: the next step decides.
                continue
            self._decline_unawaited(tracked)
            num_computed = computed + num_scheduled
            if any(
                num_computed // group.block_size > considered
                for group, considered in zip(self._groups, tracked.considered, strict=True)
            ):
                self._store_filled(tracked, resolve(request_id), num_computed)
        orders, self._orders = self._orders, StepOrders()
        if prompt_tokens:
            self._next_id += 1
            orders.step = self._next_id
            self._advisor.on_step(time.monotonic(), orders.step, prompt_tokens, pairs)
        orders.release = self._prefetches.take_released()
        if orders.loads or orders.stores or orders.prefetches:
            orders.namespaces = self._agreement.namespaces
        idle = scheduler_output.total_num_scheduled_tokens == 0 and self._only_loads_run()
        if idle:
            # Counted from here, as vLLM may hand out several steps before the first is done.
            orders.idle_until = time.monotonic() + IDLE_SECONDS
        compat.rest(idle)
        return orders

    def _only_loads_run(self) -> bool:
        """Whether the engine has nothing to do before a load ends: none of its requests is being
        computed, here or further down the pipeline, or is about to ask for a load."""
        if not self._loading or self._has_peers:
            return False
        return not any(
            tracked.is_scheduled or tracked.lookups
            for tracked in self._requests.values()
            if not tracked.request.is_finished()
        )

    def _flush_given_away(self, block_ids: Iterable[int]) -> None:
        jobs = {self._reading[block] for block in block_ids if block in self._reading}
        self._orders.flush.extend(jobs)

    def _store_filled(
        self, tracked: Tracked, block_ids: Sequence[Sequence[int]], num_computed: int
    ) -> None:
        """Orders the store of every block that is full after `num_computed` tokens.

        Only blocks whose hash is known count: the hash exists once all the block's tokens are
        final, so tokens that are merely speculated never get into a stored block.
        """
        if not self._is_shared(tracked.request):
            return
        new: list[tuple[int, int]] = []
        for position, group in enumerate(self._groups):
            hashes, table = self._hashes(tracked.request, group), block_ids[group.index]
            full = min(num_computed // group.block_size, len(hashes), len(table))
            for index in range(tracked.considered[position], full):
                name = block_name(position, hashes[index])
                is_new = name not in self._presence and name not in self._storing
                if is_new and table[index] != compat.NULL_BLOCK:
                    new.append((position, index))
            tracked.considered[position] = max(tracked.considered[position], full)
        if not new:
            return
        job = self._job(tracked.request, block_ids, new)
        self._storing.update(dict.fromkeys(job.names, job.job))
        self._store_jobs[job.job] = StoreJob(job, self._agreement.ranks)
        tracked.stores.add(job.job)
        for position, block in zip(job.groups, job.block_ids, strict=True):
            if self._groups[position].window is not None:
                self._reading[block] = job.job
        self._orders.stores.append(job)

    def _is_answered(self, tracked: Tracked) -> bool:
        return not tracked.lookups or self._answer(tracked) is not None

    def _on_preempted(self, request_id: str) -> None:
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        self._orders.flush.extend(tracked.stores)
        self._drop_lookup(tracked)
        tracked.is_scheduled = tracked.is_failed = False
        tracked.present = tracked.advice = None
        tracked.considered = [0] * len(self._groups)

    def _drop_lookup(self, tracked: Tracked) -> None:
        self._presence.drop(tracked.lookups)
        tracked.lookups, tracked.unawaited_from = [], None

    def on_request_finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> bool:
        """Orders the last stores; True if the blocks must be kept until they are read."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return False
        self._decline_unawaited(tracked)
        self._drop_lookup(tracked)
        self._release_prefetch(tracked)
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
        self._advisor.on_output(time.monotonic(), report.steps if report else ())
        if report is not None:
            self._host.update(report.held)
            for number, seconds in report.seconds.items():
                longest, missing = self._took.get(number, (0.0, 0))
                missing += report.missing_bytes.get(number, 0)
                self._took[number] = max(longest, seconds), missing
            for number, ranks in report.prefetched.items():
                if self._prefetches.on_done(number, ranks):
                    self._end_transfer(number)
            for name in report.lost:
                self._presence.remove(name)
            for name in report.foreign:
                self._presence.add_foreign(name)
            for request_id, names in report.unloaded.items():
                if (tracked := self._requests.get(request_id)) is not None:
                    tracked.unloaded |= names
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
        if state.unread:
            return
        for block in state.job.block_ids:
            if self._reading.get(block) == number:
                del self._reading[block]
        if (tracked := self._requests.get(state.job.request_id)) is not None:
            tracked.stores.discard(number)

    def _on_stored(self, number: int, results: list[list[bool]]) -> None:
        state = self._store_jobs[number]
        state.results.extend(results)
        if len(state.results) < self._agreement.ranks:
            return
        del self._store_jobs[number]
        for index, name in enumerate(state.job.names):
            self._storing.pop(name, None)
            if all(result[index] for result in state.results):
                self._presence.add(name)
                self._stats.count("stored_blocks")
                self._agreement.publish(self._store)

    def _end_transfer(self, number: int) -> None:
        self._advisor.on_end(number, *self._took.pop(number, (0.0, 0)))

    def _on_loaded(self, request_id: str) -> None:
        tracked = self._requests[request_id]
        job, tracked.load = tracked.load, None
        assert job is not None
        self._end_transfer(job.job)
        for name in job.names:
            self._loading.pop(name, None)
        if tracked.request.is_finished():
            del self._requests[request_id]
            return
        tracked.is_failed = bool(tracked.unloaded)
        first, end = tracked.offer
        if not tracked.unloaded:
            self._stats.count("loaded_tokens", end - first)
        elif len(self._groups) == 1:
            num_loaded = len(job.hashes) - len(tracked.unloaded)
            self._stats.count("loaded_tokens", num_loaded * self._groups[0].block_size)
        tracked.unloaded = set()

    # --- common ---------------------------------------------------------------------------

    def _hashes(self, request: Any, group: Group) -> Sequence[bytes]:
        return compat.block_hashes(request, self._hash_block_size, group.block_size)

    def _name(self, request: Any, position: int, index: int) -> bytes:
        return block_name(position, self._hashes(request, self._groups[position])[index])

    def _job(
        self,
        request: Any,
        block_ids: Sequence[Sequence[int]] | None,
        blocks: Sequence[tuple[int, int]],
        timeout: float = 0.0,
        pace: float = 0.0,
    ) -> BlockJob:
        """A job of blocks given by (group's position, index in the request)."""
        self._next_id += 1
        hashes = [self._hashes(request, group) for group in self._groups]
        return BlockJob(
            job=self._next_id,
            request_id=request.request_id,
            groups=tuple(position for position, _ in blocks),
            block_ids=()
            if block_ids is None
            else tuple(block_ids[self._groups[p].index][i] for p, i in blocks),
            timeout=timeout,
            pace=pace,
            hashes=tuple(bytes(hashes[p][i]) for p, i in blocks),
            parents=tuple(
                (bytes(hashes[p][i - 1]) if i else b"", i * self._groups[p].block_size)
                for p, i in blocks
            ),
            tenant=compat.tenant(request),
            adapter=compat.adapter(request),
        )

    def forget_presence(self) -> None:
        """Forgets which blocks are in the pool; look-ups will tell again."""
        self._presence.forget()

    def take_stats(self) -> PenstockStats | None:
        """Counters since the last call."""
        return self._stats.take()

    def shutdown(self) -> None:
        """Ends the look-up threads; unanswered look-ups are dropped."""
        self._presence.shutdown()
