"""The bytes that blocks of KV take on a pipeline stage, with layers grouped as in vLLM.

Layers of different kinds are in different groups, and each group has a block table. All groups take
blocks of one size from one pool. So a block takes as many bytes as the stage's largest group needs
(``vllm.v1.core.kv_cache_utils``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.plan.model import Kv, Model


@dataclass(frozen=True)
class Serving:
    """The options of `vllm serve` that decide how many bytes KV takes."""

    block_size: int = 16
    tp: int = 1
    element_bytes: int | None = None
    """Bytes of an element of KV; None for the model's default."""
    max_length: int | None = None
    """Tokens of the longest request; None for the model's own limit."""
    batched_tokens: int = 8192
    """vLLM's max_num_batched_tokens."""
    concurrent_batches: int = 2
    """Batches under way at once (vLLM's max_concurrent_batches): the number of pipeline ranks, and
    one more with asynchronous scheduling. Layers with a window also keep the tokens of these
    batches."""


class KvSizes:
    """Bytes of blocks by stage, and blocks of requests, for one model and one way to serve it."""

    def __init__(self, model: Model, serving: Serving) -> None:
        """Groups the model's layers.

        Raises:
            ConfigError: the sizes make no sense, or vLLM groups these layers in a way that is not
                known here.
        """
        if serving.block_size < 1:
            raise ConfigError(f"a block of {serving.block_size} tokens is none")
        self.max_length = serving.max_length or model.max_length
        if self.max_length < 1:
            raise ConfigError(f"the longest request cannot have {self.max_length} tokens")
        self._serving = serving
        element = serving.element_bytes or model.kv_element_bytes
        self._page_bytes = [
            0
            if layer.kv is None
            else layer.kv.token_bytes(serving.tp, element) * serving.block_size
            for layer in model.layers
        ]
        self._groups = _groups([layer.kv for layer in model.layers], self._page_bytes)
        # By group, then by layer: the bytes of the group's pages in all layers before that layer.
        self._before = [
            [
                sum(self._page_bytes[layer] for layer in group.layers if layer < end)
                for end in range(len(model.layers) + 1)
            ]
            for group in self._groups
        ]

    @property
    def groups(self) -> int:
        """Number of groups; a request has a block table for each."""
        return len(self._groups)

    def token_bytes(self, start: int, end: int) -> int:
        """Bytes of one token's KV in the layers `[start, end)`, on each rank."""
        return sum(self._page_bytes[start:end]) // self._serving.block_size

    def block_bytes(self, start: int, end: int) -> int:
        """Bytes that a block takes on each rank of a stage with the layers `[start, end)`."""
        return max(before[end] - before[start] for before in self._before)

    def request_blocks(self) -> int:
        """Blocks that a request of the greatest length takes, in all groups together."""
        size = self._serving.block_size
        in_flight = self._serving.batched_tokens * self._serving.concurrent_batches
        found = 0
        for group in self._groups:
            tokens = self.max_length
            if group.kind == "sliding":
                # One more block, as the window may begin and end in the middle of a block.
                kept = min(group.window - 1 + in_flight, tokens)
                found += -(-kept // size) + 1
                continue
            if group.kind == "chunked":
                tokens = min(group.window + in_flight, tokens)
            found += -(-tokens // size)
        return found

    def tokens(self, blocks: int) -> int:
        """Tokens that vLLM reports for this number of blocks."""
        return tokens_in(blocks, self.request_blocks(), self.max_length)

    def concurrency(self, blocks: int) -> float:
        """How many requests of the greatest length fit."""
        return blocks / self.request_blocks()

    def blocks(self, tokens: int) -> int:
        """The fewest blocks for which vLLM reports at least `tokens`.

        Raises:
            ConfigError: vLLM would not start with so few blocks.
        """
        return blocks_for(tokens, self.request_blocks(), self.max_length)


def tokens_in(blocks: int, request_blocks: int, max_length: int) -> int:
    """Tokens that vLLM reports for this number of blocks: the greatest length, times the number of
    requests of that length that fit. That number may be a fraction (``get_kv_cache_capacity``)."""
    return int(blocks / request_blocks * max_length)


def blocks_for(tokens: int, request_blocks: int, max_length: int) -> int:
    """The fewest blocks for which vLLM reports at least `tokens`.

    Raises:
        ConfigError: the blocks do not hold a request of the greatest length and the block that vLLM
            keeps back, so vLLM would not start.
    """
    blocks = max(1, tokens * request_blocks // max_length)
    while tokens_in(blocks, request_blocks, max_length) < tokens:
        blocks += 1
    if blocks <= request_blocks:
        least = tokens_in(request_blocks + 1, request_blocks, max_length)
        raise ConfigError(
            f"{tokens:,} tokens of KV do not hold a request of {max_length:,} tokens and the block "
            f"that vLLM keeps back: ask for {least:,} at least, or lower --max-model-len"
        )
    return blocks


@dataclass(frozen=True)
class _Group:
    kind: str
    window: int
    layers: tuple[int, ...]


def _groups(kinds: Sequence[Kv | None], page_bytes: Sequence[int]) -> list[_Group]:
    """The groups of a whole model's layers."""
    buckets: dict[tuple[str, int], list[int]] = {}
    for layer, kv in enumerate(kinds):
        if kv is not None:
            # MLA latents and full attention both keep every token, so one group may hold both.
            kind = "full" if kv.kind == "mla" else kv.kind
            buckets.setdefault((kind, kv.window or 0), []).append(layer)
    if not buckets:
        raise ConfigError("the model has no layer that keeps KV: there is nothing to plan")
    if len(buckets) == 1:
        return [_Group(*key, tuple(layers)) for key, layers in buckets.items()]
    pages = {page_bytes[layer] for layers in buckets.values() for layer in layers}
    if len(pages) > 1:
        raise ConfigError(
            f"the model has layers of several kinds with pages of {sorted(pages)} bytes; how vLLM "
            "packs those depends on the attention backend, and is not planned yet"
        )
    counts = [len(layers) for layers in buckets.values()]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    found = []
    for key, layers in buckets.items():
        number = -(-len(layers) // size)
        found += [_Group(*key, tuple(layers[i::number])) for i in range(number)]
    return found
