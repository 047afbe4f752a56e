"""Sharing: which requests' blocks other requests and engines may have."""

from __future__ import annotations

from typing import Any

from penstock.vllm.adapters import NamedAdapters
from penstock.vllm.roles import Role
from penstock.vllm.scheduler.facts import AdapterOf
from penstock.vllm.scheduler.requests import RequestState
from penstock.vllm.scheduler.weights import Weights


class Sharing:
    """The rules of one engine: by its role, and by the adapters and weights that blocks are of."""

    def __init__(
        self, role: Role, weights: Weights, adapters: NamedAdapters, adapter_of: AdapterOf
    ) -> None:
        self._role = role
        self._weights = weights
        self._adapters = adapters
        self._adapter_of = adapter_of

    def is_shared(self, request: Any) -> bool:
        """Whether the request's blocks may be shared: it uses no adapter, or the adapter's content
        is known and has never changed."""
        adapter = self._adapter_of(request)
        return adapter is None or self._adapters.shares(adapter)

    def may_load(self, state: RequestState) -> bool:
        """Whether the request may load blocks."""
        if state.request.skip_reading_prefix_cache or state.is_failed or not self._role.loads:
            return False
        return self._is_known(state)

    def may_store(self, state: RequestState) -> bool:
        """Whether the request's blocks may be stored."""
        return self._role.stores and self._is_known(state)

    def _is_known(self, state: RequestState) -> bool:
        """Whether it is known what the request's blocks hold, and of which weights they are."""
        if state.is_stale or state.is_private or self._weights.is_unknown:
            return False
        return self.is_shared(state.request)

    def note_local_hit(self, state: RequestState, tokens: int) -> None:
        """The request has so many tokens of the engine's own prefix cache. They may be of weights
        that are gone."""
        state.is_stale |= self._weights.is_stale(hits=tokens > 0, has_images=state.has_images)
