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
import random
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput

from benches.shared import report
from benches.shared.rows import Times, turns
from benches.shared.scheduler_parts import BLOCK, Half, OwnCache, Requests
from penstock.vllm.scheduler_facts import arrival, step

PLACES = ("pool", "host memory", "half each", "nowhere")
PARTS = ("arrival", "first match", "further match")
TOGETHER, OWN = "together", "vLLM's own"
DECODING = 1_000
"""Prompt tokens of each request that is being decoded."""


def tokens_of(count: int) -> list[int]:
    """Tokens at random."""
    return [random.randrange(100_000) for _ in range(count)]


def one_prompt(
    requests: Requests,
    half: Half,
    own: OwnCache,
    place: str,
    tokens: list[int],
    timed: Callable[[str, Callable[[], object]], None],
) -> None:
    """Times the parts for one prompt, whose blocks are in `place`, and vLLM's own look-up."""
    blocks, scheduler = len(tokens) // BLOCK, half.half
    first = requests.make(tokens)
    if place in ("pool", "half each"):
        half.put_in_pool(first)
    if place in ("host memory", "half each"):
        half.hold(first, blocks if place == "host memory" else blocks // 2)
    own.take_in(first)
    request = requests.make(tokens)
    timed("arrival", lambda: scheduler.on_new_request(arrival(request)))
    # The look-up is answered meanwhile. An engine core that has work does not sleep.
    until = time.perf_counter() + 0.1
    while time.perf_counter() < until:
        pass
    offered: list[int | None] = []
    ask = lambda: offered.append(scheduler.match(request.request_id, 0))  # noqa: E731
    timed("first match", ask)
    # Other blocks came into host memory, as they do with every step.
    half.hold(requests.make(tokens_of(BLOCK + 1)), 1)
    timed("further match", ask)
    all_but_last = (len(tokens) - 1) // BLOCK * BLOCK
    wanted = 0 if place == "nowhere" else all_but_last
    assert offered == [wanted, wanted], (offered, wanted)
    again = requests.make(tokens)
    timed(OWN, lambda: own.look_up(again))
    assert own.look_up(again) == all_but_last
    scheduler.on_finished(request.request_id, [[]])


def prompts(requests: Requests, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each place where the blocks of a prompt may be."""
    times = Times()
    own = OwnCache((rounds + 1) * len(PLACES) * tokens)
    with closing(Half(tokens // BLOCK + 16)) as half:
        # The first prompt pays for things that all later ones use.
        for number, place in turns(PLACES, rounds):
            report.progress(f"{tokens} tokens, {place}, round {number}")
            timed = partial(times.run, number, place)
            one_prompt(requests, half, own, place, tokens_of(tokens + 1), timed)
    rows = []
    for place in PLACES:
        parts = [times.each(place, part) for part in PARTS]
        together = list(map(sum, zip(*parts, strict=True)))
        for number, seconds in enumerate(together):
            times.add(number, place, TOGETHER, seconds)
        rows.append(
            {
                "tokens": tokens,
                "place": place,
                "us": {what: times.median(place, what) * 1e6 for what in (*PARTS, TOGETHER, OWN)},
                "ratio": report.median_ratio(together, times.each(place, OWN)),
            }
        )
    return rows


def decode_steps(requests: Requests, half: Half, count: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of steps that decode one token for each of `count` requests."""
    decoding = [requests.make(tokens_of(DECODING)) for _ in range(count)]
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
        began = time.perf_counter()
        orders = half.half.build_orders(step(made))
        took = (time.perf_counter() - began) * 1e6
        for request in decoding:
            request.num_computed_tokens += scheduled
            request.append_output_token_ids(7)
        return took, bool(orders.stores)

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
    parser = argparse.ArgumentParser(prog="benches.scheduler_cost", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32_768, 131_072])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=256)
    args = report.begin(parser)
    requests = Requests()
    rows = [row for tokens in args.tokens for row in prompts(requests, tokens, args.rounds)]
    with closing(Half(64)) as half:
        steps = decode_steps(requests, half, args.requests, 20 * args.rounds)
    decoding = {name: statistics.median(times) for name, times in steps.items() if times}
    tables = [
        report.table(
            ["prompt", "where its blocks are", *rows[0]["us"], "ratio"],
            [
                [f"{row['tokens']:,}", row["place"]]
                + [f"{value:,.0f}" for value in row["us"].values()]
                + [f"{row['ratio']:.2f}"]
                for row in rows
            ],
        ),
        report.table(
            ["requests that decode", "of them", "µs a step"],
            [[f"{args.requests}", name, f"{value:.0f}"] for name, value in decoding.items()],
        ),
    ]
    steps_taken = {"requests": args.requests, "us": decoding}
    report.finish(args, "\n\n".join(tables), {"prompts": rows, "steps": steps_taken})


if __name__ == "__main__":
    main()
