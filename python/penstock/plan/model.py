"""A model as the planner sees it: the weights of each layer, and the KV that it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.errors import ConfigError

Kind = Literal["full", "sliding", "chunked", "mla"]


@dataclass(frozen=True)
class Kv:
    """The KV of one layer, before tensor parallelism."""

    kind: Kind
    heads: int
    """KV heads; 1 for MLA, whose latent has no heads."""
    content: int
    """Elements of key and value of one token and head; for MLA, of latent and rotary part."""
    window: int | None = None
    """Tokens that a sliding or chunked layer attends to."""

    def token_bytes(self, tp: int, element_bytes: int) -> int:
        """Bytes of a token on each of `tp` tensor-parallel ranks.

        A rank holds at least one head: with more ranks than heads, vLLM repeats heads.

        Raises:
            ConfigError: the heads do not divide over the ranks.
        """
        if self.kind != "mla" and self.heads % tp and tp % self.heads:
            raise ConfigError(f"{self.heads} KV heads cannot be spread over {tp} ranks")
        heads = 1 if self.kind == "mla" else max(1, self.heads // tp)
        return heads * self.content * element_bytes


@dataclass(frozen=True)
class Layer:
    """One layer: the bytes of its weights, and its KV; None if it keeps none."""

    weight_bytes: int
    kv: Kv | None


@dataclass(frozen=True)
class Model:
    """A model's layers in order, and the parts before and after them."""

    architecture: str
    layers: tuple[Layer, ...]
    embedding_bytes: int
    """Bytes of the embedding. It is on the first rank, and on the last if embeddings are tied; or
    on all ranks if `everywhere`."""
    head_bytes: int
    """Bytes of the output projection. It is on the last rank, or on all ranks if `everywhere`. 0 if
    the embedding serves as projection."""
    tied: bool
    everywhere: bool
    """Whether vLLM's model puts embedding and output projection on every rank of a pipeline."""
    front_bytes: int
    """Bytes of encoders of pictures and sound, on the first rank."""
    hidden: int
    element_bytes: int
    """Bytes of an element in the type that the model computes in."""
    kv_element_bytes: int
    """Bytes of an element of KV by default."""
    max_length: int
    """Tokens of the longest request that the model is made for."""
    weights_from: str
    """Source of the weights' bytes, in words: the files, or which estimate."""

    def weight_bytes(self, start: int, end: int) -> int:
        """Bytes of weights of a pipeline stage with the layers `[start, end)`, on all
        tensor-parallel ranks together."""
        is_first, is_last = start == 0, end == len(self.layers)
        total = sum(layer.weight_bytes for layer in self.layers[start:end])
        total += self.front_bytes * is_first
        total += self.embedding_bytes * (self.everywhere or is_first or (self.tied and is_last))
        return total + self.head_bytes * (self.everywhere or is_last)


def stages(partition: Sequence[int], layers: int) -> list[tuple[int, int]]:
    """The layers of each rank, as half-open ranges.

    Raises:
        ConfigError: the numbers do not make up the model's layers, or one is less than 1.
    """
    shown = ",".join(map(str, partition))
    if any(count < 1 for count in partition):
        raise ConfigError(f"partition {shown}: every rank needs a layer at least")
    if sum(partition) != layers:
        raise ConfigError(f"partition {shown} has {sum(partition)} layers, the model has {layers}")
    ends = [sum(partition[: rank + 1]) for rank in range(len(partition))]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def default_partition(layers: int, ranks: int) -> list[int]:
    """The number of layers that vLLM gives each rank by default.

    If the layers do not divide evenly, the ranks just before the last one get one more layer each
    (``vllm.distributed.utils.get_pp_indices``).

    Raises:
        ConfigError: there are more ranks than layers.
    """
    if not 1 <= ranks <= layers:
        raise ConfigError(f"{layers} layers cannot be spread over {ranks} ranks")
    partition = [layers // ranks] * ranks
    for rank in range(2, layers % ranks + 2):
        partition[-rank] += 1
    return partition
