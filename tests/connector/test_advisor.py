"""What an engine watches of itself, and what it advises for that."""

from __future__ import annotations

import itertools
import logging
import math
import statistics

import pytest

from penstock.errors import ConfigError
from penstock.vllm.advisor import ALWAYS, NEVER, POLICIES, Advisor, Reach, attended
from tests.connector.pretended import PretendedEngine

MIB = 1 << 20
REACH = Reach(1024, 0, 8 * MIB)
"""All of a prompt of 1,100 tokens that could be loaded."""


def engine(*, per_token: float = 0.001) -> Advisor:
    """One that has computed some prompts."""
    advisor = Advisor(2048)
    now = 0.0
    for step, tokens in enumerate((300, 900, 1500, 600)):
        advisor.on_step(now, step, tokens, attended(0, tokens))
        now += 0.01 + tokens * per_token
        advisor.on_output(now, [step])
        now += 5.0
    return advisor


def load(advisor: Advisor, number: int, pool_bytes: int, seconds: float, missing: int = 0) -> None:
    """One of 8 blocks at most, given up in the end if something is missing."""
    patience = seconds if missing else None
    advisor.on_begin(0.0, number, 0, pool_bytes, patience=patience)
    advisor.on_end(number, seconds, missing)


def wants_probe(
    advisor: Advisor,
    now: float,
    block: tuple[int, int] = (MIB, 1),
    *,
    reach: Reach = REACH,
) -> int:
    """Of a prompt that is computed from its first token."""
    return advisor.wants_probe(now, 0, reach, 1100, block)


def test_of_a_pool_that_is_not_known_a_load_is_tried() -> None:
    advisor = engine()
    choice = advisor.advise(0, [REACH], 1100)
    assert choice.end == 1024
    patience = advisor.patience(choice, 0, 8 * MIB, 8)
    assert patience == pytest.approx(1.11 / 8, rel=0.1)


def test_a_slow_pool_is_declined_and_a_fast_one_is_not() -> None:
    advisor, reach = engine(), [REACH]
    for number in range(2):
        load(advisor, number, 8 * MIB, 4.0)
        assert advisor.advise(0, reach, 1100).end == 0
    load(advisor, 2, 4 * MIB, 0.02)
    assert advisor.advise(0, reach, 1100).end == 1024


def test_after_a_load_that_was_given_up_the_pool_is_measured_first() -> None:
    advisor, reach = engine(), [REACH]
    for number in range(5):
        load(advisor, number, 8 * MIB, 0.1)
    load(advisor, 5, 8 * MIB, 0.2, missing=8 * MIB)
    assert advisor.advise(0, reach, 1100).end == 0
    # At once, and of two sizes: it could be latency, or bandwidth.
    assert wants_probe(advisor, 0.1) == 1
    advisor.on_begin(0.1, 6, 0, MIB, is_probe=True)
    assert wants_probe(advisor, 0.2) == 0
    advisor.on_end(6, 0.3, 0)
    # Until there is another, it could be bandwidth.
    assert advisor.advise(0, reach, 1100).end == 0
    assert wants_probe(advisor, 0.3) == 4
    advisor.on_begin(0.3, 7, 0, 4 * MIB, is_probe=True)
    advisor.on_end(7, 0.33, 0)
    assert wants_probe(advisor, 1.0) == 0
    assert advisor.advise(0, reach, 1100).end == 1024


def test_a_load_that_begins_when_the_pool_has_come_into_doubt_gets_little_time() -> None:
    advisor, reach = engine(), [REACH]
    load(advisor, 1, 8 * MIB, 0.1)
    choice = advisor.advise(0, reach, 1100)
    load(advisor, 2, 8 * MIB, 0.2, missing=8 * MIB)
    patience = advisor.patience(choice, 0, 8 * MIB, 8)
    assert patience == pytest.approx(1.11 / 8, rel=0.1)


def test_a_load_of_which_a_part_came_tells_how_fast_it_was() -> None:
    advisor = engine()
    load(advisor, 1, 8 * MIB, 0.5, missing=7 * MIB)
    assert advisor.advise(0, [REACH], 1100).end == 0
    assert advisor.advise(0, [Reach(1024, 0, MIB)], 1100).end == 1024


def test_a_request_that_ended_before_its_load_says_nothing_of_the_pool() -> None:
    advisor, reach = engine(), [REACH]
    load(advisor, 1, 8 * MIB, 0.1)
    advisor.on_begin(0.0, 2, 0, 8 * MIB, patience=0.2)
    advisor.on_end(2, 0.01, 8 * MIB)
    assert advisor.advise(0, reach, 1100).end == 1024


def test_host_memory_is_loaded_when_the_pool_is_slow() -> None:
    advisor = engine()
    load(advisor, 1, 8 * MIB, 4.0)
    reaches = [Reach(512, 4 * MIB, 0), Reach(1024, 4 * MIB, 4 * MIB)]
    assert advisor.advise(0, reaches, 1100).end == 512


