"""Simulation: replays a trace over a fleet, to see what a pool would find before there is one.

`Trace.read` reads a trace. `Fleet` describes the nodes, their caches and the pool. `replay` runs
the simulation, with Penstock's own eviction policies and its own rule for loading or recomputing.
`compare` runs it once for several sets of tiers. `saving` says what a pool saves in money.
`object_store_requests` says how many requests a pool gets if it is an object store.
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
    Tiers,
    compare,
    replay,
)
from penstock.sim.money import Load, Prices, Saving, break_even_bytes, saving
from penstock.sim.packs import ObjectStore, Requests
from penstock.sim.packs import requests as object_store_requests
from penstock.sim.sizes import Sizes, size_pool

__all__ = [
    "POLICIES",
    "ROUTINGS",
    "Engine",
    "Fleet",
    "Load",
    "ObjectStore",
    "Outcome",
    "Prices",
    "Requests",
    "Saving",
    "Sizes",
    "Sums",
    "Tier",
    "Tiers",
    "Trace",
    "break_even_bytes",
    "compare",
    "object_store_requests",
    "replay",
    "saving",
    "size_pool",
]
