"""The hit ratio that the simulator expects for the demo's requests, and the one that was found."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lab.demo.figures import Hits
from lab.demo.replay import BLOCK_TOKENS, Exchange, chain
from lab.demo.workload import NODES
from penstock.sim import Fleet, Tier, Trace, replay

_SPACING = 1_000.0
"""Milliseconds between requests in the trace. The demo sends them one after the other."""


def requests_text(exchanges: Sequence[Exchange]) -> str:
    """The requests as a trace in Mooncake's format, with blocks of `BLOCK_TOKENS` tokens. The trace
    has no answers."""
    numbers: dict[bytes, int] = {}
    lines = []
    for position, exchange in enumerate(exchanges):
        ids = [numbers.setdefault(name, len(numbers)) for name in chain(exchange.prompt)]
        entry = {
            "timestamp": position * _SPACING,
            "input_length": len(exchange.prompt),
            "output_length": len(exchange.answer.tokens),
            "hash_ids": ids,
        }
        lines.append(json.dumps(entry) + "\n")
    return "".join(lines)


def expected_hit_ratio(exchanges: Sequence[Exchange]) -> float:
    """Share of the prompts' whole blocks that the demo's two nodes over one pool should find, by
    `penstock simulate`. No cache in the simulation gets full."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "requests.jsonl"
        path.write_text(requests_text(exchanges), encoding="utf-8")
        trace = Trace.read(path, block_tokens=BLOCK_TOKENS)
    unbounded = Tier(max(1, trace.blocks) * BLOCK_TOKENS, "lru", bandwidth=1e9, latency=0.0)
    fleet = Fleet(NODES, unbounded, unbounded, bytes_per_token=1, prefill_speed=1e3)
    return replay(trace, fleet).total.hit_ratio


def hits_of(exchanges: Sequence[Exchange]) -> Hits:
    """The shares of the prompts' whole blocks that were found, declined, late, and expected."""
    blocks = max(1, sum(len(exchange.prompt) // BLOCK_TOKENS for exchange in exchanges))
    found = sum(each.local_tokens + each.loaded_tokens for each in exchanges) // BLOCK_TOKENS
    declined = sum(each.moved.declined_tokens for each in exchanges) // BLOCK_TOKENS
    late = sum(each.moved.late_blocks for each in exchanges)
    return Hits(found / blocks, declined / blocks, late / blocks, expected_hit_ratio(exchanges))
