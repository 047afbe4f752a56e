"""What a pool saves in money: GPUs that prefill no longer needs, less what the pool costs.

A node's time is what it computes prompts with, at its prefill speed. A token that is loaded instead
of computed frees that time. Freed time counts as money whether or not whole GPUs can be given back:
this is what the same time costs elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from penstock.option import option, shown

HOURS_PER_MONTH = 730
_GIB = 1 << 30


@dataclass(frozen=True)
class Prices:
    """What things cost, all in one currency."""

    gpu_hour: float = field(
        metadata=shown(
            "PRICE",
            "price of a GPU for an hour; with it, the output says what pools save in money",
            name="price-gpu-hour",
        )
    )
    pool_gib_month: float = field(
        metadata=shown(
            "PRICE",
            "price of a GiB of the pool's memory for a month, servers included",
            name="price-pool-gib-month",
        )
    )
    network_gib: float = option(
        0.0,
        "PRICE",
        "price of a GiB moved between a node and the pool (default: 0)",
        name="price-network-gib",
    )
    gpus_per_node: int = option(1, "N", "GPUs of a node, which together have its prefill speed")


@dataclass(frozen=True)
class Load:
    """A fleet without the pool: what the pool is compared with."""

    computed_tokens: int
    """Prompt tokens that all nodes compute without the pool."""
    seconds: float
    """How long the trace lasts."""
    prefill_speed: float
    """Prompt tokens that a node computes per second."""


@dataclass(frozen=True)
class Saving:
    """What a pool saves, and what it costs. Money is for a month under the trace's load."""

    pool_bytes: int
    prefill_share: float
    """Share of the prefill that the pool saves; below 0 if it makes nodes compute more."""
    gpu_seconds: float
    """GPU time that is saved while the trace lasts."""
    gpus: float
    """GPUs that are not needed, on average."""
    gpu_money: float
    pool_money: float
    network_money: float

    @property
    def net(self) -> float:
        """Money that is left; below 0 if the pool costs more than it saves."""
        return self.gpu_money - self.pool_money - self.network_money

    @property
    def break_even_price(self) -> float:
        """Price of a GiB of the pool for a month at which nothing is left; 0 if the pool does not
        even pay for its network."""
        return max(0.0, self.gpu_money - self.network_money) / (self.pool_bytes / _GIB)


def saving(
    load: Load, prices: Prices, *, pool_bytes: int, computed_tokens: int, moved_bytes: int
) -> Saving:
    """What a pool of `pool_bytes` saves. With it, all nodes compute `computed_tokens`, and move
    `moved_bytes` to and from it."""
    seconds = max(load.seconds, 1e-6)
    saved = load.computed_tokens - computed_tokens
    gpu_seconds = saved / load.prefill_speed * prices.gpus_per_node
    gpus = gpu_seconds / seconds
    per_month = HOURS_PER_MONTH * 3600 / seconds
    return Saving(
        pool_bytes=pool_bytes,
        prefill_share=saved / max(1, load.computed_tokens),
        gpu_seconds=gpu_seconds,
        gpus=gpus,
        gpu_money=gpus * HOURS_PER_MONTH * prices.gpu_hour,
        pool_money=pool_bytes / _GIB * prices.pool_gib_month,
        network_money=moved_bytes / _GIB * per_month * prices.network_gib,
    )


def break_even_bytes(savings: Sequence[Saving]) -> float | None:
    """The largest pool that costs no more than it saves, of pools of several sizes, the smallest
    first. Between two sizes, money is taken to grow evenly. None if the largest pool still pays, or
    if none does."""
    if not savings or savings[-1].net >= 0:
        return None
    for smaller, larger in reversed(list(pairwise(savings))):
        if smaller.net >= 0 > larger.net:
            part = smaller.net / (smaller.net - larger.net)
            return smaller.pool_bytes + part * (larger.pool_bytes - smaller.pool_bytes)
    return None
