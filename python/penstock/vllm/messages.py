"""What the two halves of the connector say to each other. Plain data, pickled by vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock._native import Blocks
from penstock.vllm.adapters import Adapter

Span = tuple[int, int, int, int]
"""Layers ``[0, 1)`` and KV heads ``[2, 3)`` by their index in the whole model."""


IDLE_SECONDS = 0.005
"""How long workers are left alone if the engine has nothing to do before a load ends: vLLM would
come and ask every millisecond, and take the processor time that the load needs. A request that
arrives meanwhile, or whose own load ends before another's, waits so long at most."""


@dataclass(frozen=True)
class BlockJob:
    """Blocks of one request to load, to prefetch or to store.

    ``job`` is unique in the life of the scheduler. The blocks' groups are positions among those
    that are transferred; of a prefetch the block ids mean nothing.
    """

    job: int
    request_id: str
    blocks: Blocks
    timeout: float = 0.0
    """Seconds until a load or prefetch is given up."""
    pace: float = 0.0
    """Seconds that a load gets beyond, in proportion to what has come of it."""
    tenant: bytes = field(default=b"", repr=False)
    """What the request's tenant, and nobody else, gives with requests: goes into the encryption."""
    adapter: Adapter | None = None
    """The LoRA adapter that the blocks are named by."""


@dataclass
class StepOrders:
    """Scheduler half → every worker half, with each step."""

    namespaces: tuple[bytes, ...] = ()
    """Of each group."""
    step: int = 0
    """If not zero, workers name it when they report that the step is done."""
    idle_until: float = 0.0
    """The engine has nothing to do before a load ends, and leaves its workers alone until this time
    of the machine's monotonic clock."""
    loads: list[BlockJob] = field(default_factory=list)
    stores: list[BlockJob] = field(default_factory=list)
    prefetches: list[BlockJob] = field(default_factory=list)
    """Blocks that a request which waits will load: host memory may have them before."""
    release: list[int] = field(default_factory=list)
    """Prefetches that nobody waits for any more, after the loads of this step."""
    cancel_loads: list[int] = field(default_factory=list)
    """Load jobs whose request is gone; they end as soon as nothing writes any more."""
    flush: list[int] = field(default_factory=list)
    """Store jobs whose source blocks are about to be overwritten."""
    finished: list[str] = field(default_factory=list)
    """Requests whose blocks wait for their stores to have been read."""


@dataclass
class WorkerReport:
    """Worker halves → scheduler half: what became of jobs since the last step."""

    steps: set[int] = field(default_factory=set)
    """Steps that asked for it and are done."""
    released: dict[int, int] = field(default_factory=dict)
    """Store job → number of ranks that have read its blocks."""
    stored: dict[int, int] = field(default_factory=dict)
    """Store job → number of ranks that are done with it."""
    unstored: dict[int, set[int]] = field(default_factory=dict)
    """Store job → places of the blocks that some rank did not bring into the pool."""
    lost: dict[int, set[int]] = field(default_factory=dict)
    """Load or prefetch → places of the blocks that are not in the pool, or not whole, though a
    look-up found them."""
    foreign: dict[int, set[int]] = field(default_factory=dict)
    """Load or prefetch → places of the blocks that are in the pool, encrypted with a key that this
    engine does not have."""
    unloaded: dict[int, set[int]] = field(default_factory=dict)
    """Load → places of the blocks that it did not get, for whatever reason; all of them where a
    load counts as a whole."""
    held: bytes = b""
    """What came into ranks' host memory, and what went, block by block, each once for every rank:
    packed by the native engine, for the native catalogue."""
    prefetched: dict[int, int] = field(default_factory=dict)
    """Prefetch → ranks that are done with it."""
    seconds: dict[int, float] = field(default_factory=dict)
    """Load or prefetch → how long it took, on the rank where that was longest."""
    missing_bytes: dict[int, int] = field(default_factory=dict)
    """Load or prefetch → bytes of it that did not come."""

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return self == WorkerReport()

    def merge(self, other: WorkerReport) -> WorkerReport:
        """Adds another rank's report to this one."""
        for sums, more in (
            (self.released, other.released),
            (self.stored, other.stored),
            (self.prefetched, other.prefetched),
            (self.missing_bytes, other.missing_bytes),
        ):
            for job, amount in more.items():
                sums[job] = sums.get(job, 0) + amount
        for places, others in (
            (self.unstored, other.unstored),
            (self.lost, other.lost),
            (self.foreign, other.foreign),
            (self.unloaded, other.unloaded),
        ):
            for job, found in others.items():
                places.setdefault(job, set()).update(found)
        for job, seconds in other.seconds.items():
            self.seconds[job] = max(self.seconds.get(job, 0.0), seconds)
        self.steps |= other.steps
        self.held += other.held
        return self


@dataclass(frozen=True)
class GroupShare:
    """What one worker holds of a group.

    ``layers`` are indices in the whole model; ``block_bytes`` is the KV of one block in them;
    ``page_tokens`` the tokens of one page as the attention backend sees it (its kernel block);
    ``interior`` the order of heads and tokens in stored objects.
    """

    layers: tuple[int, ...]
    block_bytes: int
    page_tokens: int
    interior: str
    content_bytes: int


@dataclass(frozen=True)
class RankShare:
    """What one worker holds, told to the scheduler half at start-up.

    ``span`` is None on a pipeline rank without attention layers; ``groups`` has None for a group
    without layers on this rank. ``layers_per_object`` is None where an object is all that a rank
    holds.
    """

    span: Span | None
    num_blocks: int
    groups: tuple[GroupShare | None, ...]
    host_blocks: int
    """Blocks that the host memory of all ranks together holds."""
    slots: int
    """This rank's, for its part of them."""
    layers_per_object: int | None = None
