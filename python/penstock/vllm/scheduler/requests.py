"""The scheduler half's knowledge of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from penstock._native import Choice, Reach
from penstock.vllm.messages import BlockJob
from penstock.vllm.scheduler.facts import EngineRequest


class Phase(Enum):
    """The phase that a request is in."""

    WAITING = auto()
    """The request waits for its turn: it has just come, was preempted, or its load is over."""
    LOADING = auto()
    """The request has blocks, into which its load is written."""
    RUNNING = auto()
    """The request is being computed."""
    ENDED = auto()
    """The engine is done with it, but a load or stores of its blocks are still under way."""


@dataclass(frozen=True)
class Offer:
    """A run of tokens that the engine may have loaded."""

    first: int
    choice: Choice

    @property
    def end(self) -> int:
        """The token at which the run ends."""
        return self.choice.end


@dataclass(frozen=True)
class Advice:
    """The last advice, and the question that it answers. The same question gets the same answer."""

    first: int
    reaches: tuple[Reach, ...]
    choice: Choice | None


Client = tuple[str, bytes]
"""A client, as far as an engine can tell: a tenant's name, and the digest of a cache salt. Both are
empty for all requests of nobody in particular."""


@dataclass
class Expected:
    """Blocks that another engine stores, or is about to store."""

    end: int
    """The token up to which they are expected."""
    client: Client | None = None
    """With whose waits this one is counted; None if with nobody's."""
    found: int = 0
    """The token up to which they have come."""
    seen_from: int | None = None
    """The token from which `found` was told; None if more may have come since."""
    until: float | None = None
    """When the wait ends, unless more comes; None if nobody has waited since more came."""
    pause: float = 0.002
    """Seconds until the next look-up, once the last one was answered."""
    ask_at: float | None = None
    """When to look again; None until a look-up has been answered."""


@dataclass(frozen=True)
class KvHints:
    """What becomes of a request's blocks when it is over, as its hints say."""

    keep: float | None = None
    """Seconds for which its blocks will be asked for again."""
    let_go: int | None = None
    """What follows so many tokens will not be asked for again."""


NO_HINTS = KvHints()


@dataclass
class LoadSpan:
    """A request's OpenTelemetry span so far. Times are nanoseconds of the wall clock."""

    began: int
    """When the look-up began."""
    waited: float = 0.0
    """Seconds that the request has waited for its look-up or its load."""
    load_began: int | None = None
    tokens: int = 0
    """Tokens of its load."""
    blocks: int = 0
    """Blocks of its load."""
    host_bytes: int = 0
    pool_bytes: int = 0
    is_lost: bool = False
    """Whether some block of its load was not in the pool, not whole, or encrypted with another
    key."""


@dataclass
class RequestState:
    """The scheduler half's state of one request."""

    request: EngineRequest
    policy: str
    """The load policy: the request's own, or the engine's."""
    salt: bytes = b""
    """See :attr:`~penstock.vllm.messages.BlockJob.salt`."""
    label: str = ""
    """The name of its tenant, if it gives one: in metrics, whoever owns the blocks."""
    trace_headers: Mapping[str, str] | None = None
    """See :attr:`~penstock.vllm.scheduler.facts.Arrival.trace_headers`."""
    has_images: bool = False
    """See :attr:`~penstock.vllm.scheduler.facts.Arrival.has_images`."""
    phase: Phase = Phase.WAITING
    asked_at: float = 0.0
    """When its last look-up began, by the monotonic clock."""
    awaits: bool | None = None
    """Whether the engine waits for the request's look-up once it has room for the request; None if
    it has had no room yet."""
    unawaited_from: int | None = None
    """The token from which it is computed without its look-up's answer; None if the answer came."""
    advice: Advice | None = None
    offer: Offer | None = None
    """The last offer to the engine."""
    expected: Expected | None = None
    """What the request waits for, of another engine's blocks."""
    is_handed_over: bool = False
    """Whether another engine goes on with it."""
    is_taken_over: bool = False
    """Whether another engine computes its prompt."""
    hints: KvHints = NO_HINTS
    load: BlockJob | None = None
    load_bytes: tuple[int, int] = (0, 0)
    """Bytes of its load, or last load, from host memory and from the pool."""
    prefetches: list[int] = field(default_factory=list)
    """The prefetches that keep blocks for it."""
    witnesses: int = 0
    """The number of its blocks that were ordered to be compared with the pool's."""
    reached: int = 0
    """The token after the last one that the engine has of it without computing: by its own cache,
    and by what is loaded here. Beyond it, another connector beside this one has loaded."""
    is_recomputed: bool | None = None
    """Whether it is computed on purpose, though it could be loaded; None while nothing could be."""
    is_declined: bool = False
    """Whether less was offered than could have been loaded."""
    is_stale: bool = False
    """Whether it has, or had when it came to it, something of weights that are gone."""
    hashes: int = 0
    """How many of its block hashes the catalogue has."""
    last_hash: bytes = b""
    """The last of them."""
    is_private: bool = False
    """Whether nothing of it is shared, as nobody knows what its blocks hold."""
    is_failed: bool = False
    """Whether a load did not bring everything. Then no other load is tried, as it could fail in the
    same way for ever."""
    waits_since: float | None = None
    """Since when it has been waiting for its look-up or its load, though it could be computed."""
    span: LoadSpan | None = None
    """The request's span, while it may still load; None if spans are off."""
    stores: set[int] = field(default_factory=set)
    """Store jobs whose source blocks some rank has not read yet."""

    @property
    def id(self) -> str:
        """The engine's name for it."""
        return self.request.request_id

    @property
    def tenant(self) -> str:
        """The tenant that owns its blocks; empty if nobody does.

        Without a salt of its own, a request shares blocks with requests of others."""
        return self.label if self.salt else ""

    @property
    def account(self) -> bytes:
        """The account whose room its hints take: its tenant's, or that of all who give its salt."""
        return self.tenant.encode() or (b"\0" + self.salt if self.salt else b"")

    def begin_anew(self) -> None:
        """The request waits for its turn again."""
        self.phase = Phase.WAITING
        self.is_failed = False
        self.expected = None
        self.is_recomputed = None if self.is_recomputed is None else False
        self.awaits = self.unawaited_from = self.advice = self.waits_since = None
