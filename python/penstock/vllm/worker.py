"""The worker half: turns the scheduler half's orders into engine jobs and reports them.

It holds no policy. No call waits for I/O while there is anything to compute. `begin_step` waits for
copies in progress (memory speed) when vLLM is about to overwrite their source, and while the engine
has nothing to do before a load ends, `poll` sleeps for some milliseconds at most.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock._native import Descriptor, EncryptionKeys, Engine, Fence, Store
from penstock.errors import ConfigError, Full
from penstock.layout import objects as object_spans
from penstock.layout.geometry import Geometry, limit_objects, parse_geometry
from penstock.vllm import compat
from penstock.vllm.adapters import LoadedAdapters
from penstock.vllm.groups import Group
from penstock.vllm.host import (
    HeldParts,
    default_host_bytes,
    host_blocks,
    machine_bytes,
    stage_slots,
    step_blocks,
)
from penstock.vllm.messages import (
    CHUNK_BYTES,
    IDLE_SECONDS,
    BlockJob,
    GroupShare,
    RankShare,
    Span,
    StepOrders,
    WorkerReport,
    block_name,
)
from penstock.vllm.settings import Settings
from penstock.vllm.stats import PenstockStats

logger = logging.getLogger("vllm.penstock")

_Outcome = tuple[str, int]
"""What became of an object, and its bytes."""

NAMESPACE_BYTES = 16
"""Bytes of a namespace at a key's beginning."""

_ARRIVED = ("loaded", "kept")
"""Outcomes of objects that came, from the pool or from the host tier."""

_FOREIGN = ("rejected:encrypted", "rejected:unknown_key")
"""Outcomes of values that stay in the pool, since engines with other keys may read them."""

_MIN_SLOTS = 4
_FLUSH_TIMEOUT = 10.0


@dataclass(frozen=True)
class _Part:
    """This rank's part of a group."""

    parts_per_block: int
    """vLLM's block is so many pages of the attention backend's."""
    key_tails: tuple[bytes, ...]
    """The end of the key of each object that makes up a block."""


