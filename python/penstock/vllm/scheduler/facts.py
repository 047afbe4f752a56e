"""The facts that the scheduler half needs about its engine, requests and steps, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.vllm.adapters import Adapter
from penstock.vllm.groups import Groups

BlockTables = Sequence[Sequence[int]]
"""A request's block ids, by group of the engine."""


@dataclass(frozen=True)
class EngineFacts:
    """The facts about an engine that never change."""

    groups: Groups
    hash_tokens: int
    """Tokens that a block hash adds to its chain."""
    tokens_per_step: int
    """Tokens that a step computes at most."""
    has_peers: bool
    """Whether other engines compute in step with this one, and would wait for it."""
    null_block: int
    """The id in a block table for a block that is not needed any more."""
    engine_id: str = ""
    """vLLM's name for the engine."""
    tensor_parallel: int = 1
    """Ranks of the engine that share a layer."""
    ranks: int = 1
    """Ranks of the engine, of all pipeline stages."""
    rounding: int = 0
    """What stands for how the engine rounds numbers, in 24 bits; 0 if it does not always compute
    the same block to the same bits."""
    names_sessions_anew: bool = True
    """Whether a block of a session gets another hash when the session drops a token of it."""
    holds_prompts: bool = False
    """Whether steps between those that compute prompts compute none."""
    speculates: bool = False
    """Whether a step may compute tokens that are rejected."""
    drops_last_block: bool = False
    """Whether the engine computes the last block of what it finds in its own cache again."""
    holds_blocks: bool = False
    """Whether a block must be held while a store reads it. This is so if the engine takes blocks
    back while their request still computes, or writes to a block that it has taken back before
    workers learn of it."""
    publishes_events: bool = False
    """Whether vLLM publishes KV events."""
    hash_prompt: Callable[[Any, list[int]], list[bytes]] | None = None
    """A request and the tokens of another prompt → that prompt's block hashes, under the request's
    adapter and salt. May be called on any thread; raises ConfigError if these are no tokens. None
    if hashes cannot be computed."""


class EngineBlocks(Protocol):
    """The engine's blocks, by their ids in block tables."""

    def is_cached(self, block_hash: bytes, group: int) -> bool:
        """Whether the engine's own prefix cache has the block, in this group of the engine."""

    def hold(self, blocks: Iterable[int]) -> None:
        """Keeps the engine from giving these blocks to another request."""

    def free(self, blocks: Iterable[int]) -> None:
        """Ends a :meth:`hold` of these blocks."""

    def watch_resets(self, is_reset: Callable[[], None]) -> None:
        """Has `is_reset` called whenever the engine's own prefix cache has been emptied."""


class EngineRequest(Protocol):
    """A request, as the engine sees it. Its values change while it is computed."""

    @property
    def request_id(self) -> str:
        """Unique among the engine's requests."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens: those of the prompt, and those computed after it."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose KV is in the engine's cache."""

    @property
    def block_hashes(self) -> list[bytes]:
        """Chained hashes, one for every `hash_tokens` final tokens."""

    @property
    def resumable(self) -> bool:
        """Whether more may be said after its answer. Then its last hashes may change."""

    @property
    def skip_reading_prefix_cache(self) -> bool | None:
        """Whether the whole request is to be computed."""


@dataclass(frozen=True)
class Arrival:
    """A new request."""

    request: EngineRequest
    params: Mapping[str, Any] | None
    """The client's parameters for the connector (``kv_transfer_params``)."""
    salt: bytes = b""
    """See :attr:`~penstock.vllm.messages.BlockJob.salt`."""
    trace_headers: Mapping[str, str] | None = None
    """The W3C trace context that the request came with: `traceparent`, `tracestate`."""
    hints: Mapping[str, Any] | None = None
    """Hints that came beside `params`, by the same names."""
    has_images: bool = False
    """Whether it has images, or sounds or the like, of which the engine keeps what it made."""


@dataclass(frozen=True)
class Step:
    """The step that the engine computes next."""

    requests: list[str]
    """The requests in the step."""
    computed: list[int]
    """For each of `requests`, the tokens computed before."""
    tokens: dict[str, int]
    """Request → the tokens of it that the step computes."""
    preempted: Iterable[str]
    """Preempted requests. This step may overwrite the blocks that they had."""
    tables: Callable[[str], BlockTables]
    """Request → its block tables with this step."""
    new_blocks: Callable[[], Iterable[int]]
    """The blocks that requests get with this step."""
    states: Callable[[], Iterable[tuple[str, int, int]]] = tuple
    """States that the engine says a block holds after this step: the request, the engine's number
    of the group, and the tokens that left the state."""

    @property
    def is_empty(self) -> bool:
        """Whether the step computes nothing."""
        return not self.tokens


AdapterOf = Callable[[Any], Adapter | None]
"""Request → the LoRA adapter in its blocks' hashes; None if the request asks for none."""
