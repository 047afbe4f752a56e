"""What of vLLM's scheduler and of Penstock's half of it is there without a model."""

from __future__ import annotations

import mmap

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from benches.shared.layouts import Shape, describe
from penstock._native import Buffer, Engine, Event, Store
from penstock.vllm.adapters import NamedAdapters
from penstock.vllm.agreement import Agreement
from penstock.vllm.groups import Group
from penstock.vllm.messages import GroupShare, RankShare, WorkerReport
from penstock.vllm.model_facts import ModelFacts
from penstock.vllm.scheduler import EngineFacts, SchedulerHalf
from penstock.vllm.settings import Settings

BLOCK = 16
"""Tokens."""
CONTENT = 16
"""Bytes of a token's KV. Nothing here depends on it."""


class Requests:
    """Makes vLLM's requests, with vLLM's block hashes."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._count = 0

    def make(self, tokens: list[int]) -> Request:
        self._count += 1
        return Request(
            f"cmpl-{self._count:032x}-0",
            tokens,
            SamplingParams(max_tokens=1_000),
            None,
            block_hasher=self._hasher,
        )


class OwnCache:
    """vLLM's prefix cache."""

    def __init__(self, tokens: int) -> None:
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.bfloat16
        )
        config = KVCacheConfig(
            num_blocks=2 * tokens // BLOCK + 16,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["model.layers.0.attn"], spec)],
        )
        self._manager = KVCacheManager(
            config, max_model_len=2 * tokens, scheduler_block_size=BLOCK, hash_block_size=BLOCK
        )

    def take_in(self, request: Request) -> None:
        """Fills the cache as if a request had been computed."""
        blocks, computed, *_ = self._manager.get_computed_blocks(request)
        self._manager.allocate_slots(request, request.num_tokens - computed, computed, blocks)

    def look_up(self, request: Request) -> int:
        """How many tokens of a request the cache has."""
        return int(self._manager.get_computed_blocks(request)[1])


class Half:
    """Penstock's scheduler half, its pool, and a native engine with host memory."""

    def __init__(self, blocks: int) -> None:
        group = Group(0, "full_attention", BLOCK, None, "bfloat16", ())
        settings = Settings("memory://?size=2GiB", load_policy="always", lookup_timeout=10.0)
        model = ModelFacts("bench", (1, 1), (1, 1), {"kind": "bench"})
        agreement = Agreement(settings, model, (group,), lambda: b"")
        facts = EngineFacts((group,), BLOCK, 8192, False, 0)
        self.half = SchedulerHalf(settings, facts, agreement, NamedAdapters(), lambda _: None)
        share = RankShare(
            (0, 1, 0, 1),
            blocks,
            (GroupShare((0,), BLOCK * CONTENT, BLOCK, "NHC", CONTENT),),
            blocks,
            blocks,
        )
        self.half.accept_shares({(0, 0): share})
        self._memory = mmap.mmap(-1, blocks * BLOCK * CONTENT)
        shape = Shape(layers=1, heads=1, tokens=BLOCK, content_bytes=CONTENT, blocks=blocks)
        address = Buffer(self._memory, writable=True).address
        self._engine = Engine(
            Store.open("memory://?size=2GiB"), slot_bytes=BLOCK * CONTENT, slots=4 * blocks
        )
        self._engine.register(describe(shape, "LBHNC", address))
        self._engine.name_group(0, agreement.namespaces[0])
        self._engine.take_host_changes()
        self._next_job = 0

    def put_in_pool(self, request: Request) -> None:
        """Puts the blocks of a request into the pool of the scheduler half."""
        agreement = self.half._agreement
        [namespace], [[span]] = agreement.namespaces, agreement.spans
        for block_hash in request.block_hashes:
            self.half._store.put(pool_key(namespace, block_hash, span), b"", timeout=10.0)

    def hold(self, request: Request, blocks: int) -> None:
        """Stores the first blocks of a request, and tells the half that host memory has them."""
        catalogue = self.half._catalogue
        catalogue.add("stored", request.num_tokens)
        catalogue.extend("stored", request.block_hashes)
        self._next_job += 1
        job = (1 << 40) + self._next_job
        table = list(range(1, blocks + 1))
        begun = catalogue.begin_store("stored", job, blocks * BLOCK, [table], 0)
        assert begun is not None
        self._engine.submit_store(job, begun[0])
        while not any(done.event == Event.STORED for done in self._engine.poll()):
            self._engine.wait(10.0)
        report = WorkerReport(held=self._engine.take_host_changes())
        self.half.on_worker_output(report, (), ())
        # Only host memory has them then.
        catalogue.end_store(job, list(range(blocks)))
        catalogue.remove("stored")

    def close(self) -> None:
        self._engine.shutdown(10.0)
        self.half.shutdown()


def pool_key(namespace: bytes, block_hash: bytes, span: tuple[int, int, int, int]) -> bytes:
    """The key of an object."""
    return namespace + block_hash + b"".join(part.to_bytes(2, "little") for part in span)
