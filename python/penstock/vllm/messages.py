"""The messages between the two halves of the connector. Plain data, pickled by vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock._native import Blocks
from penstock.vllm.adapters import Adapter

Span = tuple[int, int, int, int]
"""Layers ``[0, 1)`` and KV heads ``[2, 3)`` by their index in the whole model."""


IDLE_SECONDS = 0.010
"""Seconds that workers are left alone if the engine has nothing to do before a load ends.

Otherwise vLLM asks the workers every millisecond, which takes processor time that the load needs. A
request that arrives meanwhile, or whose own load ends first, waits this long at most."""

IDLE_TO_END_SECONDS = 0.020
"""Seconds that workers are left alone if a load is expected to end within this time. They are then
not asked once more shortly before it does."""


@dataclass(frozen=True)
class BlockJob:
    """Blocks of one request to load, to prefetch or to store.

    ``job`` is unique in the life of the scheduler. A block's group is its position among the
    transferred groups. In a prefetch, block ids have no meaning.
    """

    job: int
    request_id: str
    blocks: Blocks
    timeout: float = 0.0
    """Seconds after which a load or prefetch is given up."""
    pace: float = 0.0
    """More seconds for a load, in proportion to the share of it that has come."""
    salt: bytes = field(default=b"", repr=False)
    """The request's cache salt, which is in its blocks' hashes; empty if it has none. It goes into
    the encryption."""
    tenant: str = ""
    """The tenant in whose namespaces the blocks are; empty for blocks that nobody owns."""
    is_awaited: bool = False
    """Whether another engine waits for the blocks of a store."""
    adapter: Adapter | None = None
    """The LoRA adapter in the blocks' hashes."""
    is_stale: bool = False
    """Whether its blocks are of weights that are gone. Then nothing is moved."""
    witnesses: int = 0
    """The number of a store's blocks, the last ones, that are compared with what the pool has of
    them, if it has them. This engine has computed them, on top of blocks that it has computed."""


@dataclass
class StepOrders:
    """Scheduler half → every worker half, with each step."""

    namespaces: tuple[bytes, ...] = ()
    """The namespace of each group."""
    weights: int = 0
    """Which weights the namespaces are of: how often weights had changed."""
    writer: int = 0
    """Who computes what is stored in the namespaces."""
    changes: Mapping[str, int] = field(default_factory=dict)
    """Worker → how many changes of its weights the scheduler half knew of. A worker that has seen
    more neither loads nor stores for these orders: they are of other weights."""
    computes: bool = True
    """Whether the step computes anything."""
    step: int = 0
    """The step's number, or zero. If it is not zero, workers report when the step is done."""
    idle_until: float = 0.0
    """If not zero, the engine has nothing to do before a load ends. It leaves its workers alone
    until this time of the machine's monotonic clock."""
    loads: list[BlockJob] = field(default_factory=list)
    stores: list[BlockJob] = field(default_factory=list)
    prefetches: list[BlockJob] = field(default_factory=list)
    """Blocks that a waiting request will load later. They may come into host memory before."""
    release: list[int] = field(default_factory=list)
    """Prefetches that nobody waits for any more, after the loads of this step."""
    cancel_loads: list[int] = field(default_factory=list)
    """Load jobs whose request is gone. They end as soon as nothing writes any more."""
    flush: list[int] = field(default_factory=list)
    """Store jobs whose source blocks are about to be overwritten."""
    finished: list[str] = field(default_factory=list)
    """Finished requests whose blocks must stay until their stores have read them."""