def test_steps_in_flight_at_once_are_timed_one_after_the_other() -> None:
    advisor = Advisor(2048)
    # Ordered together, as vLLM does when it schedules ahead; each takes a second.
    for step in range(6):
        advisor.on_step(0.0 if step < 2 else step - 1.0, step, 1000, 0)
        if step:
            advisor.on_output(float(step), [step - 1])
    load(advisor, 1, MIB, 0.9)
    assert advisor.advise(0, [Reach(999, 0, MIB)], 1000).end == 999
    load(advisor, 2, MIB, 4.0)
    assert advisor.advise(0, [Reach(999, 0, MIB)], 1000).end == 0


def test_a_pool_that_is_left_alone_is_looked_at_now_and_then() -> None:
    advisor = engine()
    for number in range(2):
        load(advisor, number, 8 * MIB, 4.0)
    assert wants_probe(advisor, 4.0) == 0
    assert wants_probe(advisor, 6.0) == 1
    advisor.on_begin(6.0, 3, 0, MIB, is_probe=True)
    advisor.on_end(3, 1.0, 0)
    # It took so long that more often would keep the pool busy.
    assert wants_probe(advisor, 15.0) == 0
    assert wants_probe(advisor, 17.0, (100 * MIB, 1), reach=Reach(1024, 0, 800 * MIB)) == 2


def test_a_measurement_keeps_all_lanes_at_work() -> None:
    """Or two lanes, each with a rate of its own, would look like latency alone."""
    advisor = Advisor(2048, lanes=3)
    for now, objects, expected in ((0.0, 1, 3), (1.0, 1, 6), (2.0, 2, 2), (3.0, 8, 2)):
        assert wants_probe(advisor, now, (2 * MIB, objects)) == expected


def test_a_pool_that_says_nothing_is_not_asked_all_the_time() -> None:
    advisor = engine()
    load(advisor, 1, 8 * MIB, 0.2, missing=8 * MIB)
    assert wants_probe(advisor, 0.3) == 1
    advisor.on_begin(0.3, 2, 0, MIB, is_probe=True)
    advisor.on_end(2, 2.0, MIB)
    assert wants_probe(advisor, 4.0) == 0
    assert wants_probe(advisor, 21.0) == 4


def test_a_measurement_is_as_large_as_a_load_ever_more_rarely() -> None:
    engine = PretendedEngine(latency=0.0, bytes_per_second=8e6)
    whole = []
    for number in range(60):
        engine.ask()
        if f"{engine.blocks} blocks probed" in engine.last:
            whole.append(number)
    pauses = [b - a for a, b in itertools.pairwise(whole)]
    assert len(whole) >= 3
    assert all(b >= 2 * a for a, b in itertools.pairwise(pauses))


def test_a_large_measurement_finds_what_little_ones_do_not() -> None:
    advisor, reach = engine(), Reach(1024, 0, 64 * MIB)
    # As with a connection that is slow at first.
    for number, (now, blocks) in enumerate(((0.0, 1), (6.0, 4), (12.0, 1))):
        assert wants_probe(advisor, now, reach=reach) == blocks
        advisor.on_begin(now, number, 0, blocks * MIB, is_probe=True)
        advisor.on_end(number, 0.05 * blocks, 0)
        assert advisor.advise(0, [reach], 1100).end == 0
    assert wants_probe(advisor, 18.0, reach=reach) == 64
    advisor.on_begin(18.0, 4, 0, 64 * MIB, is_probe=True)
    advisor.on_end(4, 0.3, 0)
    assert advisor.advise(0, [reach], 1100).end == 1024


def test_what_is_hopeless_is_not_measured_whole() -> None:
    advisor = engine()
    load(advisor, 1, 8 * MIB, 10.0)
    sizes = [wants_probe(advisor, 6.0 * (n + 1)) for n in range(12)]
    assert set(sizes) == {1, 4}


NETWORKS = {
    "as it is": (0.0, 500e6),
    "10 ms, 500 Mbit/s": (0.01, 60e6),
    "10 ms, 200 Mbit/s": (0.01, 25e6),
    "10 ms, 100 Mbit/s": (0.01, 12e6),
    "100 ms, 100 Mbit/s": (0.1, 12e6),
    "100 ms, 20 Mbit/s": (0.1, 2.5e6),
    "1 s, 2 Mbit/s": (1.0, 0.25e6),
}


@pytest.mark.parametrize("rate_per_lane", [False, True])
@pytest.mark.parametrize("before", NETWORKS)
@pytest.mark.parametrize("network", NETWORKS)
def test_hits_never_take_much_longer_than_computing(
    before: str, network: str, rate_per_lane: bool
) -> None:
    engine = PretendedEngine(blocks=12, rate_per_lane=rate_per_lane)
    engine.latency, engine.bytes_per_second = NETWORKS[before]
    for _ in range(20):
        engine.ask()
    engine.latency, engine.bytes_per_second = NETWORKS[network]
    settling = [engine.ask() for _ in range(12)]
    assert statistics.mean(settling) <= 1.1 * engine.recomputation
    settled = [engine.ask() for _ in range(30)]
    assert statistics.mean(settled) <= 1.05 * engine.recomputation
    better = min(engine.recomputation, engine.load)
    assert statistics.median(settled) <= 1.12 * better, engine.last


