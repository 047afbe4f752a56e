"""What becomes of a worker half's jobs: reports, counters, and what vLLM is told. Without vLLM."""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.waiting import LIMIT, eventually
from penstock._native import Blocks, Store, host_changes, tenant_namespace
from penstock.errors import ConfigError
from penstock.vllm.adapters import Adapter
from penstock.vllm.groups import Group
from penstock.vllm.messages import StepOrders, WorkerReport
from penstock.vllm.settings import Settings
from penstock.vllm.worker import Services
from tests.connector.ranks import (
    BLOCKS,
    FULL,
    HEADS,
    LAYER_BYTES,
    NAMESPACES,
    TOKENS,
    WINDOW,
    Rank,
    blocks,
    chunk,
    job,
)
from tests.connector.silent import silent_pool

IN_MEMORY = Settings("memory://?size=64MiB", host_tier=False, host_bytes=1 << 20)
BLOCK_BYTES = 2 * LAYER_BYTES
"""In the layers of a group."""
HEADER_BYTES = 64
"""Of each value in the pool."""


@pytest.mark.parametrize(
    ("limits", "counter"),
    [
        # Of a pool that does not answer. Nothing else ends within a test.
        ({"store_timeout": 0.05, "store_wait": LIMIT}, "stores_failed"),
        ({"store_timeout": LIMIT, "store_wait": 0.05}, "stores_dropped"),
    ],
)
def test_stores_have_the_limits_of_the_settings(limits: dict[str, float], counter: str) -> None:
    with silent_pool() as url:
        # Room for a few blocks on their way. A connection has as long as a look-up.
        settings = Settings(
            url, host_tier=False, host_bytes=4 * BLOCK_BYTES, lookup_timeout=LIMIT, **limits
        )
        rank = Rank(settings)
        rank.step(stores=[job(n, blocks((n, n))) for n in range(BLOCKS)])

        def is_counted() -> bool:
            rank.poll()
            return rank.counts().get(counter, 0) > 0

        eventually(is_counted, pause=0.001)
    rank.half.shutdown()


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank(IN_MEMORY)
    yield made
    made.half.shutdown()


def counted(blocks: int) -> dict[str, int]:
    """The counters of so many stored blocks, an object each."""
    payload = blocks * BLOCK_BYTES
    return {"stored_bytes": payload, "stored_value_bytes": payload + blocks * HEADER_BYTES}


def on_disk(folder: Path, **settings: object) -> Settings:
    url = f"file://{folder}/pool?size=64MiB"
    return Settings(url, host_bytes=1 << 20, **settings)  # type: ignore[arg-type]


def test_the_room_imports_neither_vllm_nor_torch() -> None:
    program = (
        "import sys, penstock.vllm.worker\n"
        "print([name for name in ('vllm', 'torch') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, env=os.environ
    )
    assert run.stdout == "[]\n"


def test_what_is_stored_is_loaded(rank: Rank) -> None:
    for n in range(3):
        rank.fill(n, n)
    report = rank.run(stores=[job(1, blocks((0, 0), (1, 1), (2, 2)))])
    assert report == WorkerReport(released={1: 1}, stored={1: 1})
    assert rank.counts() == counted(3)

    report = rank.run(step=7, loads=[job(2, blocks((0, 10), (1, 11), (2, 12)))])
    seconds = report.seconds.pop(2)
    assert 0 < seconds < 30
    assert report == WorkerReport(steps={7})
    assert rank.loaded == {"request-2"}
    assert [rank.block(n + 10) for n in range(3)] == [rank.block(n) for n in range(3)]
    assert rank.counts() == {"loads": 1, "loaded_bytes": 3 * BLOCK_BYTES}
    assert (rank.half.take_failed_blocks(), rank.half.take_failed_requests()) == (set(), set())


def test_a_finished_request_is_freed_when_its_stores_have_read(rank: Rank) -> None:
    rank.step(stores=[job(1, blocks((0, 0)))], finished=["request-1", "other"])
    report = WorkerReport()
    while 1 not in report.released:
        assert "request-1" not in rank.free
        report.merge(rank.poll())
    assert rank.free == {"request-1", "other"}
    rank.free.clear()
    rank.until_over(*() if 1 in report.stored else (1,))
    assert rank.free == set()


