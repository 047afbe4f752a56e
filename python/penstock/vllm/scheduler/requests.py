"""What the scheduler half knows of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from penstock._native import Choice, Reach
from penstock.vllm.messages import BlockJob
from penstock.vllm.scheduler.facts import EngineRequest


class Phase(Enum):
    """Where a request is."""

    WAITING = auto()
    """For its turn: it has just come, was preempted, or its load is over."""
    LOADING = auto()
    """It has blocks, into which its load is written."""
    RUNNING = auto()
    """It is being computed."""
    ENDED = auto()
    """The engine is done with it; a load or stores of its blocks are not."""


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
    """What was advised last, and of what: asked again, the same is said."""

    first: int
    reaches: tuple[Reach, ...]
    choice: Choice | None


@dataclass
class Tracked:
    """One request of the engine."""

    request: EngineRequest
    policy: str
    """Whether to load what can be loaded: its own word on it, or the engine's."""
    tenant: bytes = b""
    label: str = ""
    """What metrics call its tenant."""
    phase: Phase = Phase.WAITING
    awaits: bool | None = None
    """Whether the engine, once it has room for the request, waits for its look-up; None if it has
    had none yet."""
    unawaited_from: int | None = None
    """The token from which it is computed without its look-up's answer; None if that came."""
    advice: Advice | None = None
    offer: Offer | None = None
    """What was offered to the engine last."""
    load: BlockJob | None = None
    prefetch: int | None = None
    """The prefetch that keeps blocks for it."""
    is_declined: bool = False
    """Whether less was offered than could have been."""
    is_failed: bool = False
    """Whether a load did not bring everything: another could fail in the same way, for ever."""
    waits_since: float | None = None
    """Since when it waits for its look-up or its load, though it could be computed."""
    stores: set[int] = field(default_factory=set)
    """Store jobs whose source some rank has yet to read."""

    @property
    def id(self) -> str:
        """The engine's name for it."""
        return self.request.request_id

    def begin_anew(self) -> None:
        """It waits for its turn again, and nothing of the past counts."""
        self.phase = Phase.WAITING
        self.is_failed = False
        self.awaits = self.unawaited_from = self.advice = self.waits_since = None
