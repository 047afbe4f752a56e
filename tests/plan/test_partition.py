"""The best partition, against every partition there is."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.plan.kv import KvSizes, Serving
from penstock.plan.model import Kv, Layer, Model, default_partition, stages
from penstock.plan.partition import Device, Partition, Planner


def model(
    weights: list[int],
    kv: list[bool],
    embedding: int = 0,
    tied: bool = False,
    everywhere: bool = False,
) -> Model:
    return Model(
        architecture="test",
        layers=tuple(
            Layer(nbytes, Kv("full", 1, 2) if keeps else None)
            for nbytes, keeps in zip(weights, kv, strict=True)
        ),
        embedding_bytes=embedding,
        head_bytes=0 if tied else embedding,
        tied=tied,
        everywhere=everywhere,
        front_bytes=embedding // 2,
        hidden=1,
        element_bytes=1,
        kv_element_bytes=1,
        max_length=16,
        weights_from="test",
    )


def every_partition(layers: int, ranks: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, layers), ranks - 1)
    return [tuple(b - a for a, b in zip((0, *cut), (*cut, layers), strict=True)) for cut in cuts]


def assess(planner: Planner, layers: tuple[int, ...]) -> Partition | None:
    try:
        return planner.assess(layers)
    except ConfigError:
        return None


@st.composite
def planners(draw: st.DrawFn) -> tuple[Planner, list[Partition]]:
    count = draw(st.integers(1, 8))
    ranks = draw(st.integers(1, count))
    weights = draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    kv = draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any))
    found = model(weights, kv, draw(st.integers(0, 30)), draw(st.booleans()), draw(st.booleans()))
    devices = [
        Device(draw(st.integers(1, 2000)), draw(st.sampled_from([1.0, 1.5, 2.0])))
        for _ in range(ranks)
    ]
    planner = Planner(found, KvSizes(found, Serving(block_size=1)), devices)
    every = [assess(planner, layers) for layers in every_partition(count, ranks)]
    return planner, [partition for partition in every if partition is not None]


@given(planners())
def test_no_partition_holds_more_nor_as_much_faster(
    found: tuple[Planner, list[Partition]],
) -> None:
    planner, every = found
    best = planner.best()
    if best is None:
        assert not every
        return
    assert best in every
    assert (best.blocks, -best.slowest) == max((p.blocks, -p.slowest) for p in every)


@given(planners())
def test_the_frontier_is_what_nothing_beats(found: tuple[Planner, list[Partition]]) -> None:
    planner, every = found
    reached = {(p.blocks, p.slowest) for p in planner.frontier()}
    unbeaten = {
        (p.blocks, p.slowest)
        for p in every
        if not any(
            (q.blocks >= p.blocks and q.slowest < p.slowest)
            or (q.blocks > p.blocks and q.slowest <= p.slowest)
            for q in every
        )
    }
    assert reached == unbeaten


@given(st.integers(1, 80), st.integers(1, 16))
def test_the_default_partition_makes_up_the_model(layers: int, ranks: int) -> None:
    if ranks > layers:
        with pytest.raises(ConfigError, match=f"{layers} layers cannot be spread"):
            default_partition(layers, ranks)
        return
    partition = default_partition(layers, ranks)
    assert stages(partition, layers)[-1][1] == layers
    assert max(partition) - min(partition) <= 1


def test_vllms_default_partitions() -> None:
    """As vllm.distributed.utils.get_pp_indices says of them."""
    assert default_partition(10, 4) == [2, 3, 3, 2]
    assert default_partition(11, 4) == [3, 3, 3, 2]
    assert default_partition(61, 8) == [7, 7, 8, 8, 8, 8, 8, 7]


@pytest.mark.parametrize(
    ("partition", "says"),
    [
        ([48, 15], "partition 48,15 has 63 layers, the model has 64"),
        ([64, 0], "partition 64,0: every rank needs a layer"),
        ([70, -6], "every rank needs a layer"),
    ],
)
def test_partitions_that_are_none(partition: list[int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        stages(partition, 64)


def test_weights_that_do_not_fit_say_their_numbers() -> None:
    found = model([100] * 4, [True] * 4)
    planner = Planner(found, KvSizes(found, Serving(block_size=1)), [Device(150), Device(900)])
    with pytest.raises(ConfigError, match=r"rank 0: .* 2 layers take 200 bytes, .* has 150"):
        planner.assess((2, 2))
    assert planner.best() == planner.assess((1, 3))
    assert (
        Planner(found, KvSizes(found, Serving(block_size=1)), [Device(99), Device(900)]).best()
        is None
    )


def test_a_large_pipeline_takes_less_than_a_second() -> None:
    """128 layers over 16 unequal devices; the bound is the promise, ten times what it takes."""
    rng = random.Random(1)
    found = model([1_000_000] * 128, [True] * 128, embedding=2_000_000)
    devices = [Device(rng.randrange(20, 80) * 1_000_000, rng.choice([1.0, 1.5])) for _ in range(16)]
    began = time.process_time()
    best = Planner(found, KvSizes(found, Serving()), devices).best()
    assert best is not None
    assert time.process_time() - began < 1