def test_results_may_be_asked_for_before_the_steps_stores_are_submitted(rank: Rank) -> None:
    """With a drafter, vLLM asks first: the drafter's layers are computed after the model's."""
    step = StepOrders(
        namespaces=NAMESPACES[:1],
        step=7,
        stores=[job(1, blocks((0, 0)))],
        finished=["request-1"],
    )
    rank.fill(0, 5)
    rank.half.begin_step(step)
    rank.half.start_loads(step)
    assert rank.poll() == WorkerReport(steps={7})
    assert rank.free == set()
    # What the drafter leaves in the block is stored with it.
    rank.fill(0, 6)
    rank.half.start_stores(step)
    assert rank.until_over(1) == WorkerReport(released={1: 1}, stored={1: 1})
    assert rank.free == {"request-1"}
    rank.run(loads=[job(2, blocks((0, 9)))])
    assert rank.block(9) == rank.block(0)


def test_of_one_group_what_is_missing_and_all_after_it_is_computed(rank: Rank) -> None:
    rank.run(stores=[job(1, blocks((0, 0), (1, 1)))])
    rank.counts()
    report = rank.run(loads=[job(2, blocks((0, 10), (9, 11), (8, 12)))])
    assert report.unloaded == {2: {1, 2}}
    assert report.lost.keys() == {2}
    assert 1 in report.lost[2]
    assert report.missing_bytes == {2: 2 * BLOCK_BYTES}
    assert rank.half.take_failed_blocks() == {11, 12}
    assert rank.half.take_failed_blocks() == set()
    assert rank.half.take_failed_requests() == set()
    counted = rank.counts()
    assert counted == {"loads": 1, "loaded_bytes": BLOCK_BYTES, "load_failed_blocks": 2}


def test_of_several_groups_a_load_has_failed_as_a_whole() -> None:
    rank = Rank(IN_MEMORY, (FULL, WINDOW))
    rank.run(stores=[job(1, blocks((0, 0)))])
    report = rank.run(loads=[job(2, blocks((0, 10), (9, 11)))])
    assert report.unloaded == {2: {0, 1}}
    assert report.lost == {2: {1}}
    assert report.missing_bytes == {2: BLOCK_BYTES}
    assert rank.half.take_failed_blocks() == set()
    assert rank.half.take_failed_requests() == {"request-2"}
    assert rank.counts()["load_failed_blocks"] == 2
    rank.half.shutdown()


def test_blocks_of_several_groups_are_told_apart(tmp_path: Path) -> None:
    rank = Rank(on_disk(tmp_path), (FULL, WINDOW))
    assert rank.poll().is_empty()
    rank.step()
    rank.poll()
    rank.fill(3, 1)
    both = Blocks([(0, 3, chunk(1), None), (1, 3, chunk(1), None)])
    report = rank.run(stores=[job(1, both)])
    assert sorted(host_changes(report.held)) == [(0, chunk(1), True), (1, chunk(1), True)]
    rank.run(loads=[job(2, Blocks([(1, 5, chunk(1), None)]))])
    of_group = [rank.layers[n][5].any() for n in range(4)]
    assert of_group == [False, False, True, True]
    assert rank.counts()["kept_bytes"] == BLOCK_BYTES
    rank.half.shutdown()


def test_a_prefetched_block_is_told_of_and_loaded_from_host_memory(tmp_path: Path) -> None:
    writer = Rank(on_disk(tmp_path, host_tier=False))
    writer.fill(0, 1)
    writer.run(stores=[job(1, blocks((1, 0)))])
    writer.half.shutdown()
    reader = Rank(on_disk(tmp_path))
    reader.step()
    reader.poll()
    report = reader.run(prefetches=[job(2, blocks((1, 0), (9, 0)))])
    assert report.prefetched == {2: 1}
    assert report.lost == {2: {1}}
    assert report.missing_bytes == {2: BLOCK_BYTES}
    assert report.unloaded == {}
    assert host_changes(report.held) == [(0, chunk(1), True)]
    assert reader.counts() == {"prefetched_bytes": BLOCK_BYTES}
    reader.run(loads=[job(3, blocks((1, 5)))], release=[2])
    assert reader.block(5) == writer.block(0)
    assert reader.counts() == {"loads": 1, "kept_bytes": BLOCK_BYTES}
    reader.half.shutdown()


