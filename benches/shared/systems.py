"""What benches compare: every KV connector by its short name, as on the command line."""

from __future__ import annotations

from benches.shared.connectors import Connector, Penstock, PenstockNode
from benches.shared.peers import Example, LMCache, Mooncake

BASELINE = "none"


def every() -> dict[str, Connector]:
    """All of them, each a new one. The first one is the baseline."""
    return {
        BASELINE: Connector(),
        "example": Example(),
        "penstock-node": PenstockNode(),
        "penstock-shm": Penstock("shm"),
        "penstock-file": Penstock("file"),
        "penstock-file-layers": Penstock("file", kv_layout="LBHNC"),
        "penstock-file-portable": Penstock("file", pool_geometry="portable"),
        "penstock-redis": Penstock("redis", "unix socket"),
        "penstock-redis-tcp": Penstock("redis", "TCP"),
        "penstock-valkey": Penstock("valkey", "unix socket"),
        "penstock-valkey-tcp": Penstock("valkey", "TCP"),
        "lmcache": LMCache(redis=False),
        "lmcache-redis": LMCache(redis=True),
        "mooncake": Mooncake(),
    }


NAMES = tuple(every())
"""All short names."""
