"""Requests and steps: hashes of blocks, tables of blocks, cache salts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock.vllm.compat.versions import installed
from penstock.vllm.names import PREFIX

_HINT_VERSION = "1"

NULL_BLOCK = 0
"""The id in a block table for a block that is not needed any more."""


@functools.cache
def _hashing() -> Any:
    """vLLM's module of block hashes. Cached, because it is needed many times in a step."""
    from vllm.v1.core import kv_cache_utils

    return kv_cache_utils


def none_hash() -> bytes:
    """The hash that starts every chain of block hashes. It is set once the engine core is up."""
    return bytes(_hashing().NONE_HASH)


def hash_block_size(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """Tokens of the blocks that hashes are computed over; None for the only group's block size."""
    return installed().hash_block_size(vllm_config, kv_cache_config)


def cache_salt(request: Any) -> bytes:
    """The request's cache salt; empty if it has none. The salt is part of the first block's hash,
    and so of all block hashes."""
    salt: str | None = request.cache_salt
    return (salt or "").encode(errors="surrogatepass")


def kv_hints(request: Any) -> dict[str, Any] | None:
    """The hints that an orchestrator attached to the request, as far as they are Penstock's, by
    their names; None if there are none. vLLM carries them since 0.32: the action's type is the
    name, its version is "1", and its payload has one entry, ``value``."""
    if (envelope := getattr(request, "kv_hints", None)) is None:
        return None
    return {
        action.action_type: action.payload.get("value")
        for action in envelope.actions
        if action.action_type.startswith(PREFIX) and action.action_version == _HINT_VERSION
    }


def hit_source(tier: str) -> Any:
    """vLLM's value for a tier's name."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    return CacheHitSource(tier)


def scheduled(scheduler_output: Any) -> tuple[list[str], list[int]]:
    """The requests of this step, and for each the number of tokens computed before."""
    new, cached = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
    requests, computed = cached.req_ids, cached.num_computed_tokens
    if new:
        requests = [*requests, *(request.req_id for request in new)]
        computed = [*computed, *(request.num_computed_tokens for request in new)]
    return requests, computed


def block_tables(scheduler_output: Any) -> Callable[[str], Sequence[Sequence[int]]]:
    """Request id → its present block ids by vLLM's groups, for requests scheduled in this step."""
    resolve: Callable[[str], Sequence[Sequence[int]]]
    resolve = scheduler_output.kv_connector_block_state.resolve_block_ids
    return resolve


def boundary_states(scheduler_output: Any) -> Iterator[tuple[str, int, int]]:
    """States that vLLM says it keeps at a border of blocks: request id, vLLM's group, and the
    tokens that left the state. The block is in the request's table. Its content is complete once
    this step is computed."""
    offered = scheduler_output.kv_connector_block_state.boundary_state_offloads
    for request_id, states in offered.items():
        for group, _, tokens in states:
            yield request_id, group, tokens


def newly_allocated(scheduler_output: Any) -> Iterator[int]:
    """The blocks that requests scheduled in this step got with it."""
    for request in scheduler_output.scheduled_new_reqs:
        for blocks in request.block_ids:
            yield from blocks
    for new in scheduler_output.scheduled_cached_reqs.new_block_ids:
        for blocks in new or ():
            yield from blocks
