"""The time that the scheduler half takes of the engine core's only thread.

For one prompt it measures Penstock's work at three moments: when the prompt arrives, when vLLM
first asks what can be loaded, and when vLLM asks again after host memory has changed. The baseline
is vLLM's look-up of the same prompt in its own prefix cache, which has all of it. Then it measures
steps that decode for many requests.

Only the model is left out. vLLM's requests, block hashes, prefix cache and step descriptions are
real. So is Penstock's scheduler half, over a pool in memory, with a native engine and its host
memory. Run it as ``python -m benches.scheduler_cost``.
"""

from __future__ import annotations

import argparse
import mmap
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from benches import report
from penstock._native import Buffer, Descriptor, Engine, Event, Store, TensorView
from penstock.vllm.adapters import NamedAdapters
from penstock.vllm.agreement import Agreement
from penstock.vllm.groups import Group
from penstock.vllm.messages import GroupShare, RankShare, WorkerReport
from penstock.vllm.model_facts import ModelFacts
from penstock.vllm.scheduler import EngineFacts, SchedulerHalf
from penstock.vllm.scheduler_facts import arrival, step
from penstock.vllm.settings import Settings

BLOCK = 16
"""Tokens."""
CONTENT = 16
"""Bytes of a token's KV. Nothing here depends on it."""
PLACES = ("pool", "host memory", "half each", "nowhere")
DECODING = 1_000
"""Prompt tokens of each request that is being decoded."""


def microseconds(work: Callable[[], Any]) -> float:
    """The time of a piece of work."""
    begin = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - begin) / 1e3


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
        address = Buffer(self._memory, writable=True).address
        shape, strides = (blocks, 1, BLOCK, CONTENT), (BLOCK * CONTENT, CONTENT, CONTENT, 1)
        layer = TensorView(
            0,
            address=address,
            shape=shape,
            strides=strides,
            itemsize=1,
            storage_address=address,
            storage_bytes=len(self._memory),
        )
        self._engine = Engine(
            Store.open("memory://?size=2GiB"), slot_bytes=BLOCK * CONTENT, slots=4 * blocks
        )
        self._engine.register(Descriptor.detect([layer]))
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
        stored = catalogue.begin_store("stored", job, blocks * BLOCK, [table], 0)
        assert stored is not None
        self._engine.submit_store(job, stored)
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


def one_prompt(
    requests: Requests, half: Half, own: OwnCache, place: str, tokens: list[int]
) -> dict[str, float]:
    """The times of one prompt, whose blocks are in `place`."""
    blocks, scheduler = len(tokens) // BLOCK, half.half
    first = requests.make(tokens)
    if place in ("pool", "half each"):
        half.put_in_pool(first)
    if place in ("host memory", "half each"):
        held = blocks if place == "host memory" else blocks // 2
        half.hold(first, held)
    own.take_in(first)
    request = requests.make(tokens)
    times = {"arrival": microseconds(lambda: scheduler.on_new_request(arrival(request)))}
    # The look-up is answered meanwhile. An engine core that has work does not sleep.
    until = time.perf_counter() + 0.1
    while time.perf_counter() < until:
        pass
    offered: list[int | None] = []
    ask = lambda: offered.append(scheduler.match(request.request_id, 0))  # noqa: E731
    times["first match"] = microseconds(ask)
    # Other blocks came into host memory, as they do with every step.
    other = requests.make([random.randrange(100_000) for _ in range(BLOCK + 1)])
    half.hold(other, 1)
    times["further match"] = microseconds(ask)
    wanted = 0 if place == "nowhere" else (len(tokens) - 1) // BLOCK * BLOCK
    assert offered == [wanted, wanted], (offered, wanted)
    times["together"] = sum(times.values())
    again = requests.make(tokens)
    times["vLLM's own"] = microseconds(lambda: own.look_up(again))
    assert own.look_up(again) == (len(tokens) - 1) // BLOCK * BLOCK
    scheduler.on_finished(request.request_id, [[]])
    return times