@pytest.mark.parametrize("rate_per_lane", [False, True])
@pytest.mark.parametrize("before", NETWORKS)
@pytest.mark.parametrize("network", NETWORKS)
def test_once_it_has_settled_no_hit_takes_longer_than_computing(
    before: str, network: str, rate_per_lane: bool
) -> None:
    for seed in range(4):
        engine = PretendedEngine(seed=seed, noise=0.05, rate_per_lane=rate_per_lane)
        engine.latency, engine.bytes_per_second = NETWORKS[before]
        for _ in range(14):
            engine.ask()
        engine.latency, engine.bytes_per_second = NETWORKS[network]
        engine.ask(), engine.ask()
        for _ in range(12):
            # Computing varies by as much.
            assert engine.ask() <= 1.03 * engine.recomputation, engine.last


def test_a_slow_start_is_not_believed_for_ever() -> None:
    """An engine's first prompt takes long, and after two others all are in the pool."""
    engine = PretendedEngine(warm_up=5.0)
    for _ in range(6):
        engine.ask()
    # 1.2 times the recomputation.
    engine.latency, engine.bytes_per_second = 0.01, 11e6
    settled = [engine.ask() for _ in range(12)][2:]
    assert statistics.median(settled) <= 1.1 * engine.recomputation, engine.last


def test_an_engine_that_only_loads_finds_out_that_it_computes_faster_now() -> None:
    engine = PretendedEngine(bytes_per_second=11e6, seconds_per_token=0.003)
    for _ in range(20):
        engine.ask()
    assert "declined" not in engine.last
    # What it computes after a load takes as long as before, and does not tell.
    engine.seconds_per_token, engine.seconds_per_step = 0.001, 0.06
    settled = [engine.ask() for _ in range(40)][20:]
    assert statistics.median(settled) <= 1.1 * engine.recomputation, engine.last
    # Where loads are clearly worth it, nothing is recomputed to know.
    engine = PretendedEngine()
    assert not any("declined" in engine.last for _ in range(50) if engine.ask())


def test_a_request_waits_for_a_look_up_that_may_pay() -> None:
    advisor, reach = engine(), REACH
    # Nothing is known yet: that is found out.
    assert Advisor(2048).awaits_lookup(0, reach, 1100, None)
    assert advisor.awaits_lookup(0, reach, 1100, None)
    load(advisor, 1, 8 * MIB, 0.2)
    assert advisor.awaits_lookup(0, reach, 1100, 0.1)
    # The look-up alone takes as long as computing; the last one failed.
    assert not advisor.awaits_lookup(0, reach, 1100, 1.2)
    assert not advisor.awaits_lookup(0, reach, 1100, math.inf)
    load(advisor, 2, 8 * MIB, 4.0)
    assert not advisor.awaits_lookup(0, reach, 1100, 0.001)


def test_what_is_computed_to_know_how_long_that_takes_does_not_wait() -> None:
    advisor, reach = engine(), REACH
    for number in range(4):
        load(advisor, number, 8 * MIB, 0.8)
        assert advisor.awaits_lookup(0, reach, 1100, 0.01)
        assert advisor.advise(0, [reach], 1100, may_check=True).end == 1024
    assert not advisor.awaits_lookup(0, reach, 1100, 0.01)
    assert advisor.awaits_lookup(0, reach, 1100, 0.01)


def test_always_and_never() -> None:
    slow, fast, reach = engine(), engine(), [REACH]
    load(slow, 1, 8 * MIB, 99.0)
    choice = slow.advise(0, reach, 1100, ALWAYS)
    assert choice.end == 1024
    assert slow.patience(choice, 0, 8 * MIB, 8) is None
    assert slow.awaits_lookup(0, reach[0], 1100, math.inf, ALWAYS)
    load(fast, 1, 8 * MIB, 0.01)
    assert fast.advise(16, reach, 1100, NEVER).end == 16
    assert not fast.awaits_lookup(0, reach[0], 1100, 0.001, NEVER)


def test_every_policy_is_known_to_the_native_part_and_no_other() -> None:
    for policy in POLICIES:
        engine().advise(0, [REACH], 1100, policy)
    with pytest.raises(ConfigError, match="'sometimes' is none of auto, always, never"):
        engine().advise(0, [REACH], 1100, "sometimes")


def test_decisions_and_probes_are_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("vllm.penstock")
    # Whatever vLLM's own configuration does with it.
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    with caplog.at_level(logging.DEBUG, logger.name):
        advisor = engine()
        load(advisor, 1, 8 * MIB, 4.0)
        advisor.advise(0, [REACH], 1100)
        advisor.on_begin(6.0, 2, 0, MIB, is_probe=True)
        advisor.on_end(2, 1.5, 1024)
    decision, probe = (record.getMessage() for record in caplog.records)
    assert "of tokens 0 to 1024 load up to 0: recomputing 1.1" in decision
    assert "loading to 1024 3.99" in decision
    assert "of a probe 1047552 bytes came in 1.5 s" in probe