@dataclass
class WorkerReport:
    """Worker halves → scheduler half: the results of jobs since the last step.

    Blocks are named by their positions in their job.
    """

    steps: set[int] = field(default_factory=set)
    """Numbers of steps that are done; only steps whose orders have a number."""
    released: dict[int, int] = field(default_factory=dict)
    """Store job → number of ranks that have read its blocks."""
    stored: dict[int, int] = field(default_factory=dict)
    """Store job → number of ranks that are done with it."""
    unstored: dict[int, set[int]] = field(default_factory=dict)
    """Store job → positions of the blocks that some rank did not bring into the pool."""
    disagreed: dict[int, set[int]] = field(default_factory=dict)
    """Store job → positions of the blocks whose value in the pool was another than what this engine
    has computed. They are in `unstored`, too."""
    witnessed: int = 0
    """Blocks that were compared with the pool's, once for each rank."""
    witness_seconds: float = 0.0
    """Seconds that comparisons took since the last report, on the slowest rank."""
    lost: dict[int, set[int]] = field(default_factory=dict)
    """Load or prefetch → positions of the blocks that are not in the pool, or not whole, though a
    look-up found them."""
    foreign: dict[int, set[int]] = field(default_factory=dict)
    """Load or prefetch → positions of the blocks that are in the pool, but are encrypted with a key
    that this engine does not have."""
    unloaded: dict[int, set[int]] = field(default_factory=dict)
    """Load → positions of the blocks that it did not get, for whatever reason; all positions if a
    load counts as a whole."""
    held: bytes = b""
    """Blocks that came into the ranks' host memory or left it, each once for every rank. Packed by
    the native engine, for the native catalogue."""
    weights: int = 0
    """Which weights `held` is of, see :class:`StepOrders`."""
    changes: dict[str, int] = field(default_factory=dict)
    """Worker → how often it has seen its weights change, if it has."""
    prefetched: dict[int, int] = field(default_factory=dict)
    """Prefetch → number of ranks that are done with it."""
    seconds: dict[int, float] = field(default_factory=dict)
    """Load or prefetch → seconds that it took, on the slowest rank."""
    missing_bytes: dict[int, int] = field(default_factory=dict)
    """Load or prefetch → bytes of it that did not come."""

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return self == WorkerReport(weights=self.weights)

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
            (self.disagreed, other.disagreed),
            (self.lost, other.lost),
            (self.foreign, other.foreign),
            (self.unloaded, other.unloaded),
        ):
            for job, found in others.items():
                places.setdefault(job, set()).update(found)
        for job, seconds in other.seconds.items():
            self.seconds[job] = max(self.seconds.get(job, 0.0), seconds)
        self.witnessed += other.witnessed
        self.witness_seconds = max(self.witness_seconds, other.witness_seconds)
        self.steps |= other.steps
        self.changes |= other.changes
        if other.weights > self.weights:
            self.held, self.weights = b"", other.weights
        if other.weights == self.weights:
            self.held += other.held
        return self


@dataclass(frozen=True)
class GroupShare:
    """The part of a group that one worker holds.

    ``layers`` are indices in the whole model. ``block_bytes`` is the bytes of one block's KV in
    these layers. ``page_tokens`` is the tokens of one page as the attention backend sees it (its
    kernel block). ``interior`` is the order of heads and tokens in stored objects. ``packed_by``
    are the attention backends whose kernels pack the pages; none if pages are not packed.
    """

    layers: tuple[int, ...]
    block_bytes: int
    page_tokens: int
    interior: str
    content_bytes: int
    packed_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelShare:
    """The part of a model that one worker computes with, by what changes KV.

    ``weights`` begins with ``files:`` if it is of whole files, which is the same on all ranks. Or
    it is of what this rank has in memory, and begins with ``tensors:`` if that is every byte. It
    begins with ``version:`` if it is the name of an update, with a sample of what this rank has.
    ``buffers`` has a digest for each tensor that is not a weight, and for the settings of each
    rotary embedding. ``code`` has one for each module that is not vLLM's.
    """

    weights: str
    buffers: Mapping[str, str]
    code: Mapping[str, str]


@dataclass(frozen=True)
class ModelShares:
    """The parts of all models that one worker computes with."""

    model: ModelShare
    draft: ModelShare | None = None
    """The part of a drafter that keeps KV of its own; None if there is none."""


@dataclass(frozen=True)
class RankWeights:
    """One worker's answer to the question which weights it computes with now."""

    worker: str
    changes: int
    """The times that the worker has seen them change."""
    rank: tuple[int, int]
    """The worker's pipeline rank and tensor-parallel rank."""
    models: ModelShares | None
    """The worker's models, with these weights; None if it cannot tell."""


@dataclass(frozen=True)
class RankShare:
    """The part of the KV cache that one worker holds. The scheduler half learns it at start-up.

    ``span`` is None on a pipeline rank without attention layers. ``groups`` has None for a group
    without layers on this rank. ``layers_per_object`` is None if an object is all that a rank
    holds of a block.
    """

    span: Span | None
    num_blocks: int
    groups: tuple[GroupShare | None, ...]
    host_blocks: int
    """Blocks that the host memory of all ranks together holds."""
    slots: int
    """This rank's slots, for its part of these blocks."""
    layers_per_object: int | None = None
    models: ModelShares | None = None
    """What the rank's models are; None if the rank has not told yet."""