def test_a_load_whose_time_is_over_is_told_from_one_that_missed_values() -> None:
    with silent_pool() as url:
        rank = Rank(Settings(url, host_bytes=1 << 20))
        late = replace(job(1, blocks((9, 3), (8, 4))), timeout=0.1)
        report = rank.run(loads=[late])
        assert report.unloaded == {1: {0, 1}}
        assert report.lost == {}
        assert rank.counts() == {"loads": 1, "load_failed_blocks": 2, "load_late_blocks": 2}
        rank.half.shutdown()


def test_nobody_misses_what_was_cancelled() -> None:
    with silent_pool() as url:
        rank = Rank(Settings(url, host_bytes=1 << 20))
        # There is no load 5: it is over.
        rank.step(loads=[job(1, blocks((9, 3)))], cancel_loads=[1, 5])
        report = rank.until_over(1)
        assert (report.unloaded, report.lost, report.missing_bytes) == ({}, {}, {})
        assert rank.half.take_failed_blocks() == set()
        assert rank.counts() == {"loads": 1}
        rank.step(cancel_loads=[1])
        rank.half.shutdown()


@pytest.mark.parametrize("takes_them_away", [True, False])
def test_loads_end_when_the_engine_takes_all_blocks_away_or_they_did_not_come(
    takes_them_away: bool,
) -> None:
    with silent_pool() as url:
        rank = Rank(Settings(url, host_bytes=1 << 20))
        rank.step(loads=[job(1, blocks((9, 3)))], stores=[job(2, blocks((8, 4)))])
        rank.half.end_transfers()
        if takes_them_away:
            rank.half.forget_failures()
        # Else another rank could not end its transfers, and vLLM goes on with these blocks.
        report = rank.poll()
        # The store's blocks were read, or it was given up.
        assert (rank.loaded, report.released) == ({"request-1"}, {2: 1})
        assert (report.unloaded, report.lost) == ({1: {0}}, {})
        assert rank.half.take_failed_blocks() == (set() if takes_them_away else {3})
        assert "load_failed_blocks" not in rank.counts(), "given up, not failed"
        assert rank.half.take_failed_requests() == set()
        rank.half.shutdown()


def test_of_a_load_that_failed_before_its_blocks_are_taken_away_nothing_is_said_either(
    rank: Rank,
) -> None:
    rank.run(loads=[job(1, blocks((9, 3)))])
    rank.half.end_transfers()
    rank.half.forget_failures()
    assert rank.half.take_failed_blocks() == set()


def test_a_rank_without_attention_layers_is_done_at_once() -> None:
    rank = Rank(IN_MEMORY, (FULL, WINDOW), layers=())
    share = rank.half.share
    assert share is not None
    assert (share.span, share.groups, share.host_blocks, share.slots) == (None, (None, None), 0, 0)
    both = Blocks([(0, 3, chunk(1), None), (1, 2**40, chunk(1), None)])
    rank.step(stores=[job(1, both)], loads=[job(2, both)], prefetches=[job(3, both)], release=[3])
    report = rank.poll()
    assert set(report.seconds) == {2, 3}
    report.seconds.clear()
    assert report == WorkerReport(released={1: 1}, stored={1: 1}, prefetched={3: 1})
    assert rank.loaded == {"request-2"}
    assert rank.half.take_failed_requests() == set()
    assert rank.counts() == {"loads": 1}
    rank.half.shutdown()


def test_a_rank_without_layers_of_a_group_does_its_part_of_the_others() -> None:
    rank = Rank(IN_MEMORY, (FULL, WINDOW), layers=(0, 1), stages=[(0, 2), (2, 4)])
    share = rank.half.share
    assert share is not None
    assert [part is None for part in share.groups] == [False, True]
    rank.fill(3, 3)
    both = Blocks([(0, 3, chunk(1), None), (1, 4, chunk(1), None)])
    assert rank.run(stores=[job(1, both)]).unstored == {}
    to = Blocks([(0, 5, chunk(1), None), (1, 6, chunk(1), None)])
    assert rank.run(loads=[job(2, to)]).unloaded == {}
    assert rank.block(5) == rank.block(3)
    assert rank.counts() == counted(1) | {"loads": 1, "loaded_bytes": BLOCK_BYTES}
    rank.half.shutdown()


