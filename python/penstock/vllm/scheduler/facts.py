"""What the connector has to know of its engine, its requests and its steps, in plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.vllm.adapters import Adapter
from penstock.vllm.groups import Groups

BlockTables = Sequence[Sequence[int]]
"""A request's block ids, by the engine's groups."""


@dataclass(frozen=True)
class EngineFacts:
    """What holds for an engine as long as it lives."""

    groups: Groups
    hash_tokens: int
    """Tokens that a block hash adds to its chain."""
    tokens_per_step: int
    """Tokens that a step computes at most."""
    has_peers: bool
    """Whether other engines compute in step with this one, and would wait for it."""
    leaves_one_token: bool
    """Whether a load must leave a single token to compute: the engine cannot compute several after
    some that are in its KV cache."""
    null_block: int
    """The block that stands in a block table for one that is not needed any more."""


class EngineRequest(Protocol):
    """A request as the engine has it; its values change as it is computed."""

    @property
    def request_id(self) -> str:
        """Unique among the engine's requests."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and those computed after it."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the engine's cache."""

    @property
    def block_hashes(self) -> list[bytes]:
        """Chained hashes, one for every `hash_tokens` tokens that are final."""

    @property
    def skip_reading_prefix_cache(self) -> bool | None:
        """Whether it is to be computed whole."""


@dataclass(frozen=True)
class Arrival:
    """A new request."""

    request: EngineRequest
    params: Mapping[str, Any] | None
    """What its client asks of the connector."""
    tenant: bytes = b""
    """See :attr:`~penstock.vllm.messages.BlockJob.tenant`."""


@dataclass(frozen=True)
class Step:
    """What the engine computes next."""

    requests: list[str]
    """The requests in it."""
    computed: list[int]
    """Of each, the tokens computed before."""
    tokens: dict[str, int]
    """Of each, the tokens that the step computes."""
    preempted: Iterable[str]
    """Requests that were put off; the blocks they had may be overwritten by this step."""
    tables: Callable[[str], BlockTables]
    """Request → its block tables with this step."""
    new_blocks: Callable[[], Iterable[int]]
    """The blocks that were given to requests with this step."""

    @property
    def is_empty(self) -> bool:
        """Whether it computes nothing."""
        return not self.tokens


AdapterOf = Callable[[Any], Adapter | None]
"""The LoRA adapter that a request's blocks are named by; None if it asks for none."""
