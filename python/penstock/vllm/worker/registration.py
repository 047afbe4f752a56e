"""Registration of a rank: its layouts, its objects, its host memory, and the engine on them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock._native import Descriptor, EncryptionKeys, Engine, Store
from penstock.errors import ConfigError
from penstock.layout import objects as object_spans
from penstock.layout.geometry import Geometry, limit_objects, parse_geometry
from penstock.vllm.groups import Group
from penstock.vllm.host import (
    LEAST_BYTES,
    LEAST_ON_THE_WAY,
    default_host_bytes,
    host_blocks,
    machine_bytes,
    open_node_memory,
    stage_slots,
    step_blocks,
)
from penstock.vllm.messages import GroupShare, RankShare, Span
from penstock.vllm.settings import LOSSLESS, Settings
from penstock.vllm.worker.facts import KvMemory, Services, WorkerFacts

logger = logging.getLogger("vllm.penstock")

_LEAST_SLOTS = 4

_NO_POOL = "memory://?size=1MiB"
"""The pool of a rank that holds no KV. Nothing is ever stored there."""


@dataclass(frozen=True)
class Registered:
    """A rank's native engine, and the rank's share for the scheduler half."""

    engine: Engine
    share: RankShare


def register(
    settings: Settings, facts: WorkerFacts, memory: KvMemory, services: Services
) -> Registered:
    """Detects the layout of the registered memory and starts the native engine on it.

    A rank without attention layers gets an engine too. That engine finishes the rank's part of
    every job at once.

    Raises:
        Unavailable: the CUDA driver cannot be used.
        LayoutError: the memory's layout cannot be proven.
        ConfigError: the memory is not what vLLM configured.
    """
    layers = [
        view.layer
        for group, views in zip(facts.groups, memory.views, strict=True)
        for view in views
        if group.draft is None
    ]
    if not layers:
        return _register_nothing(facts)
    stage = _stage(facts, layers)
    span: Span = (*stage, *facts.own_heads)
    stages = [stage if group.draft is None else (0, group.draft.layers) for group in facts.groups]
    descriptors = {
        position: Descriptor.detect(
            views, head_start=facts.heads_of(facts.groups[position])[0], stage=stages[position]
        )
        for position, views in enumerate(memory.views)
        if views
    }
    layer_bytes = max(
        descriptor.block_bytes(descriptor.share)
        * descriptor.blocks
        // facts.num_blocks
        // len(descriptor.layers)
        for descriptor in descriptors.values()
    )
    geometry = _geometry(settings, facts, layer_bytes)
    if geometry.interior is not None:
        descriptors = {
            # Of a page that cannot be cut, slots and tokens mean nothing to another interior.
            position: descriptor
            if facts.groups[position].is_whole
            else descriptor.with_interior(geometry.interior)
            for position, descriptor in descriptors.items()
        }
    held = {
        position: _Held.of(facts, position, descriptor, stages[position], geometry)
        for position, descriptor in descriptors.items()
    }
    blocks, slots = _host_slots(settings, facts, stage, layer_bytes, geometry)
    with services.engine_cores():
        engine = _start_engine(settings, facts, held, slots)
    for position in range(len(facts.groups)):
        if (group := held.get(position)) is None:
            engine.register_elsewhere(position)
            continue
        engine.register(
            group.descriptor,
            position,
            spans=group.spans,
            pages_per_block=group.pages,
            replica=facts.replica_of(facts.groups[position]),
            cuda_device=memory.cuda_device,
            element=facts.groups[position].element,
            numbers=facts.groups[position].numbers,
            reads_tokens=facts.groups[position].draft is None and not facts.has_noisy_inputs,
            routes=facts.routes,
        )
    shares = tuple(
        held[position].share() if position in held else None
        for position in range(len(facts.groups))
    )
    share = RankShare(span, facts.num_blocks, shares, blocks, slots, geometry.layers)
    return Registered(engine, share)


def _register_nothing(facts: WorkerFacts) -> Registered:
    engine = Engine(Store.open(_NO_POOL), slot_bytes=1, slots=2, keep=False)
    for position in range(len(facts.groups)):
        engine.register_elsewhere(position)
    share = RankShare(None, facts.num_blocks, (None,) * len(facts.groups), 0, 0)
    return Registered(engine, share)


@dataclass(frozen=True)
class _Held:
    """This rank's part of a group."""

    descriptor: Descriptor
    pages: int
    """Number of the attention backend's pages in one of vLLM's blocks."""
    spans: Sequence[Span]
    """The objects that make up a block."""
    packed_by: tuple[str, ...]
    """The attention backends that pack the pages; none if pages are not packed."""

    @classmethod
    def of(
        cls,
        facts: WorkerFacts,
        position: int,
        descriptor: Descriptor,
        stage: tuple[int, int],
        geometry: Geometry,
    ) -> _Held:
        group = facts.groups[position]
        heads = facts.heads_of(group)
        pages, rest = divmod(descriptor.blocks, facts.num_blocks)
        # A page has one state, however many tokens have left it.
        tokens = group.block_size if group.state is None else 1
        if rest or descriptor.tokens * pages != tokens or descriptor.share[2:] != heads:
            raise ConfigError(
                f"vLLM registered {descriptor.blocks} pages of {descriptor.tokens} tokens with "
                f"heads {descriptor.share[2:]} for group {group.index} ({group.kind}), but "
                f"configured {facts.num_blocks} blocks of {tokens} tokens with heads {heads}"
            )
        layers, per_object = group.cut(geometry.layers, geometry.heads)
        spans = object_spans(
            (*stage, *heads), layers_per_object=layers, heads_per_object=per_object
        )
        own = [span for span in spans if descriptor.block_bytes(span)]
        _log_group(group, descriptor, pages, len(own))
        packed_by = () if group.packing is None else facts.backends.get(position, ())
        return cls(descriptor, pages, own, packed_by)

    @property
    def largest_object(self) -> int:
        return max(self.descriptor.block_bytes(span) for span in self.spans) * self.pages

    def share(self) -> GroupShare:
        return GroupShare(
            layers=tuple(self.descriptor.layers),
            block_bytes=self.descriptor.block_bytes(self.descriptor.share) * self.pages,
            page_tokens=self.descriptor.tokens,
            interior=self.descriptor.interior,
            content_bytes=self.descriptor.content_bytes,
            packed_by=self.packed_by,
        )


