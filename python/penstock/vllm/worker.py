"""The worker half: turns the scheduler half's orders into engine jobs and reports them.

It holds no policy. Every call returns without waiting for I/O, except `flush`, which waits for
copies in progress (memory speed) when vLLM is about to overwrite their source.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable, Iterator
from typing import Any

from penstock._native import Descriptor, Engine, Store
from penstock.errors import ConfigError, Full
from penstock.layout import objects as object_spans
from penstock.vllm import compat
from penstock.vllm.messages import BlockJob, RankShare, Span, StepOrders, WorkerReport
from penstock.vllm.settings import Settings
from penstock.vllm.stats import PenstockStats

logger = logging.getLogger("vllm.penstock")

HEADER_BYTES = 64
"""Bytes of a value's header, in front of the payload in every slot."""

CHUNK_BYTES = 32
"""Bytes of a chunk's identity in a key."""

_Outcome = tuple[str, int]
"""What became of an object, and its bytes."""

_MIN_SLOTS = 4
_FLUSH_TIMEOUT = 10.0


class WorkerHalf:
    """One rank's share of the KV cache, its engine, and its jobs."""

    def __init__(self, settings: Settings, vllm_config: Any, kv_cache_config: Any) -> None:
        self._settings = settings
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._engine: Engine | None = None
        self._share: RankShare | None = None
        self._key_tails: list[bytes] = []
        self._block_parts = 1
        self._replica = (0, 1)
        self._loads: dict[int, BlockJob] = {}
        self._stores: dict[int, BlockJob] = {}
        self._refused: list[tuple[int, str, list[_Outcome]]] = []
        """Completions of jobs that the engine, at its bound, did not take."""
        self._unread: dict[str, set[int]] = {}
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._report = WorkerReport()
        self._stats = PenstockStats()

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Detects the layout of the registered tensors and starts the native engine on them.

        Raises:
            ConfigError: the tensors are on a device without a copy executor.
            LayoutError: the tensors' layout cannot be proven.
        """
        spec = compat.check_supported(self._vllm_config, self._kv_cache_config)
        tp_rank = compat.tp_rank()
        heads = compat.kv_head_range(self._vllm_config, tp_rank)
        self._replica = compat.kv_replica(self._vllm_config, tp_rank)
        if not kv_caches:
            self._share = RankShare(None, self._kv_cache_config.num_blocks, 0, 0, "", "", 0, 0)
            return
        tensors = sorted((compat.layer_index(name), t) for name, t in kv_caches.items())
        device = tensors[0][1].device
        if device.type != "cpu":
            raise ConfigError(
                f"the KV cache is on {device}; this version copies host memory only. Serve with "
                "vLLM's CPU build, or without Penstock"
            )
        descriptor = Descriptor.detect(
            [
                (
                    index,
                    tensor.data_ptr(),
                    tuple(tensor.shape),
                    tuple(tensor.stride()),
                    tensor.element_size(),
                    tensor.untyped_storage().data_ptr(),
                    tensor.untyped_storage().nbytes(),
                )
                for index, tensor in tensors
            ],
            head_start=heads[0],
        )
        span: Span = descriptor.share
        num_blocks = self._kv_cache_config.num_blocks
        self._block_parts, rest = divmod(descriptor.blocks, num_blocks)
        if rest or descriptor.tokens * self._block_parts != spec.block_size or span[2:] != heads:
            raise ConfigError(
                f"vLLM registered {descriptor.blocks} pages of {descriptor.tokens} tokens with "
                f"heads {span[2:]}, but configured {num_blocks} blocks of {spec.block_size} "
                f"tokens with heads {heads}"
            )
        spans = object_spans(
            span,
            layers_per_object=self._settings.layers_per_object or None,
            heads_per_object=self._settings.heads_per_object or None,
        )
        object_bytes = max(descriptor.block_bytes(part) for part in spans) * self._block_parts
        slots = max(_MIN_SLOTS, self._host_bytes(span) // (object_bytes + HEADER_BYTES))
        with compat.operators_cores():
            self._engine = Engine(
                Store.open(self._settings.pool, client_name="penstock-worker").guarded(),
                slot_bytes=object_bytes,
                slots=slots,
                copy_lanes=self._settings.copy_lanes,
                io_lanes=self._settings.io_lanes,
            )
        self._engine.register(descriptor)
        self._key_tails = [struct.pack("<4H", *part) for part in spans]
        self._share = RankShare(
            span=span,
            num_blocks=num_blocks,
            block_bytes=descriptor.block_bytes(span) * self._block_parts,
            page_tokens=descriptor.tokens,
            interior=descriptor.interior,
            dtype=str(spec.dtype),
            content_bytes=descriptor.content_bytes,
            slots=slots,
        )
        logger.info(
            "Penstock: layout %s, layers %d-%d, heads %d-%d, %d bytes a block in %d objects, "
            "%d arena slots",
            descriptor.layout or "unnamed",
            *span,
            self._share.block_bytes,
            len(spans),
            slots,
        )

    def _host_bytes(self, span: Span) -> int:
        """This rank's part of the engine's host memory, by the part of the KV that it holds."""
        model = self._vllm_config.model_config
        layers: int = model.get_total_num_hidden_layers()
        whole: int = layers * max(
            model.get_total_num_kv_heads(), self._vllm_config.parallel_config.tensor_parallel_size
        )
        mine = (span[1] - span[0]) * (span[3] - span[2])
        return self._settings.host_bytes * mine // whole

    @property
    def share(self) -> RankShare | None:
        """What this rank holds; None before the KV cache is registered."""
        return self._share

    def flush(self, orders: StepOrders) -> None:
        """Returns when none of the jobs to flush reads its blocks any more."""
        jobs = [job for job in orders.flush if job in self._stores]
        if jobs and not self._require_engine().wait_released(jobs, _FLUSH_TIMEOUT):
            raise RuntimeError(
                f"stores of preempted requests still read their blocks after {_FLUSH_TIMEOUT} s"
            )

    def start_loads(self, orders: StepOrders) -> None:
        """Submits the step's loads and cancellations."""
        for job in orders.loads:
            self._loads[job.job] = job
            if self._engine is None:
                continue
            assert self._share is not None
            num_bytes = len(job.block_ids) * self._share.block_bytes
            self._stats.count("loads")
            objects = self._objects(orders.namespace, job, range(len(job.hashes)))
            deadline = self._settings.load_deadline(num_bytes)
            try:
                self._engine.submit_load(job.job, objects, deadline, prefix=True)
            except Full:
                self._refused.append((job.job, "loaded", [("dropped", 0)] * len(objects)))
        for number in orders.cancel_loads:
            if number in self._loads and self._engine is not None:
                self._engine.cancel(number)

    def start_stores(self, orders: StepOrders) -> None:
        """Submits the step's stores; their blocks are complete now."""
        for job in orders.stores:
            self._stores[job.job] = job
            if self._engine is None:
                continue
            self._unread.setdefault(job.request_id, set()).add(job.job)
            objects = self._objects(orders.namespace, job, self._mine(job))
            try:
                if objects:
                    self._engine.submit_store(job.job, objects)
                    continue
            except Full:
                pass
            self._refused.append((job.job, "released", []))
            self._refused.append((job.job, "stored", [("dropped", 0)] * len(objects)))
        self._finished.update(orders.finished)

    def _mine(self, job: BlockJob) -> list[int]:
        """The job's blocks that this rank writes: ranks holding the same heads take turns."""
        index, count = self._replica
        return [i for i, block_hash in enumerate(job.hashes) if block_hash[-1] % count == index]

    def _objects(
        self, namespace: bytes, job: BlockJob, indices: Iterable[int]
    ) -> list[tuple[bytes, list[int]]]:
        """Keys and pages of the job's blocks, object by object, block after block."""
        parts = self._block_parts
        return [
            (
                namespace + job.hashes[i].ljust(CHUNK_BYTES, b"\0") + tail,
                list(range(job.block_ids[i] * parts, (job.block_ids[i] + 1) * parts)),
            )
            for i in indices
            for tail in self._key_tails
        ]

    def _by_block(self, outcomes: list[_Outcome]) -> Iterator[list[_Outcome]]:
        """The outcomes of each block's objects, in the order of `_objects`."""
        count = len(self._key_tails)
        return (outcomes[i : i + count] for i in range(0, len(outcomes), count))

    def poll(self) -> tuple[set[str], set[str]]:
        """Takes in what the engine finished.

        Returns:
            Requests whose blocks may be freed, and requests whose load ended.
        """
        loaded: set[str] = set()
        if self._engine is None:
            self._finish_without_engine(loaded)
        else:
            refused, self._refused = self._refused, []
            for number, event, outcomes in refused + self._engine.poll():
                if event == "released":
                    self._on_released(number)
                elif event == "stored":
                    self._on_stored(number, outcomes)
                else:
                    loaded.add(self._on_loaded(number, outcomes))
        free = {request for request in self._finished if not self._unread.get(request)}
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
        for i, block in zip(self._mine(job), self._by_block(outcomes), strict=True):
            kept[i] = all(outcome in ("stored", "already_present") for outcome, _ in block)
        self._report.stored.setdefault(number, []).append(kept)
        for outcome, num_bytes in outcomes:
            if outcome == "stored":
                self._stats.count("stored_bytes", num_bytes)
            elif outcome == "dropped":
                self._stats.count("stores_dropped")
            elif outcome.startswith("failed"):
                self._stats.count("stores_failed")

    def _on_loaded(self, number: int, outcomes: list[_Outcome]) -> str:
        job = self._loads.pop(number)
        for block, block_hash, parts in zip(
            job.block_ids, job.hashes, self._by_block(outcomes), strict=True
        ):
            self._stats.count("loaded_bytes", sum(n for name, n in parts if name == "loaded"))
            names = [name for name, _ in parts if name != "loaded"]
            if not names or "cancelled" in names:
                # Nothing is missing, or nobody is there any more to miss it.
                continue
            self._failed_blocks.add(block)
            self._report.unloaded.setdefault(job.request_id, set()).add(block_hash)
            rejected = sum(name.startswith("rejected") for name in names)
            self._stats.count("rejected_objects", rejected)
            if rejected or "miss" in names:
                self._report.lost.add(block_hash)
        return job.request_id

    def take_failed_blocks(self) -> set[int]:
        """Blocks that loads did not fill, since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        self._stats.count("load_failed_blocks", len(failed))
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