class WorkerHalf:
    """One rank's share of the KV cache, its engine, and its jobs."""

    def __init__(self, settings: Settings, vllm_config: Any, kv_cache_config: Any) -> None:
        self._settings = settings
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._groups = compat.transfer_groups(vllm_config, kv_cache_config)
        self._whole_loads = len(self._groups) > 1 or not compat.continues_prefixes(vllm_config)
        """Whether a load that misses a block is of no use: vLLM knows no part of it then."""
        self._adapters = LoadedAdapters()
        if vllm_config.lora_config is not None:
            compat.watch_adapters(vllm_config, self._adapters)
        self._engine: Engine | None = None
        self._share: RankShare | None = None
        self._parts: list[_Part | None] = []
        self._replica = (0, 1)
        self._cuda_device: int | None = None
        """Where the KV cache is; None for host memory."""
        self._before_step: Fence | None = None
        """Behind all that was computed before this step."""
        self._idle_until = 0.0
        """When the engine wants an answer, though no load has ended; long ago as a rule."""
        self._loads: dict[int, BlockJob] = {}
        self._stores: dict[int, BlockJob] = {}
        self._prefetches: dict[int, BlockJob] = {}
        self._held = HeldParts(())
        self._namespaces: dict[bytes, int] = {}
        """Group by namespace."""
        self._refused: list[tuple[int, str, list[_Outcome], float]] = []
        """Completions of jobs that the engine, at its bound, did not take."""
        self._unread: dict[str, set[int]] = {}
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._report = WorkerReport()
        self._has_warned = False
        """Whether the log says already that there are values that cannot be decrypted."""
        self._stats = PenstockStats()

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Detects the layout of the registered tensors and starts the native engine on them.

        Raises:
            ConfigError: the tensors are on a device without a copy executor.
            Unavailable: the CUDA driver cannot be used.
            LayoutError: the tensors' layout cannot be proven.
        """
        tp_rank = compat.tp_rank()
        heads = compat.kv_head_range(self._vllm_config, tp_rank)
        self._replica = compat.kv_replica(self._vllm_config, tp_rank)
        num_blocks = self._kv_cache_config.num_blocks
        tensors = [
            {
                compat.layer_index(name): kv_caches[name]
                for name in group.layer_names
                if name in kv_caches
            }
            for group in self._groups
        ]
        layers = [layer for group in tensors for layer in group]
        if not layers:
            self._share = RankShare(None, num_blocks, (None,) * len(self._groups), 0, 0)
            return
        self._cuda_device = compat.cuda_device(
            {tensor.device for group in tensors for tensor in group.values()}
        )
        stage = (min(layers), max(layers) + 1)
        span: Span = (*stage, *heads)
        descriptors = {
            position: _detect(views, heads, stage)
            for position, views in enumerate(tensors)
            if views
        }
        layer_bytes = self._layer_bytes(descriptors)
        geometry = self._geometry(layer_bytes)
        if geometry.interior is not None:
            descriptors = {
                position: descriptor.with_interior(geometry.interior)
                for position, descriptor in descriptors.items()
            }
        spans = object_spans(
            span, layers_per_object=geometry.layers, heads_per_object=geometry.heads
        )
        shares: list[GroupShare | None] = []
        object_bytes = 0
        for position, group in enumerate(self._groups):
            descriptor = descriptors.get(position)
            if descriptor is None:
                self._parts.append(None)
                shares.append(None)
                continue
            parts = _parts_per_block(descriptor, group, num_blocks, heads)
            own = [part for part in spans if descriptor.block_bytes(part)]
            object_bytes = max(object_bytes, *(descriptor.block_bytes(p) * parts for p in own))
            self._parts.append(_Part(parts, tuple(struct.pack("<4H", *part) for part in own)))
            shares.append(
                GroupShare(
                    layers=tuple(descriptor.layers),
                    block_bytes=descriptor.block_bytes(span) * parts,
                    page_tokens=descriptor.tokens,
                    interior=descriptor.interior,
                    content_bytes=descriptor.content_bytes,
                )
            )
            _log_group(group, descriptor, parts, len(own))
        blocks, slots = self._host_slots(stage, heads, layer_bytes, geometry)
        with compat.operators_cores():
            self._engine = Engine(
                self._open_store(),
                slot_bytes=object_bytes,
                slots=slots,
                keep=self._settings.host_tier,
                copy_lanes=self._settings.copy_lanes,
                get_lanes=self._settings.get_lanes,
                put_lanes=self._settings.put_lanes,
                step_objects=self._step_objects(),
            )
        for position, descriptor in descriptors.items():
            self._engine.register(descriptor, position, cuda_device=self._cuda_device)
        self._held = HeldParts([0 if p is None else len(p.key_tails) for p in self._parts])
        self._share = RankShare(span, num_blocks, tuple(shares), blocks, slots, geometry.layers)

    def _open_store(self) -> Store:
        store = Store.open(self._settings.pool, client_name="penstock-worker").guarded()
        keys = EncryptionKeys.load(self._settings.encryption_key_file or None)
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

    def _layer_bytes(self, descriptors: Mapping[int, Descriptor]) -> int:
        """One layer's part of a block on this rank, in the group where it is largest."""
        largest = 0
        for position, descriptor in descriptors.items():
            pages = self._groups[position].block_size // descriptor.tokens
            whole = descriptor.block_bytes(descriptor.share) * pages
            largest = max(largest, whole // len(descriptor.layers))
        return largest

    def _geometry(self, layer_bytes: int) -> Geometry:
        geometry = parse_geometry(
            self._settings.pool_geometry, *compat.model_extent(self._vllm_config)
        )
        if geometry.layers is not None:
            return geometry
        return limit_objects(geometry, layer_bytes, compat.stages(self._vllm_config))

    def _host_slots(
        self, stage: tuple[int, int], heads: tuple[int, int], layer_bytes: int, geometry: Geometry
    ) -> tuple[int, int]:
        """Blocks that the engine's host memory holds, and this rank's slots for them."""
        stages = compat.stages(self._vllm_config)
        ranks = [stage_slots(part, heads, layer_bytes, geometry) for part in stages]
        ranks *= self._vllm_config.parallel_config.tensor_parallel_size
        step_bytes = self._step_blocks() * sum(rank.bytes_per_block for rank in ranks)
        host_bytes = self._settings.host_bytes or default_host_bytes(step_bytes, machine_bytes())
        if host_bytes < 2 * step_bytes:
            logger.warning(
                "Penstock: what a step of %d tokens stores takes %s bytes; with less than twice "
                "that of host memory (penstock.host_bytes is %s) stores are dropped while the pool "
                "is slower than the model",
                compat.tokens_per_step(self._vllm_config),
                f"{step_bytes:,}",
                f"{host_bytes:,}",
            )
        blocks = host_blocks(host_bytes, ranks)
        own = stage_slots(stage, heads, layer_bytes, geometry)
        return blocks, max(_MIN_SLOTS, blocks * own.per_block)

    def _step_blocks(self) -> int:
        sizes = [group.block_size for group in self._groups]
        return step_blocks(compat.tokens_per_step(self._vllm_config), sizes)

    def _step_objects(self) -> int:
        """Most objects that this rank stores of a step: each request in it may fill one block more
        than its tokens do."""
        requests = compat.requests_per_step(self._vllm_config) * len(self._groups)
        per_block = max(len(part.key_tails) for part in self._parts if part is not None)
        return (self._step_blocks() + requests) * per_block

    @property
    def share(self) -> RankShare | None:
        """What this rank holds; None before the KV cache is registered."""
        return self._share

    def begin_step(self, orders: StepOrders) -> None:
        """Called before anything of the step is computed. Returns when none of the jobs to flush
        reads its blocks any more.

        What was told to the device until now may read the blocks that the step's loads are for,
        since they were others' before; of what it is told later nothing touches them, as vLLM does
        not zero blocks that will be loaded (`get_loaded_kv_cache_group_ids`).
        """
        if orders.loads:
            self._before_step = self._raise_fence()
        jobs = [job for job in orders.flush if job in self._stores]
        if jobs and not self._require_engine().wait_released(jobs, _FLUSH_TIMEOUT):
            raise RuntimeError(
                f"stores of preempted requests still read their blocks after {_FLUSH_TIMEOUT} s"
            )

    def start_loads(self, orders: StepOrders) -> None:
        """Submits the step's loads and cancellations."""
        self._idle_until = orders.idle_until
        if orders.step:
            self._report.steps.add(orders.step)
        after, self._before_step = self._before_step, None
        if orders.loads and after is None:
            # Nobody announced the step: no earlier point is known.
            after = self._raise_fence()
        for job in orders.loads:
            self._loads[job.job] = job
            if self._engine is None:
                continue
            self._stats.count("loads")
            objects, parents = self._objects(orders.namespaces, job, range(len(job.hashes)))
            if not self._agrees(job):
                self._refused.append((job.job, "loaded", [("dropped", 0)] * len(objects), 0.0))
                continue
            try:
                # Whatever follows a missing block is of no use: of a group that attends to all
                # tokens it cannot be computed on from, of several groups it is all or nothing.
                self._engine.submit_load(
                    job.job,
                    objects,
                    job.timeout,
                    prefix=True,
                    parents=parents,
                    pace=job.pace,
                    after=after,
                    context=job.tenant,
                )
            except Full:
                self._refused.append((job.job, "loaded", [("dropped", 0)] * len(objects), 0.0))
        for number in orders.cancel_loads:
            if number in self._loads and self._engine is not None:
                self._engine.cancel(number)
        self._start_prefetches(orders)

    def _start_prefetches(self, orders: StepOrders) -> None:
        for job in orders.prefetches:
            if self._engine is None:
                self._report.prefetched[job.job] = 1
                continue
            self._prefetches[job.job] = job
            objects, parents = self._objects(orders.namespaces, job, range(len(job.hashes)))
            try:
                self._engine.submit_prefetch(
                    job.job, objects, job.timeout, parents=parents, context=job.tenant
                )
            except Full:
                self._refused.append((job.job, "prefetched", [("dropped", 0)] * len(objects), 0.0))
        if self._engine is not None:
            for number in orders.release:
                self._engine.release(number)

    def start_stores(self, orders: StepOrders) -> None:
        """Submits the step's stores; their blocks are complete now, or will be when the device has
        computed what it was told to."""
        after = self._raise_fence() if orders.stores else None
        for job in orders.stores:
            self._stores[job.job] = job
            if self._engine is None:
                continue
            self._unread.setdefault(job.request_id, set()).add(job.job)
            objects, parents = self._objects(orders.namespaces, job, self._mine(job))
            try:
                if objects and self._agrees(job):
                    self._engine.submit_store(
                        job.job, objects, parents=parents, after=after, context=job.tenant
                    )
                    continue
            except Full:
                pass
            self._refused.append((job.job, "released", [], 0.0))
            self._refused.append((job.job, "stored", [("dropped", 0)] * len(objects), 0.0))
        self._finished.update(orders.finished)

    def _agrees(self, job: BlockJob) -> bool:
        """Whether the job's blocks are named by what this rank computes with."""
        return job.adapter is None or self._adapters.agrees(job.adapter)

    def _raise_fence(self) -> Fence | None:
        """A fence behind all that the device has been told to compute; host memory needs none."""
        if self._cuda_device is None or self._engine is None:
            return None
        stream = compat.current_stream(self._cuda_device)
        return self._engine.raise_fence(stream, cuda_device=self._cuda_device)

    def _mine(self, job: BlockJob) -> list[int]:
        """The job's blocks that this rank writes: ranks holding the same heads take turns."""
        index, count = self._replica
        return [i for i, block_hash in enumerate(job.hashes) if block_hash[-1] % count == index]

    def _block_bytes(self, group: int) -> int:
        assert self._share is not None
        share = self._share.groups[group]
        return 0 if share is None else share.block_bytes

    def _objects(
        self, namespaces: Sequence[bytes], job: BlockJob, indices: Iterable[int]
    ) -> tuple[list[tuple[int, bytes, list[int]]], list[tuple[bytes, int]]]:
        """Groups, keys and pages of the job's blocks, object by object, block after block; and of
        each object the chunk before its own in the request, and the tokens until there."""
        objects, parents = [], []
        self._namespaces.update((name, group) for group, name in enumerate(namespaces))
        for i in indices:
            # A prefetch has no blocks yet; any will do, as all are of one size.
            group, block = job.groups[i], job.block_ids[i] if job.block_ids else 0
            if (part := self._parts[group]) is None:
                continue
            pages = list(range(block * part.parts_per_block, (block + 1) * part.parts_per_block))
            name = namespaces[group] + job.hashes[i].ljust(CHUNK_BYTES, b"\0")
            objects += [(group, name + tail, pages) for tail in part.key_tails]
            parents += [job.parents[i]] * len(part.key_tails)
        return objects, parents

    def _by_block(
        self, job: BlockJob, indices: Iterable[int], outcomes: list[_Outcome]
    ) -> Iterator[tuple[int, list[_Outcome]]]:
        """The outcomes of each block's objects, in the order of `_objects`."""
        start = 0
        for i in indices:
            part = self._parts[job.groups[i]]
            end = start + (0 if part is None else len(part.key_tails))
            yield i, outcomes[start:end]
            start = end

    def poll(self) -> tuple[set[str], set[str]]:
        """Takes in what the engine finished.

        Returns:
            Requests whose blocks may be freed, and requests whose load ended.
        """
        loaded: set[str] = set()
        if self._engine is None:
            self._finish_without_engine(loaded)
        else:
            if self._idle_until and self._loads and not self._refused:
                left = self._idle_until - time.monotonic()
                # The scheduler's clock is another on another machine.
                self._engine.wait(min(max(left, 0.0), IDLE_SECONDS))
            refused, self._refused = self._refused, []
            for number, event, outcomes, seconds in refused + self._engine.poll():
                if event == "released":
                    self._on_released(number)
                elif event == "stored":
                    self._on_stored(number, outcomes)
                elif event == "prefetched":
                    self._report.seconds[number] = seconds
                    self._on_prefetched(number, outcomes)
                else:
                    self._report.seconds[number] = seconds
                    loaded.add(self._on_loaded(number, outcomes))
            self._report_held()
            report_faults(self._engine, self._stats)
        free = {request for request in self._finished if not self._unread.get(request)}
        compat.rest(self._idle_until > 0)
        self._finished -= free
        for request in free:
            self._unread.pop(request, None)
        return free, loaded

    def _finish_without_engine(self, loaded: set[str]) -> None:
        # A rank without attention layers holds nothing: its part of every job is done at once.
        loaded.update(job.request_id for job in self._loads.values())
        self._loads.clear()
        for number, job in self._stores.items():
            self._report.released[number] = 1
            self._report.stored[number] = [[True] * len(job.hashes)]
        self._stores.clear()

    def _on_released(self, number: int) -> None:
        self._report.released[number] = self._report.released.get(number, 0) + 1
        request_id = self._stores[number].request_id
        unread = self._unread.get(request_id, set())
        unread.discard(number)
        if not unread:
            self._unread.pop(request_id, None)

    def _on_stored(self, number: int, outcomes: list[_Outcome]) -> None:
        job = self._stores.pop(number)
        kept = [True] * len(job.hashes)
        for i, block in self._by_block(job, self._mine(job), outcomes):
            kept[i] = all(outcome in ("stored", "already_present") for outcome, _ in block)
        self._report.stored.setdefault(number, []).append(kept)
        for outcome, num_bytes in outcomes:
            if outcome == "stored":
                self._stats.count("stored_bytes", num_bytes)
            elif outcome == "dropped":
                self._stats.count("stores_dropped")
            elif outcome.startswith("failed"):
                self._stats.count("stores_failed")

    def _on_prefetched(self, number: int, outcomes: list[_Outcome]) -> None:
        job = self._prefetches.pop(number)
        self._report.prefetched[number] = 1
        for i, parts in self._by_block(job, range(len(job.hashes)), outcomes):
            self._stats.count("prefetched_bytes", sum(n for name, n in parts if name == "loaded"))
            names = [name for name, _ in parts if name not in _ARRIVED]
            if names:
                self._miss_bytes(number, self._block_bytes(job.groups[i]))
                self._learn_lost(job, i, names)

    def _miss_bytes(self, number: int, num_bytes: int) -> None:
        missing = self._report.missing_bytes
        missing[number] = missing.get(number, 0) + num_bytes

    def _report_held(self) -> None:
        """Turns keys that came into host memory, or went, into blocks that did."""
        assert self._engine is not None
        if not self._namespaces:
            return
        for key, came in self._engine.take_host_changes():
            group = self._namespaces[key[:NAMESPACE_BYTES]]
            name = block_name(group, key[NAMESPACE_BYTES : NAMESPACE_BYTES + CHUNK_BYTES])
            if change := self._held.update(group, name, came):
                held = self._report.held
                held[name] = held.get(name, 0) + change

    def _on_loaded(self, number: int, outcomes: list[_Outcome]) -> str:
        job = self._loads.pop(number)
        failed: list[int] = []
        for i, parts in self._by_block(job, range(len(job.hashes)), outcomes):
            for name in _ARRIVED:
                self._stats.count(f"{name}_bytes", sum(n for what, n in parts if what == name))
            names = [name for name, _ in parts if name not in _ARRIVED]
            if not names or "cancelled" in names:
                # Nothing is missing, or nobody is there any more to miss it.
                continue
            failed.append(i)
            self._miss_bytes(number, self._block_bytes(job.groups[i]))
            self._learn_lost(job, i, names)
        if failed:
            if self._whole_loads:
                self._failed_requests.add(job.request_id)
                failed = list(range(len(job.hashes)))
            else:
                self._failed_blocks.update(job.block_ids[i] for i in failed)
            self._stats.count("load_failed_blocks", len(failed))
            blocks = job.names
            unloaded = self._report.unloaded.setdefault(job.request_id, set())
            unloaded.update(blocks[i] for i in failed)
        return job.request_id

    def _learn_lost(self, job: BlockJob, index: int, names: Sequence[str]) -> None:
        """Takes in why parts of a block did not come."""
        foreign = sum(name in _FOREIGN for name in names)
        rejected = sum(name.startswith("rejected") for name in names) - foreign
        self._stats.count("rejected_objects", rejected)
        if foreign:
            self._on_foreign(foreign)
            self._report.foreign.add(job.names[index])
        elif rejected or "miss" in names:
            self._report.lost.add(job.names[index])

    def _on_foreign(self, objects: int) -> None:
        self._stats.count("foreign_objects", objects)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Penstock: values in the pool are encrypted with a key that this engine does not "
                "have; they are recomputed. Give all engines of the pool the same keys in "
                "penstock.encryption_key_file or PENSTOCK_ENCRYPTION_KEYS (said once; counted as "
                "foreign_objects)"
            )

    def take_failed_blocks(self) -> set[int]:
        """Blocks that loads did not fill, since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Requests of which nothing counts as loaded, since the last call."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_report(self) -> WorkerReport | None:
        """What the scheduler half should know, since the last call."""
        if self._report.is_empty():
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def take_stats(self) -> PenstockStats | None:
        """Counters since the last call."""
        return self._stats.take()

    def shutdown(self) -> None:
        """Lets stores reach the pool for a bounded time, then ends all native threads."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.drain(self._settings.drain_timeout)
            engine.shutdown(self._settings.drain_timeout)

    def _require_engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("this rank has no KV cache registered with Penstock")
        return self._engine


