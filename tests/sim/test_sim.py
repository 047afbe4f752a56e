"""`penstock.sim`: what a replay says of traces that are made here, and of the real ones."""

import json
import os
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.sim import (
    POLICIES,
    Engine,
    Fleet,
    ObjectStore,
    Requests,
    Tier,
    Trace,
    object_store_requests,
    replay,
    size_pool,
)
from penstock.vllm.settings import Settings
from tests.connector.pretended import TOKENS, PretendedEngine

BLOCK = 512
FAST = 1e15


def write(path, prompts):
    """A trace of Mooncake's format, a request each second."""
    lines = [
        {
            "timestamp": number * 1000,
            "input_length": BLOCK * len(ids),
            "output_length": 1,
            "hash_ids": ids,
        }
        for number, ids in enumerate(prompts)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def fleet(nodes=4, host=0, pool=0):
    return Fleet(
        nodes=nodes,
        host=Tier(host * BLOCK, "prefix", FAST, 0.0),
        pool=Tier(pool * BLOCK, "lru", FAST, 0.0),
        bytes_per_token=1,
        prefill_speed=1000.0,
        windows=5,
    )


@pytest.fixture
def trace(tmp_path):
    """40 conversations of five turns; each turn is two blocks longer."""
    prompts = [
        [conversation * 100 + block for block in range(3 + 2 * turn)]
        for turn in range(5)
        for conversation in range(40)
    ]
    return Trace.read(write(tmp_path / "made.jsonl", prompts))


def test_a_trace_tells_what_it_is(trace):
    assert trace.format == "Mooncake (hash_ids)"
    assert (trace.requests, trace.sessions, trace.block_tokens) == (200, 40, 512)
    assert trace.blocks == 40 * (3 + 5 + 7 + 9 + 11)
    assert trace.unique_blocks == 40 * 11
    assert trace.input_tokens == trace.blocks * BLOCK
    assert trace.duration == 199


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_for_everything_finds_what_no_bound_does(trace, policy):
    expected = 40 * (3 + 5 + 7 + 9)
    assert trace.infinite_hits() == expected
    assert trace.hits(policy, trace.unique_blocks) == expected
    assert trace.hits(policy, 50) <= trace.belady_hits(50) < expected


def test_a_pool_finds_what_private_caches_do_not(trace):
    private = replay(trace, fleet(host=440))
    shared = replay(trace, fleet(pool=440))
    assert private.total.pool_blocks == shared.total.host_blocks == 0
    assert shared.total.pool_blocks == trace.infinite_hits() > 2 * private.total.host_blocks
    assert shared.total.written_bytes == trace.unique_blocks * BLOCK
    assert shared.total.read_bytes == shared.total.pool_blocks * BLOCK
    assert shared.ttft[0.5] < private.ttft[0.5]
    sticky = replay(trace, replace(fleet(host=440), routing="sticky"))
    assert sticky.total.host_blocks == trace.infinite_hits()


def test_requests_of_an_object_store_lie_between_full_packs_and_packs_of_one_request(trace):
    with_pool = fleet(pool=440)
    total = replay(trace, with_pool).total
    assert total.pool_writers == trace.requests
    assert total.pool_readers == trace.requests - trace.sessions
    found = object_store_requests(
        total,
        with_pool,
        BLOCK,
        trace.duration,
        ObjectStore(pack_bytes=10 * BLOCK, range_bytes=BLOCK),
    )
    blocks = trace.unique_blocks
    assert found["put"] == Requests(blocks // 10, min(blocks, blocks // 10 + trace.requests))
    assert found["get"].least == total.pool_blocks <= found["get"].most
    assert found["head"] == Requests(0, found["put"].most * (with_pool.nodes - 1))
    # Two look-ups a request, but no more than one a second and node.
    assert found["list"].most == min(2 * trace.requests, with_pool.nodes * 199)
    every_look_up = object_store_requests(
        total, with_pool, BLOCK, trace.duration, ObjectStore(fresh=0)
    )
    assert every_look_up["list"].most == 2 * trace.requests
    for each in found.values():
        assert 0 <= each.least <= each.most


def test_windows_add_up_and_progress_ends_at_the_end(trace):
    told = []
    outcome = replay(trace, fleet(pool=100), told.append)
    assert told[0] == 0
    assert told[-1] == trace.requests
    assert len(outcome.windows) == 5
    assert sum(each.blocks for each in outcome.windows) == outcome.total.blocks == trace.blocks
    assert outcome.pool_blocks_held <= 100


def test_an_error_in_progress_ends_the_replay(trace):
    def fail(done):
        raise RuntimeError(f"at {done}")

    with pytest.raises(RuntimeError, match="at 0"):
        replay(trace, fleet(pool=100), fail)


def test_enough_is_the_smallest_pool_that_finds_as_much(trace):
    sizes = size_pool(trace, fleet(), server_bytes=100 * BLOCK)
    assert [each.nbytes for each in sizes.tried] == sorted(each.nbytes for each in sizes.tried)
    target = 0.95 * sizes.tried[-1].hit_ratio
    smaller = [each for each in sizes.tried if each.nbytes < sizes.enough.nbytes]
    assert sizes.enough.hit_ratio >= target > max(each.hit_ratio for each in smaller)
    assert sizes.tried[-1].servers == 5


def test_what_makes_no_sense_is_refused(trace, tmp_path):
    with pytest.raises(ConfigError, match="clock, s3fifo, prefix, chooser"):
        trace.hits("fifo", 10)
    with pytest.raises(ConfigError, match="none of auto, always, never"):
        replay(trace, replace(fleet(pool=9), engine=Engine(load_policy="perhaps")))
    with pytest.raises(ConfigError, match="none of random, sticky, prefix-aware"):
        replay(trace, replace(fleet(pool=9), routing="nearest"))
    with pytest.raises(ConfigError, match=r"missing\.jsonl"):
        Trace.read(tmp_path / "missing.jsonl")
    (tmp_path / "odd.jsonl").write_text('{"hash_ids": [1]}\n')
    with pytest.raises(ConfigError, match=r"odd\.jsonl, line 1: .*timestamp"):
        Trace.read(tmp_path / "odd.jsonl")


def test_engines_are_set_as_the_connector_is():
    connector = Settings(pool="memory://")
    simulated = asdict(Engine())
    settings = asdict(connector) | {"get_lanes": connector.lanes(ranks=1, cores=2).get}
    common = simulated.keys() & settings.keys()
    assert simulated.keys() - common == {"tokens_per_step"}
    assert {name: simulated[name] for name in common} == {name: settings[name] for name in common}


@pytest.mark.parametrize("load_seconds", [0.2, 0.5, 1.0, 1.5, 1.9, 2.5, 6.0, 20.0])
def test_nodes_decide_as_an_engine_over_the_same_network(load_seconds, tmp_path):
    """The pretended engine, which the tests of the advisor are about, takes the same times."""
    blocks, count = 12, 120
    pretended = PretendedEngine(blocks=blocks, noise=0.0, lanes=1)
    size = pretended.block_bytes
    pretended.bytes_per_second = blocks * size / load_seconds
    asked = [pretended.ask() for _ in range(count)]

    # Three prompts that are computed, then one of them again and again.
    prompts = [[number * 100 + block for block in range(blocks)] for number in range(3)]
    lines = [
        {
            "timestamp": number * 4000,
            "input_length": blocks * TOKENS + 30,
            "output_length": 1,
            "hash_ids": ids,
        }
        for number, ids in enumerate(prompts + [prompts[0]] * count)
    ]
    path = tmp_path / "made.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    node = Fleet(
        nodes=1,
        host=Tier(0, "prefix", FAST, 0.0),
        pool=Tier(1 << 40, "lru", pretended.bytes_per_second, 0.0),
        bytes_per_token=size // TOKENS,
        prefill_speed=1 / pretended.seconds_per_token,
        engine=Engine(tokens_per_step=2048, get_lanes=1),
    )
    found = replay(Trace.read(path, block_tokens=TOKENS), node)
    for share, expected in zip(
        (0.1, 0.5, 0.9), statistics.quantiles(asked, n=10)[::4], strict=True
    ):
        assert found.ttft[share] == pytest.approx(expected, rel=0.02), share


TRACES = Path(os.environ.get("PENSTOCK_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
"""The real traces, as docs/benchmarks.md has them: beside the checkout if nothing else is said."""


@pytest.fixture(scope="module")
def chat():
    path = TRACES / "mooncake" / "conversation_trace.jsonl"
    if not path.exists():
        if "PENSTOCK_TRACES" in os.environ:
            pytest.fail(f"PENSTOCK_TRACES: there is no {path}")
        pytest.skip(f"no real traces: PENSTOCK_TRACES names no folder, and there is no {path}")
    return Trace.read(path)


def test_the_published_chat_trace_gives_the_known_ratios(chat):
    """One cache for Mooncake's conversation trace at 1 and 5 % of all its blocks."""
    small, large = chat.unique_blocks // 100, chat.unique_blocks // 20
    assert round(chat.infinite_hits() / chat.blocks, 3) == 0.366
    assert round(chat.belady_hits(large) / chat.blocks, 3) == 0.366
    assert round(chat.belady_hits(small) / chat.blocks, 3) == 0.246
    assert round(chat.hits("lru", large) / chat.blocks, 3) == 0.196
    assert chat.hits("lru", small) / chat.blocks == pytest.approx(0.0525, abs=0.0001)
    assert round(chat.hits("s3fifo", large) / chat.blocks, 3) == 0.186
    assert round(chat.hits("s3fifo", small) / chat.blocks, 3) == 0.075


@pytest.mark.parametrize("percent", [1, 5, 10])
def test_ours_finds_more_than_lru_on_the_chat_trace(chat, percent):
    capacity = chat.unique_blocks * percent // 100
    assert chat.hits("prefix", capacity) > chat.hits("lru", capacity)
