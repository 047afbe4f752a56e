"""What the scheduler half knows of a request, and of a store under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.vllm.costs import Choice
from penstock.vllm.messages import BlockJob


@dataclass
class Tracked:
    """What is known of one request."""

    request: Any
    policy: str
    """Whether to load what can be loaded: its own word on it, or the engine's."""
    lookups: list[int] = field(default_factory=list)
    """Look-ups under way, one for each group."""
    present: list[list[bool]] | None = None
    """Their answers, by group, per block of the prompt; nothing of a group is present if empty."""
    awaits: bool | None = None
    """Whether the engine, once it has room for the request, waits for their answers; None if it has
    had none yet."""
    unawaited_from: int | None = None
    """The token from which it is computed without their answers; None if they came in time."""
    offer: tuple[int, int] = (0, 0)
    """The run of tokens last offered to the engine, from and to."""
    choice: Choice | None = None
    """What was advised of that run."""
    prefetch: int | None = None
    """The prefetch that keeps blocks for it."""
    is_considered: bool = False
    """Whether it was decided what to prefetch: once a request, however long it waits."""
    is_declined: bool = False
    """Whether less was offered than could have been."""
    is_failed: bool = False
    """Whether a load did not bring everything: another could fail in the same way, for ever."""
    advice: tuple[int, int, Choice | None] | None = None
    """The last advice, with the token from which, and the state of host memory for which it holds:
    vLLM asks in each step until it has room."""
    load: BlockJob | None = None
    unloaded: set[bytes] = field(default_factory=set)
    """Names of the blocks of the present load that did not come."""
    considered: list[int] = field(default_factory=list)
    """By group: blocks before this one have been stored, or need not be."""
    stores: set[int] = field(default_factory=set)
    """Store jobs whose source some rank has yet to read."""
    is_scheduled: bool = False
    """Whether it is being computed: it was scheduled, and not preempted since."""


@dataclass
class StoreJob:
    """A store that some rank has yet to do its part of."""

    job: BlockJob
    unread: int
    results: list[list[bool]] = field(default_factory=list)