def report_faults(engine: Engine, stats: PenstockStats) -> None:
    """Says and counts what failed in the engine's background since the last time."""
    for fault, unpinned_bytes in engine.take_faults():
        logger.warning("Penstock: %s", fault)
        stats.count("unpinned_bytes", unpinned_bytes)


def _detect(views: dict[int, Any], heads: tuple[int, int], stage: tuple[int, int]) -> Descriptor:
    return Descriptor.detect(
        [
            (
                layer,
                tensor.data_ptr(),
                tuple(tensor.shape),
                tuple(tensor.stride()),
                tensor.element_size(),
                tensor.untyped_storage().data_ptr(),
                tensor.untyped_storage().nbytes(),
            )
            for layer, tensor in views.items()
        ],
        head_start=heads[0],
        stage=stage,
    )


def _log_group(group: Group, descriptor: Descriptor, parts: int, objects: int) -> None:
    logger.info(
        "Penstock: group %d (%s): layout %s (contiguous: %s), layers %s, heads %d-%d, %d bytes a "
        "block in %d objects, %d pieces of memory",
        group.index,
        group.kind,
        descriptor.layout or "unnamed",
        descriptor.contiguity,
        ",".join(map(str, descriptor.layers)),
        *descriptor.share[2:],
        descriptor.block_bytes(descriptor.share) * parts,
        objects,
        len(descriptor.segments(0, descriptor.share)),
    )


def _parts_per_block(
    descriptor: Descriptor, group: Group, num_blocks: int, heads: tuple[int, int]
) -> int:
    parts, rest = divmod(descriptor.blocks, num_blocks)
    if rest or descriptor.tokens * parts != group.block_size or descriptor.share[2:] != heads:
        raise ConfigError(
            f"vLLM registered {descriptor.blocks} pages of {descriptor.tokens} tokens with heads "
            f"{descriptor.share[2:]} for group {group.index} ({group.kind}), but configured "
            f"{num_blocks} blocks of {group.block_size} tokens with heads {heads}"
        )
    return parts
