"""An engine's scheduler and its ranks in plain Python, for the scheduler half to be driven by.

Time is what the test makes of it: every load, prefetch and store ends on every rank when the test
says so, in any order. The pool is a real one in this process's memory.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.waiting import LIMIT, eventually
from penstock._native import tenant_namespace
from penstock.errors import ConfigError
from penstock.vllm.adapters import NamedAdapters
from penstock.vllm.agreement import Agreement
from penstock.vllm.groups import Group
from penstock.vllm.lookup_limit import LookupLimit
from penstock.vllm.messages import BlockJob, GroupShare, RankShare, StepOrders, WorkerReport
from penstock.vllm.model_facts import ModelFacts
from penstock.vllm.roles import ROLES
from penstock.vllm.scheduler import SchedulerHalf
from penstock.vllm.scheduler.facts import Arrival, EngineFacts, Step
from penstock.vllm.settings import Settings

HASH_TOKENS = 4
LAYERS_A_RANK = 2


@dataclass
class Asked:
    """A request."""

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    resumable: bool = False
    block_hashes: list[bytes] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    """By group, the engine's blocks."""

    def __post_init__(self) -> None:
        # Answers are added to it, not to what a test asks with.
        self.tokens = list(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def hash_blocks(self) -> None:
        """As the engine does when a token comes."""
        while (len(self.block_hashes) + 1) * HASH_TOKENS <= len(self.tokens):
            before = self.block_hashes[-1] if self.block_hashes else b"first"
            start = len(self.block_hashes) * HASH_TOKENS
            text = repr(self.tokens[start : start + HASH_TOKENS]).encode()
            self.block_hashes.append(hashlib.sha256(before + text).digest())


def hashes_of(request: Asked, tokens: list[int]) -> list[bytes]:
    """The hashes of another prompt's blocks."""
    if any(type(token) is not int or token < 0 for token in tokens):
        raise ConfigError("no tokens")
    prompt = Asked("", tokens, len(tokens))
    prompt.hash_blocks()
    return prompt.block_hashes


@dataclass
class Part:
    """What one rank has yet to do of a job."""

    rank: int
    kind: str
    job: BlockJob
    is_read: bool = False


Name = tuple[int, bytes]
"""A group's position and a block's hash."""


class PlainEngine:
    """One engine with `ranks` pipeline ranks of two layers each; `more` are settings. Unless they
    say so, it compares nothing with the pool."""

    def __init__(
        self,
        groups: Sequence[Group],
        ranks: int = 1,
        policy: str = "always",
        role: str = "kv_both",
        announces: bool = False,
        has_hashes: bool = False,
        holds_blocks: bool = False,
        holds_prompts: bool = False,
        names_sessions_anew: bool = True,
        pool: str = "memory://?size=64MiB",
        limit: LookupLimit | None = None,
        **more: Any,
    ) -> None:
        self.groups = tuple(groups)
        settings = Settings(
            pool,
            load_policy=policy,
            **{"lookup_timeout": LIMIT, "load_timeout": LIMIT, "witness_time": 0, **more},
        )
        facts = EngineFacts(
            self.groups,
            HASH_TOKENS,
            64,
            False,
            0,
            holds_blocks=holds_blocks,
            holds_prompts=holds_prompts,
            names_sessions_anew=names_sessions_anew,
            publishes_events=announces,
            hash_prompt=hashes_of if has_hashes else None,
        )
        layers = ranks * LAYERS_A_RANK
        model = ModelFacts("plain", (ranks, 1), (layers, 1), {"config": "plain"})
        self.agreement = Agreement(settings, model, self.groups, lambda: b"seed")
        self.half = SchedulerHalf(
            settings,
            facts,
            self.agreement,
            NamedAdapters(),
            lambda request: None,
            ROLES[role],
            limit,
        )
        share = {
            (rank, 0): RankShare(
                (rank * LAYERS_A_RANK, (rank + 1) * LAYERS_A_RANK, 0, 1),
                100,
                tuple(
                    GroupShare(
                        tuple(range(rank * LAYERS_A_RANK, (rank + 1) * LAYERS_A_RANK)),
                        1024,
                        group.block_size,
                        "HNC",
                        16,
                    )
                    for group in groups
                ),
                64,
                64,
            )
            for rank in range(ranks)
        }
        self.half.accept_shares(share)
        self.ranks = ranks
        self.requests: dict[str, Asked] = {}
        self.parts: list[Part] = []
        self.orders: list[StepOrders] = []
        self.pool: set[Name] = set()
        """Blocks that the pool has."""
        self.names_of_store: dict[int, list[Name]] = {}
        self._stored: dict[int, set[Name]] = {}
        """By store: its blocks that no rank has failed to put."""
        self._next_block = itertools.count(1)
        self._loads_left: dict[int, int] = {}
        self._unread: dict[str, set[tuple[int, int]]] = {}
        self._waits_for_stores: set[str] = set()

    # --- the pool -------------------------------------------------------------------------

    def keys(self, name: Name, tenant: str = "") -> Iterator[bytes]:
        """Keys of a block's objects, of a tenant or of nobody."""
        group, block_hash = name
        namespace = self.agreement.namespaces[group]
        if tenant:
            namespace = tenant_namespace(namespace, tenant)
        for span in self.agreement.spans[group]:
            yield namespace + block_hash + struct.pack("<4H", *span)

    def put(self, name: Name, tenant: str = "") -> None:
        """Puts a block into the pool, as another engine would."""
        for key in self.keys(name, tenant):
            self.half._store.put(key, b"value", timeout=LIMIT)
        self.pool.add(name)

    def _remove(self, name: Name, tenant: str) -> None:
        self.half._store.remove(list(self.keys(name, tenant)), timeout=LIMIT)
        self.pool.discard(name)

    def put_prompt(
        self, tokens: Sequence[int], groups: Sequence[int] = (0,), tenant: str = ""
    ) -> None:
        """Puts all blocks of a prompt, in some groups."""
        prompt = Asked("", tokens, len(tokens))
        prompt.hash_blocks()
        for group in groups:
            for block_hash in self.names(prompt, group):
                self.put((group, block_hash), tenant)

    def names(self, request: Asked, group: int) -> list[bytes]:
        """Hashes of the request's full blocks in a group."""
        each = self.groups[group].block_size // HASH_TOKENS
        return request.block_hashes[each - 1 :: each]

    # --- requests -------------------------------------------------------------------------

    def ask(
        self,
        request_id: str,
        tokens: Sequence[int],
        params: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        salt: bytes = b"",
        hints: Mapping[str, Any] | None = None,
        has_images: bool = False,
        *,
        resumable: bool = False,
    ) -> Asked:
        """A request comes. Its block hashes do not hold the salt."""
        request = Asked(request_id, tokens, len(tokens), resumable=resumable)
        request.hash_blocks()
        self.requests[request_id] = request
        self.half.on_new_request(Arrival(request, params, salt, trace_headers, hints, has_images))
        return request

    def match(self, request: Asked, computed: int = 0) -> int | None:
        """What is offered, once the look-up has been answered; None if a load of another request is
        waited for."""
        found: int | None = None

        def is_answered() -> bool:
            nonlocal found
            found = self.half.match(request.request_id, computed)
            return found is not None or not self.half._catalogue.is_asked(request.request_id)

        eventually(is_answered, pause=0.0005)
        return found

    def allocate(self, request: Asked, tokens: int) -> None:
        """Gives the request blocks for so many tokens in all."""
        if not request.tables:
            request.tables = [[] for _ in self.groups]
        for group, table in zip(self.groups, request.tables, strict=True):
            while len(table) * group.block_size < tokens:
                table.append(next(self._next_block))

    def load(self, request: Asked, first: int, tokens: int) -> None:
        """Takes an offer."""
        self.allocate(request, first + tokens)
        self.half.on_allocated(request.request_id, self._by_index(request), tokens)

    def _by_index(self, request: Asked) -> list[list[int]]:
        tables: list[list[int]] = [[]] * (1 + max(group.index for group in self.groups))
        for group, table in zip(self.groups, request.tables, strict=True):
            tables[group.index] = table
        return tables

    def step(self, tokens: dict[str, int], preempted: Sequence[str] = ()) -> StepOrders:
        """Computes so many tokens of each request; those whose prompt is done get one more."""
        for request_id in preempted:
            self.requests[request_id].tables = []
            self.requests[request_id].num_computed_tokens = 0
        asked = [self.requests[request_id] for request_id in tokens]
        for request in asked:
            self.allocate(request, request.num_computed_tokens + tokens[request.request_id])
        orders = self.half.build_orders(
            Step(
                requests=list(tokens),
                computed=[request.num_computed_tokens for request in asked],
                tokens=tokens,
                preempted=preempted,
                tables=lambda request_id: self._by_index(self.requests[request_id]),
                new_blocks=lambda: (),
            )
        )
        self._take_in(orders)
        for request in asked:
            request.num_computed_tokens += tokens[request.request_id]
            if request.num_computed_tokens == request.num_tokens:
                request.tokens.append(request.num_tokens)
                request.hash_blocks()
        return orders

    def finish(self, request: Asked) -> bool:
        """The request is done, or gone; whether its blocks are still to be read."""
        self.allocate(request, 0)
        return self.half.on_finished(request.request_id, self._by_index(request))

    # --- ranks ----------------------------------------------------------------------------

    def _take_in(self, orders: StepOrders) -> None:
        self.orders.append(orders)
        for kind, jobs in (
            ("load", orders.loads),
            ("prefetch", orders.prefetches),
            ("store", orders.stores),
        ):
            for job in jobs:
                self.parts += [Part(rank, kind, job) for rank in range(self.ranks)]
                if kind == "load":
                    self._loads_left[job.job] = self.ranks
                if kind == "store":
                    self.names_of_store[job.job] = self._names_of(job)
                    self._stored[job.job] = set(self.names_of_store[job.job])
                    unread = self._unread.setdefault(job.request_id, set())
                    unread |= {(job.job, rank) for rank in range(self.ranks)}
        for number in orders.flush:
            for part in self.parts:
                if part.kind == "store" and part.job.job == number and not part.is_read:
                    self._read(part)
        self._waits_for_stores |= set(orders.finished)

    def _names_of(self, job: BlockJob) -> list[Name]:
        request = self.requests[job.request_id]
        names = {
            block: (position, block_hash)
            for position, table in enumerate(request.tables)
            for block, block_hash in zip(table, self.names(request, position), strict=False)
        }
        return [names[block] for block in job.blocks.block_ids]

    def _read(self, part: Part) -> None:
        part.is_read = True
        self._unread[part.job.request_id].discard((part.job.job, part.rank))
        self._tell(WorkerReport(released={part.job.job: 1}))

    def end(
        self,
        part: Part,
        missing: Sequence[int] = (),
        late: Sequence[int] = (),
        disagreed: Sequence[int] = (),
        witnessed: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """A rank is done with a job, but for the blocks at these positions. `missing` ones are not
        in the pool; `late` ones of a load or prefetch did not come in time. The pool had
        `disagreed` ones of a store otherwise. So many were compared, which took so long."""
        job = part.job.job
        if part.kind == "store" and not part.is_read:
            self._read(part)
        self.parts.remove(part)
        if part.kind == "store":
            names = self._stored[job]
            gone = {*missing, *disagreed}
            names -= {name for i, name in enumerate(self.names_of_store[job]) if i in gone}
            for place in disagreed:
                self._remove(self.names_of_store[job][place], part.job.tenant)
            if not any(other.job.job == job for other in self.parts):
                for name in names:
                    self.put(name, part.job.tenant)
            report = WorkerReport(stored={job: 1}, unstored={job: gone})
            report.disagreed = {job: set(disagreed)} if disagreed else {}
            report.witnessed, report.witness_seconds = witnessed, seconds
            self._tell(report)
            return
        report = WorkerReport(seconds={job: 0.001})
        if missing:
            report.lost = {job: set(missing)}
        unloaded = {*missing, *late}
        if unloaded:
            report.missing_bytes = {job: 1024 * len(unloaded)}
        if part.kind == "prefetch":
            report.prefetched = {job: 1}
            self._tell(report)
            return
        report.unloaded = {job: unloaded} if unloaded else {}
        self._loads_left[job] -= 1
        over = not self._loads_left[job]
        self._tell(report, [part.job.request_id] if over else [])

    def _tell(self, report: WorkerReport, loaded: Sequence[str] = ()) -> None:
        freed = [name for name in self._waits_for_stores if not self._unread.get(name)]
        self._waits_for_stores -= set(freed)
        self.half.on_worker_output(report, loaded, freed)

    def settle(self, chance: random.Random | None = None) -> None:
        """Ends all that is under way, in order or in any order; several steps if need be."""
        while self.parts or self._waits_for_stores:
            parts = list(self.parts)
            if chance is not None:
                chance.shuffle(parts)
            for part in parts:
                self.end(part)
            if not self.parts and self._waits_for_stores:
                self._tell(WorkerReport())
