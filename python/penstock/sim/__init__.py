"""Simulation: replays a trace over a fleet, to see what a pool would find before there is one.

`Trace.read` reads a trace. `Fleet` describes the nodes, their caches and the pool. `replay` runs
the simulation, with Penstock's own eviction policies and its own rule for loading or recomputing.
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