def test_ranks_that_hold_the_same_take_turns_to_store(tmp_path: Path) -> None:
    settings = on_disk(tmp_path, host_tier=False)
    ranks = [Rank(settings, heads=1, tensor_ranks=2, tensor_rank=index) for index in range(2)]
    merged, stored = WorkerReport(), []
    for rank in ranks:
        for n in range(6):
            rank.fill(n, n)
        merged.merge(rank.run(stores=[job(1, blocks(*((n, n) for n in range(6))))]))
        stored.append(rank.counts()["stored_bytes"])
    assert merged == WorkerReport(released={1: 2}, stored={1: 2})
    assert stored == [3 * BLOCK_BYTES // HEADS] * 2
    assert ranks[0].run(loads=[job(2, blocks(*((n, 15 - n) for n in range(6))))]).unloaded == {}
    assert all(ranks[0].block(15 - n) == ranks[0].block(n) for n in range(6))
    for rank in ranks:
        rank.half.shutdown()


def test_more_than_an_engine_takes_is_dropped(rank: Rank) -> None:
    too_many = (1 << 18) + 1
    many = blocks(*(((n, n % BLOCKS)) for n in range(too_many)))
    report = rank.run(stores=[job(1, many)])
    assert report.unstored == {1: set(range(too_many))}
    assert (report.released, report.stored) == ({1: 1}, {1: 1})
    assert rank.counts() == {"stores_dropped": too_many}
    report = rank.run(loads=[job(2, many)])
    assert report.unloaded == {2: set(range(too_many))}
    assert report.lost == {}
    assert rank.half.take_failed_blocks() == set(range(BLOCKS))
    # What fits is stored and loaded as ever.
    rank.run(stores=[job(3, blocks((0, 0)))])
    assert rank.run(loads=[job(4, blocks((0, 1)))]).unloaded == {}


def test_blocks_of_another_adapter_are_neither_stored_nor_loaded() -> None:
    same = Adapter(1, "folder", "", "same")
    other = Adapter(2, "folder", "", "other")
    rank = Rank(IN_MEMORY, services=Services(agrees=lambda adapter: adapter == same))
    rank.fill(0, 1)
    report = rank.run(stores=[job(1, blocks((0, 0)), adapter=other)])
    assert report == WorkerReport(released={1: 1}, stored={1: 1}, unstored={1: {0}})
    report = rank.run(stores=[job(2, blocks((0, 0)), adapter=same)])
    assert report == WorkerReport(released={2: 1}, stored={2: 1})
    report = rank.run(loads=[job(3, blocks((0, 5)), adapter=other)])
    assert (report.unloaded, report.lost) == ({3: {0}}, {})
    assert rank.half.take_failed_blocks() == {5}
    assert not rank.block(5).strip(b"\0")
    report = rank.run(loads=[job(4, blocks((0, 5)), adapter=same)])
    assert report.unloaded == {}
    assert rank.block(5) == rank.block(0)
    rank.half.shutdown()


def test_values_of_another_key_are_foreign_and_those_damaged_are_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("k:" + base64.b64encode(bytes(32)).decode())
    file.chmod(0o600)
    keys = {"encryption_key_file": str(file)}
    writer = Rank(on_disk(tmp_path, host_tier=False, **keys))
    writer.run(stores=[job(1, blocks((0, 0), (1, 1)))])
    reader = Rank(on_disk(tmp_path, host_tier=False))
    with caplog.at_level("WARNING", "vllm.penstock"):
        for number in (2, 3):
            report = reader.run(loads=[job(number, blocks((0, 5)))])
            assert (report.foreign, report.lost) == ({number: {0}}, {})
            assert report.unloaded == {number: {0}}
    warnings = [text for text in caplog.messages if "encrypted with a key" in text]
    assert len(warnings) == 1
    counted = reader.counts()
    assert (counted["foreign_objects"], counted.get("rejected_objects")) == (2, None)
    # With another salt, they are damaged, as far as can be told.
    report = writer.run(loads=[job(4, blocks((1, 5)), salt=b"other")])
    assert (report.foreign, report.lost) == ({}, {4: {0}})
    assert writer.counts()["rejected_objects"] == 1
    reader.half.shutdown()
    writer.half.shutdown()


@pytest.mark.parametrize("element", ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", None])
def test_values_are_compressed_where_there_is_a_coder(tmp_path: Path, element: str | None) -> None:
    settings = on_disk(tmp_path, host_tier=False, compression="lossless")
    rank = Rank(settings, (replace(FULL, element=element),))
    rank.fill(0, 5)
    for memory in rank.layers.values():
        # Signs and mantissas at random, and one exponent.
        memory[0] = memory[0] & 0x83 | 0x3C
    rank.run(stores=[job(1, blocks((5, 0)))])
    (_, objects, lie, _) = Store.open(settings.pool).usage(timeout=LIMIT)[0]
    assert objects == 1
    assert (lie < BLOCK_BYTES) == (element is not None)
    assert rank.counts()["stored_bytes"] == BLOCK_BYTES
    assert rank.run(loads=[job(2, blocks((5, 1)))]).unloaded == {}
    assert rank.block(1) == rank.block(0)
    rank.half.shutdown()


@pytest.mark.parametrize("host_tier", [False, True])
def test_a_tenants_blocks_are_in_its_namespace(tmp_path: Path, host_tier: bool) -> None:
    settings = on_disk(tmp_path, host_tier=host_tier)
    rank = Rank(settings)
    rank.fill(0, 5)
    rank.run(stores=[job(1, blocks((5, 0)), tenant="red")])
    used = [namespace for namespace, *_ in Store.open(settings.pool).usage(timeout=LIMIT)]
    assert used == [tenant_namespace(NAMESPACES[0], "red")]
    for number, tenant in ((2, "blue"), (3, ""), (4, "red")):
        report = rank.run(loads=[job(number, blocks((5, number)), tenant=tenant)])
        assert report.lost == ({} if tenant == "red" else {number: {0}}), tenant
    assert rank.block(4) == rank.block(0) != rank.block(3)
    report = rank.run(prefetches=[job(5, blocks((5, 0)), tenant="blue")])
    assert report.lost == {5: {0}}
    rank.half.shutdown()


def test_memory_that_vllm_did_not_configure_is_refused() -> None:
    twice = Group(0, "full_attention", 2 * TOKENS, None, "uint8", ("0", "1"))
    with pytest.raises(ConfigError, match=f"registered {BLOCKS} pages of {TOKENS} tokens"):
        Rank(IN_MEMORY, (twice,))
    Rank(IN_MEMORY, (twice,), num_blocks=BLOCKS // 2).half.shutdown()


def test_orders_pass_between_processes() -> None:
    orders = StepOrders(
        namespaces=(bytes(16),), loads=[job(1, blocks((0, 1), (2, 3)), salt=b"secret")]
    )
    assert pickle.loads(pickle.dumps(orders)) == orders
    assert "secret" not in repr(orders)


COUNTS = st.dictionaries(st.integers(0, 3), st.integers(1, 5))
PLACES = st.dictionaries(st.integers(0, 3), st.sets(st.integers(0, 9), min_size=1))
REPORTS = st.builds(
    WorkerReport,
    steps=st.sets(st.integers(0, 9)),
    released=COUNTS,
    stored=COUNTS,
    unstored=PLACES,
    lost=PLACES,
    foreign=PLACES,
    unloaded=PLACES,
    held=st.binary(max_size=3),
    prefetched=COUNTS,
    seconds=st.dictionaries(st.integers(0, 3), st.floats(0, 9)),
    missing_bytes=COUNTS,
)


@given(st.lists(REPORTS, min_size=1, max_size=4))
def test_reports_of_several_ranks_are_merged(reports: list[WorkerReport]) -> None:
    merged = WorkerReport()
    for report in reports:
        merged.merge(pickle.loads(pickle.dumps(report)))
    assert merged.steps == set().union(*(report.steps for report in reports))
    assert merged.held == b"".join(report.held for report in reports)
    for name in ("released", "stored", "prefetched", "missing_bytes"):
        for number in range(4):
            of_ranks = [getattr(report, name).get(number, 0) for report in reports]
            assert getattr(merged, name).get(number, 0) == sum(of_ranks)
    for name in ("unstored", "lost", "foreign", "unloaded"):
        for number in range(4):
            found = [getattr(report, name).get(number, set()) for report in reports]
            assert getattr(merged, name).get(number, set()) == set().union(*found)
    for number in range(4):
        times = [report.seconds.get(number, 0.0) for report in reports]
        assert merged.seconds.get(number, 0.0) == max(times)