def _start_engine(
    settings: Settings, facts: WorkerFacts, held: Mapping[int, _Held], slots: int
) -> Engine:
    node = open_node_memory(settings.host_memory, "penstock-worker")
    lanes = settings.lanes(facts.ranks)
    return Engine(
        _open_store(settings),
        slot_bytes=max(group.largest_object for group in held.values()),
        slots=slots,
        node=node,
        keep=settings.host_tier,
        copy_lanes=lanes.copy,
        get_lanes=lanes.get,
        put_lanes=lanes.put,
        step_objects=_step_objects(facts, held),
        compress=settings.compression == LOSSLESS,
        store_wait=settings.store_wait,
        store_timeout=settings.store_timeout,
        trusts=True,
    )


def _open_store(settings: Settings) -> Store:
    store = settings.open_pool("penstock-worker")
    keys = EncryptionKeys.load(settings.encryption_key_file or None)
    if keys is None:
        return store
    (first, fingerprint), *others = keys.fingerprints
    logger.info(
        "Penstock: values are encrypted with key %s (fingerprint %s); %d others decrypt",
        first,
        fingerprint,
        len(others),
    )
    return store.encrypted(keys)


def _stage(facts: WorkerFacts, layers: Sequence[int]) -> tuple[int, int]:
    """The layers of this rank's stage. Not all of them need keep anything."""
    first, last = min(layers), max(layers)
    for start, end in facts.stages:
        if start <= first and last < end:
            return start, end
    raise ConfigError(
        f"vLLM registered layers {first} to {last}, which lie in none of the stages "
        f"{facts.stages}. A model that runs its layers several times is served in one stage: "
        "start it without --pipeline-parallel-size"
    )


def _geometry(settings: Settings, facts: WorkerFacts, layer_bytes: int) -> Geometry:
    geometry = parse_geometry(settings.pool_geometry, facts.layers, facts.heads)
    if geometry.layers is not None:
        return geometry
    return limit_objects(geometry, layer_bytes, facts.stages)


def _host_slots(
    settings: Settings,
    facts: WorkerFacts,
    stage: tuple[int, int],
    layer_bytes: int,
    geometry: Geometry,
) -> tuple[int, int]:
    """Blocks that the engine's host memory holds, and this rank's slots for them."""
    heads = facts.own_heads
    ranks = [stage_slots(part, heads, layer_bytes, geometry) for part in facts.stages]
    ranks *= facts.tensor_ranks
    step_bytes = _step_blocks(facts) * sum(rank.bytes_per_block for rank in ranks)
    least = LEAST_ON_THE_WAY if settings.host_memory else LEAST_BYTES
    host_bytes = settings.host_bytes or default_host_bytes(
        step_bytes, machine_bytes(), least_bytes=least
    )
    if host_bytes < 2 * step_bytes:
        logger.warning(
            "Penstock: what a step of %d tokens stores takes %s bytes; with less than twice "
            "that of host memory (penstock.host_bytes is %s) stores are dropped while the pool "
            "is slower than the model",
            facts.tokens_per_step,
            f"{step_bytes:,}",
            f"{host_bytes:,}",
        )
    blocks = host_blocks(host_bytes, ranks)
    own = stage_slots(stage, heads, layer_bytes, geometry)
    return blocks, max(_LEAST_SLOTS, blocks * own.per_block)


def _step_blocks(facts: WorkerFacts) -> int:
    return step_blocks(facts.tokens_per_step, [group.block_size for group in facts.groups])


def _step_objects(facts: WorkerFacts, held: Mapping[int, _Held]) -> int:
    """The most objects that this rank stores for a step. Each request in the step may fill one
    block more than its tokens alone would."""
    requests = facts.requests_per_step * len(facts.groups)
    per_block = max(len(group.spans) for group in held.values())
    return (_step_blocks(facts) + requests) * per_block


def _log_group(group: Group, descriptor: Descriptor, pages: int, objects: int) -> None:
    logger.info(
        "Penstock: group %d (%s): layout %s (contiguous: %s), layers %s, heads %d-%d, %d bytes a "
        "block in %d objects, %d pieces of memory",
        group.index,
        group.kind,
        descriptor.layout or "unnamed",
        descriptor.contiguity,
        ",".join(map(str, descriptor.layers)),
        *descriptor.share[2:],
        descriptor.block_bytes(descriptor.share) * pages,
        objects,
        len(descriptor.segments(0, descriptor.share)),
    )
