"""The scheduler half: hands the engine's calls and the workers' reports to its parts.

`offering` decides what a request loads, and `loading` follows the loads. `storing` decides what is
stored, and `witnessing` how much of what is computed is compared with the pool. `prefetching`
fetches blocks ahead of a load, and `probing` fetches blocks only to measure the pool. `handover`
waits for blocks that another engine stores. `hints` reads what clients tell of their next requests.
The native catalogue knows which block is where.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from itertools import starmap
from typing import Any

from penstock._native import Catalogue, GroupSpec, attended
from penstock.vllm.adapters import NamedAdapters
from penstock.vllm.advisor import Advisor
from penstock.vllm.agreement import Agreement
from penstock.vllm.counters import Counters, Counts
from penstock.vllm.descriptions import Descriptions
from penstock.vllm.host import node_bytes, open_node_memory
from penstock.vllm.lookup_limit import LookupLimit
from penstock.vllm.messages import (
    IDLE_SECONDS,
    IDLE_TO_END_SECONDS,
    RankShare,
    StepOrders,
    WorkerReport,
)
from penstock.vllm.panics import take_panics
from penstock.vllm.roles import ROLES, Role
from penstock.vllm.scheduler import sources
from penstock.vllm.scheduler.advising import Advising
from penstock.vllm.scheduler.announcing import Announcing
from penstock.vllm.scheduler.block_holds import BlockHolds
from penstock.vllm.scheduler.events import Events, Removed, Stored
from penstock.vllm.scheduler.facts import (
    AdapterOf,
    Arrival,
    BlockTables,
    EngineBlocks,
    EngineFacts,
    Step,
)
from penstock.vllm.scheduler.handover import Handover
from penstock.vllm.scheduler.hints import Hints
from penstock.vllm.scheduler.keeping import Keeping
from penstock.vllm.scheduler.loading import Loading
from penstock.vllm.scheduler.lookup_waits import LookupWaits
from penstock.vllm.scheduler.lookups import Lookups
from penstock.vllm.scheduler.next_prompts import NextPrompts
from penstock.vllm.scheduler.node_memory import NodeMemory
from penstock.vllm.scheduler.offering import Offering
from penstock.vllm.scheduler.orders import Orders
from penstock.vllm.scheduler.patience import Patience
from penstock.vllm.scheduler.prefetches import Prefetches
from penstock.vllm.scheduler.prefetching import Prefetching
from penstock.vllm.scheduler.probing import Probing
from penstock.vllm.scheduler.promises import Promises, is_handed_over
from penstock.vllm.scheduler.requests import Phase, RequestState
from penstock.vllm.scheduler.retiring import Retiring
from penstock.vllm.scheduler.savings import Savings
from penstock.vllm.scheduler.sharing import Sharing
from penstock.vllm.scheduler.spans import spans_to
from penstock.vllm.scheduler.stores import Stores
from penstock.vllm.scheduler.storing import Storing
from penstock.vllm.scheduler.tiered_lookups import TieredLookups
from penstock.vllm.scheduler.transfers import Transfers
from penstock.vllm.scheduler.versions import Versions
from penstock.vllm.scheduler.weights import Weights
from penstock.vllm.scheduler.witnessing import Witnessing
from penstock.vllm.settings import DROP, Settings, tenant_name

logger = logging.getLogger("vllm.penstock")


class SchedulerHalf:
    """All requests of one engine."""

    def __init__(
        self,
        settings: Settings,
        facts: EngineFacts,
        agreement: Agreement,
        adapters: NamedAdapters,
        adapter_of: AdapterOf,
        role: Role = ROLES["kv_both"],
        limit: LookupLimit | None = None,
    ) -> None:
        """`limit` is that of look-ups; None for what the settings say, whatever the pool needs."""
        store = settings.open_pool("penstock-scheduler")
        groups = [
            GroupSpec(g.block_size, window=g.window, keeps_state=g.state is not None)
            for g in facts.groups
        ]
        catalogue = Catalogue(groups, facts.hash_tokens, drops_last=facts.drops_last_block)
        advisor = Advisor(facts.tokens_per_step, settings.lanes(facts.ranks).get)
        limit = limit or LookupLimit(settings.lookup_timeout)
        node = open_node_memory(settings.host_memory, "penstock-scheduler")
        spans = spans_to(settings.otlp_endpoint)
        orders = Orders(adapter_of)
        weights = Weights(rounding=facts.rounding)
        counters = Counters()
        self._settings = settings
        self._facts = facts
        # A step ahead may leave a state after a token that the session then drops.
        keeps_states = any(group.state is not None for group in facts.groups)
        self._shares_sessions = facts.names_sessions_anew and not keeps_states
        self._agreement = agreement
        self._role = role
        self._store = store
        self._node = node
        self._catalogue = catalogue
        self._advisor = advisor
        self._spans = spans
        self._orders = orders
        self._weights = weights
        self._counters = counters
        self._requests: dict[str, RequestState] = {}
        self._positions = {
            group.index: place
            for place, group in enumerate(facts.groups)
            if group.state is not None
        }
        self._pool_source = sources.source_of(settings.pool)
        self._descriptions = Descriptions(store, agreement.describe)
        sharing = Sharing(role, weights, adapters, adapter_of)
        node_memory = NodeMemory(node, catalogue, agreement)
        self._lookups = lookups = Lookups(store, catalogue, agreement, limit, counters)
        self._transfers = transfers = Transfers(settings, limit, advisor, counters)
        self._prefetches = Prefetches(catalogue, agreement, orders, transfers, node_memory)
        self._prefetching = Prefetching(catalogue, facts, role, self._prefetches, counters)
        self._probing = Probing(catalogue, agreement, advisor, lookups, self._prefetches, counters)
        self._patience = Patience(settings, limit, advisor)
        self._promises = Promises(catalogue, facts, agreement, sharing, counters)
        self._handover = Handover(
            catalogue,
            role,
            lookups,
            self._prefetching,
            self._promises,
            self._patience,
            counters,
        )
        savings = Savings(advisor, counters)
        self._tiered_lookups = TieredLookups(catalogue, node_memory, lookups, sharing, spans)
        self._lookup_waits = LookupWaits(
            catalogue, advisor, lookups, self._probing, savings, self._has_time
        )
        self._advising = Advising(catalogue, advisor, self._probing)
        self._witnessing = Witnessing(settings, catalogue, agreement, counters)
        self._offering = Offering(
            catalogue,
            sharing,
            self._tiered_lookups,
            self._handover,
            self._lookup_waits,
            self._advising,
            self._witnessing,
            self._prefetching,
            savings,
        )
        self._loading = Loading(
            catalogue, facts.groups, orders, transfers, savings, spans, counters
        )
        self._keeping = Keeping(settings, catalogue, agreement, store, counters)
        self._next_prompts = NextPrompts(
            catalogue, facts, role, agreement, lookups, self._prefetches, counters
        )
        self._hints = Hints(sharing, self._keeping, self._next_prompts, counters)
        self._events = (
            Events(settings, facts, agreement, store, limit) if facts.publishes_events else None
        )
        self._holds = BlockHolds(are_needed=facts.holds_blocks)
        announcing = Announcing(self._events, self._descriptions)
        self._stores = Stores(
            catalogue, agreement, weights, self._holds, announcing, self._witnessing, counters
        )
        self._storing = Storing(catalogue, facts, sharing, orders, self._stores, self._witnessing)
        self._retiring = Retiring(
            filter(None, (store, node)), counters, removes=settings.weight_updates == DROP
        )
        self.versions = Versions(
            settings,
            weights,
            agreement,
            catalogue,
            orders,
            self._descriptions,
            self._retiring,
            counters,
            forget=self._forget_found,
        )

    def accept_shares(self, shares: Mapping[tuple[int, int], RankShare]) -> None:
        """Takes in what every rank holds, keyed by (pipeline rank, tensor-parallel rank). Later
        calls change nothing.

        Raises:
            ConfigError: the shares do not make up the model's KV cache.
        """
        agreement = self._agreement
        if agreement.ranks:
            return
        agreement.accept(shares, node_bytes(self._node))
        self._catalogue.set_holdings(
            list(
                zip(
                    agreement.ranks_of_group,
                    agreement.block_bytes,
                    agreement.block_objects,
                    strict=True,
                )
            )
        )

    def bind(self, blocks: EngineBlocks) -> None:
        """Takes the engine's blocks."""
        blocks.watch_resets(self._on_reset)
        self._prefetching.is_cached = blocks.is_cached
        self._holds.engine_blocks = blocks

    # --- requests -------------------------------------------------------------------------

    def on_new_request(self, arrival: Arrival) -> None:
        """Starts the request's look-up."""
        request = arrival.request
        policy = self._settings.policy_for(arrival.params)
        label = tenant_name(arrival.params)
        state = RequestState(
            request,
            policy,
            arrival.salt,
            label,
            arrival.trace_headers,
            arrival.has_images,
            is_handed_over=is_handed_over(arrival.params),
            is_private=request.resumable and not self._shares_sessions,
        )
        # What a step computes while weights come in is of no weights that anybody else has.
        state.is_stale = self._weights.is_updating
        self._requests[state.id] = state
        self._catalogue.add(state.id, request.num_prompt_tokens, tenant=state.tenant)
        self._prefetching.note_arrival(state)
        self._handover.note_arrival(state, arrival.params)
        if arrival.params or arrival.hints:
            self._hints.note_arrival(state, arrival)
        self._tiered_lookups.start(state)

    def match(self, request_id: str, computed: int) -> int | None:
        """How many tokens to load after the first `computed` tokens; None while this is not known.
        The tokens are whole blocks in every group."""
        state = self._requests.get(request_id)
        return 0 if state is None else self._offering.match(state, computed)

    def on_allocated(self, request_id: str, tables: BlockTables, tokens: int) -> None:
        """The engine allocated the blocks in `tables`. The last of them are for the `tokens` tokens
        to load, from the last offer."""
        state = self._requests[request_id]
        self._loading.begin(state, tables, tokens)
        self._prefetches.release(state)

    def on_scheduled(self) -> None:
        """The engine computes a request in this step, and has no time to wait for others."""
        self._lookup_waits.end_moment()

    def promise(self, request_id: str) -> dict[str, Any] | None:
        """What the request's answer tells the engine that goes on with it, if one does."""
        state = self._requests.get(request_id)
        return None if state is None else self._promises.make(state)

    def hit_sources(self, request_id: str, tokens: int) -> dict[str, int]:
        """Where `tokens` tokens of the request's load come from, by vLLM's cache hit sources."""
        state = self._requests.get(request_id)
        host_bytes, pool_bytes = (0, 0) if state is None else state.load_bytes
        return sources.split(tokens, host_bytes, pool_bytes, self._pool_source)

    def on_finished(self, request_id: str, tables: BlockTables) -> bool:
        """Orders the request's last stores. Returns whether the engine must keep the request's
        blocks until the stores have read them."""
        state = self._requests.get(request_id)
        if state is None:
            return False
        state.phase = Phase.ENDED
        self._spans.abort(state)
        self._lookups.take_answers()
        self._probing.decline_unawaited()
        if state.load is None:
            self._storing.store_filled(state, tables, state.request.num_computed_tokens)
        self._keeping.on_finished(state)
        self._probing.forget(state)
        self._prefetching.forget(state)
        self._handover.forget(state)
        self._lookups.drop(state)
        self._catalogue.remove(request_id)
        if state.load is not None:
            self._loading.cancel(state.load.job)
            return False
        if not state.stores:
            del self._requests[request_id]
            return False
        self._orders.finish(request_id)
        return True

    # --- steps ----------------------------------------------------------------------------

    def build_orders(self, step: Step) -> StepOrders:
        """The orders of this step. They include stores of the blocks that the step fills."""
        for request_id in step.preempted:
            self._on_preempted(request_id)
        self._lookup_waits.end_step()
        self._witnessing.on_step(time.monotonic(), computes=not step.is_empty)
        self._storing.flush_given_away(step.new_blocks)
        self._lookups.take_answers()
        if self._handover.waits:
            self._handover.look_again()
        if self._next_prompts.waits:
            self._next_prompts.order()
        if self._events is not None:
            self._events.watch()
        self._prefetching.order_for_waiting(
            lambda state: not self._lookups.is_under_way(state), self._advising.advise
        )
        for request_id, index, tokens in step.states():
            if (position := self._positions.get(index)) is not None:
                self._catalogue.note_state(request_id, position, tokens)
        done = self._catalogue.step(
            step.requests,
            step.computed,
            step.tokens,
            are_final=not self._facts.speculates,
        )
        for place in done.started:
            state = self._requests[step.requests[place]]
            state.phase = Phase.RUNNING
            if (computed := step.computed[place]) > state.reached:
                self._catalogue.note_loaded(state.id, state.reached, computed)
            self._spans.end_without_load(state)
            self._prefetching.forget(state)
        self._probing.decline_unawaited()
        # An engine that does not store need not look up tables of blocks in each step.
        for place, computed in done.filled if self._role.stores else ():
            request_id = step.requests[place]
            self._storing.store_filled(
                self._requests[request_id], step.tables(request_id), computed
            )
        orders = self._orders.take()
        orders.computes = not step.is_empty
        if prompts := done.prompts:
            orders.step = self._orders.number()
            tokens = sum(end - first for first, end in prompts)
            pairs = sum(starmap(attended, prompts))
            # What a prompt waits for its next step is a part of computing it. So that step counts
            # from the end of the one before.
            goes_on = self._facts.holds_prompts and len(prompts) > len(done.started)
            began = None if goes_on else time.monotonic()
            self._advisor.on_step(began, orders.step, tokens, pairs)
        if orders.loads or orders.stores or orders.prefetches:
            orders.namespaces = self._agreement.namespaces
            orders.weights = self._weights.count
            orders.writer = self._weights.writer
            orders.changes = dict(self._weights.changes)
        if step.is_empty and self._only_loads_run():
            # Counted from now, because the engine may hand out several steps before the first is
            # done.
            now = time.monotonic()
            ends = self._transfers.is_one_to_end(now, now + IDLE_TO_END_SECONDS)
            orders.idle_until = now + (IDLE_TO_END_SECONDS if ends else IDLE_SECONDS)
        return orders

    def _on_preempted(self, request_id: str) -> None:
        state = self._requests.get(request_id)
        if state is None or state.phase is Phase.ENDED:
            return
        self._orders.flush(state.stores)
        self._lookups.begin_anew(state)
        self._probing.forget(state)
        state.begin_anew()
        state.is_stale &= self._weights.has_old_blocks

    def _has_time(self) -> bool:
        """Whether no request is being computed, here or further down the pipeline, and no other
        engine computes in step with this one."""
        if self._facts.has_peers:
            return False
        return not any(state.phase is Phase.RUNNING for state in self._requests.values())

    def _only_loads_run(self) -> bool:
        """Whether the engine has nothing to do before a load ends, or before another engine's
        blocks come.

        This is so if no request is being computed, here or further down the pipeline, and no
        request is about to ask for a load."""
        is_waiting = self._catalogue.loads or self._handover.waits
        if not is_waiting or not self._has_time():
            return False
        return not any(
            state.phase is Phase.WAITING
            and not self._handover.is_waiting(state)
            and self._lookups.is_under_way(state)
            for state in self._requests.values()
        )

    # --- results --------------------------------------------------------------------------

    def on_worker_output(
        self, report: WorkerReport | None, loaded: Iterable[str], freed: Iterable[str]
    ) -> None:
        """Takes in the workers' reports of a step."""
        steps = report.steps if report else ()
        if steps or not self._facts.holds_prompts:
            self._advisor.on_output(time.monotonic(), steps)
        if report is not None:
            self._take_in(report)
        for request_id in loaded:
            state = self._requests[request_id]
            self._loading.end(state)
            if state.phase is Phase.ENDED:
                del self._requests[request_id]
        for request_id in freed:
            self._requests.pop(request_id, None)

    def _take_in(self, report: WorkerReport) -> None:
        self.versions.on_changed(report.changes)
        weights = self._weights
        # The findings of jobs come before the ends of jobs, because a job is forgotten at its end.
        # What they find of weights that are gone says nothing about those of now.
        for number, positions in report.lost.items():
            if weights.is_old_job(number):
                continue
            self._catalogue.lose(number, list(positions))
            if self._events is not None:
                self._tell_lost(number, positions)
        for number, positions in report.foreign.items():
            if weights.is_old_job(number):
                continue
            self._catalogue.set_foreign(number, list(positions))
        self._spans.note_lost((*report.lost, *report.foreign))
        if report.weights == weights.count:
            self._catalogue.change_host(report.held)
        self._transfers.note(report)
        self._loading.note_unloaded(report.unloaded)
        for number, ranks in report.prefetched.items():
            self._prefetches.on_done(number, ranks)
        for number, ranks in report.released.items():
            self._stores.on_released(number, ranks)
        self._witnessing.on_report(report.witnessed, report.witness_seconds)
        for number, ranks in report.stored.items():
            self._stores.on_stored(
                number,
                ranks,
                report.unstored.get(number, set()),
                report.disagreed.get(number, set()),
            )

    def _tell_lost(self, number: int, positions: Iterable[int]) -> None:
        assert self._events is not None
        for state in self._requests.values():
            if state.load is not None and state.load.job == number:
                self._events.on_lost(state, state.load.blocks, positions)

    def take_events(self) -> list[Stored | Removed]:
        """What routers should know since the last call."""
        return [] if self._events is None else self._events.take()

    @property
    def events_have_content(self) -> bool:
        """Whether events hold what requests hold: token ids, names of images, sessions."""
        return self._settings.event_content

    @property
    def is_pool_local(self) -> bool:
        """Whether all of the pool is in this machine. A directory counts as such."""
        return sources.is_local(self._settings.pool)

    def on_transfers_ended(self) -> None:
        """No worker reads or writes the engine's blocks, and the engine takes all of them away."""
        self._orders.void()
        self._loading.give_up(
            state.load.job for state in self._requests.values() if state.load is not None
        )
        self._stores.free()

    def _forget_found(self, is_stale: bool) -> None:
        """What was found for requests, or is waited for, is of other namespaces. If `is_stale`,
        their blocks are of weights that are gone."""
        for state in self._requests.values():
            if state.phase is Phase.ENDED:
                continue
            state.is_stale |= is_stale
            self._lookups.drop(state)
            self._catalogue.set_miss(state.id)
            self._probing.forget(state)
            self._prefetching.forget(state)
            self._handover.forget(state)

    def _on_reset(self) -> None:
        """The engine's own prefix cache was emptied, and no request has blocks."""
        weights = self._weights
        weights.has_old_blocks = False
        if weights.is_updating:
            return
        for state in self._requests.values():
            if state.is_stale and state.phase is not Phase.ENDED:
                state.is_stale = False
                self._lookups.begin_anew(state)

    def on_encoder_reset(self) -> None:
        """The engine has forgotten what it made of images."""
        self._weights.has_old_encodings = False

    def forget_presence(self) -> None:
        """Forgets which blocks are in the pool. Later look-ups find out again."""
        self._catalogue.forget_pool()

    def take_counts(self) -> Counts | None:
        """The counts and measurements since the last call; None if there are none."""
        self._keeping.count()
        self._retiring.count()
        for place, count in take_panics().items():
            self._counters.count_at(place, "panics", count)
        return self._counters.take()

    def shutdown(self) -> None:
        """Ends the look-up threads, drops unanswered look-ups, and sends the last spans."""
        self._keeping.shutdown()
        self._next_prompts.shutdown()
        self._lookups.shutdown()
        if self._events is not None:
            self._events.shutdown()
        self._spans.shutdown()
