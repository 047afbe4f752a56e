"""Replay of traces over fleets: what a pool would find, before there is one.

`Trace.read` reads a trace, `Fleet` says what is simulated, `replay` does it with the policies that
Penstock itself evicts with, and the rule by which it loads or recomputes.
"""

from penstock._native import Trace
from penstock.sim.fleet import (
    POLICIES,
    ROUTINGS,
    Engine,
    Fleet,
    Outcome,
    Sums,
    Tier,
    replay,
)
from penstock.sim.sizes import Sizes, size_pool

__all__ = [
    "POLICIES",
    "ROUTINGS",
    "Engine",
    "Fleet",
    "Outcome",
    "Sizes",
    "Sums",
    "Tier",
    "Trace",
    "replay",
    "size_pool",
]
