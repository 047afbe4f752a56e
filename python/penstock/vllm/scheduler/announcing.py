"""Announcing: what others are told of the blocks that a store has brought into the pool."""

from __future__ import annotations

from collections.abc import Iterable

from penstock._native import Blocks
from penstock.vllm.descriptions import Descriptions
from penstock.vllm.scheduler.events import Events
from penstock.vllm.scheduler.requests import RequestState


class Announcing:
    """The announcements of stores: routers hear of blocks, operators of namespaces."""

    def __init__(self, events: Events | None, descriptions: Descriptions) -> None:
        """`events` is None if vLLM publishes none."""
        self._events = events
        self._descriptions = descriptions

    @property
    def needs_blocks(self) -> bool:
        """Whether blocks are announced."""
        return self._events is not None

    def on_stored(
        self,
        state: RequestState,
        blocks: Blocks | None,
        unstored: Iterable[int],
        lost: Iterable[int],
        stored: int,
    ) -> None:
        """A store has ended on all ranks. It brought `stored` blocks into the pool, all but those
        at the positions `unstored`. The pool no longer has those at the positions `lost`."""
        if self._events is not None and blocks is not None:
            self._events.on_stored(state, blocks, unstored)
            self._events.on_lost(state, blocks, lost)
        if stored:
            self._descriptions.publish(state.tenant)