def decode_steps(requests: Requests, half: Half, count: int, rounds: int) -> dict[str, list[float]]:
    """Times of steps that decode one token for each of `count` requests."""
    decoding = [
        requests.make([random.randrange(100_000) for _ in range(DECODING)]) for _ in range(count)
    ]
    tables = {request.request_id: ([*range(1, 200)],) for request in decoding}
    for request in decoding:
        half.half.on_new_request(arrival(request))
    time.sleep(0.5)
    for request in decoding:
        half.half.match(request.request_id, 0)

    def output(scheduled: int) -> SchedulerOutput:
        made = SchedulerOutput.make_empty()
        cached = made.scheduled_cached_reqs
        cached.req_ids = [request.request_id for request in decoding]
        cached.num_computed_tokens = [request.num_computed_tokens for request in decoding]
        cached.new_block_ids = [None] * count
        made.num_scheduled_tokens = dict.fromkeys(cached.req_ids, scheduled)
        made.total_num_scheduled_tokens = count * scheduled
        made.kv_connector_block_state = KVConnectorBlockState(set(tables), tables.__getitem__, {})
        return made

    def take(scheduled: int) -> tuple[float, bool]:
        made = output(scheduled)
        orders = []
        took = microseconds(lambda: orders.append(half.half.build_orders(step(made))))
        for request in decoding:
            request.num_computed_tokens += scheduled
            request.append_output_token_ids(7)
        return took, bool(orders[0].stores)

    take(DECODING)
    plain, mixed = [], []
    # All requests are equally long, so for some steps none fills a block.
    while len(plain) < rounds and (taken := take(1)):
        took, fills = taken
        plain += [] if fills else [took]
    # Then one in sixteen fills a block with each step, as with requests of any length.
    for place, request in enumerate(decoding):
        for _ in range(place % BLOCK):
            request.num_computed_tokens += 1
            request.append_output_token_ids(7)
    take(1)
    for _ in range(rounds):
        took, fills = take(1)
        assert fills
        mixed.append(took)
    for request in decoding:
        half.half.on_finished(request.request_id, tables[request.request_id])
    return {"none fills a block": plain, "one in sixteen does": mixed}


def main() -> None:
    """Measures, prints the tables and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32_768, 131_072])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=256)
    args = report.begin(parser)
    requests, rows, prompts = Requests(), [], []
    for tokens in args.tokens:
        half, own = Half(tokens // BLOCK + 16), OwnCache((args.rounds + 1) * 4 * tokens)
        found: dict[str, list[dict[str, float]]] = {place: [] for place in PLACES}
        for number in range(args.rounds + 1):
            for place in PLACES:
                report.progress(f"{tokens} tokens, {place}, round {number}")
                prompt = [random.randrange(100_000) for _ in range(tokens + 1)]
                times = one_prompt(requests, half, own, place, prompt)
                # The first prompt pays for things that all later ones use.
                if number:
                    found[place].append(times)
        for place, all_times in found.items():
            medians = {
                name: statistics.median(times[name] for times in all_times) for name in all_times[0]
            }
            ratio = report.median_ratio(
                [times["together"] for times in all_times],
                [times["vLLM's own"] for times in all_times],
            )
            prompts.append({"tokens": tokens, "place": place, "us": medians, "ratio": ratio})
            rows.append(
                [f"{tokens:,}", place]
                + [f"{value:,.0f}" for value in medians.values()]
                + [f"{ratio:.2f}"]
            )
        half.close()
    names = ["arrival", "first match", "further match", "together", "vLLM's own"]
    half = Half(64)
    steps = decode_steps(requests, half, args.requests, 20 * args.rounds)
    half.close()
    decoding = {name: statistics.median(times) for name, times in steps.items() if times}
    step_rows = [[f"{args.requests}", name, f"{value:.0f}"] for name, value in decoding.items()]
    tables = "\n\n".join(
        [
            report.table(["prompt", "where its blocks are", *names, "ratio"], rows),
            report.table(["requests that decode", "of them", "µs a step"], step_rows),
        ]
    )
    steps_taken = {"requests": args.requests, "us": decoding}
    report.finish(args, tables, {"prompts": prompts, "steps": steps_taken})


if __name__ == "__main__":
    main()
