"""Requests and steps: what clients give with a request, hashes of blocks, tables of blocks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penstock.vllm.compat.configuration import has_penstock
from penstock.vllm.compat.versions import installed
from penstock.vllm.names import PREFIX

logger = logging.getLogger("vllm.penstock")

_HINT_VERSION = "1"
_PARAMS = "kv_transfer_params"

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


def names_sessions_anew() -> bool:
    """Whether a block of a session gets another hash when the session drops a token of it."""
    return installed().NAMES_SESSIONS_ANEW


def cache_salt(request: Any) -> bytes:
    """The request's cache salt; empty if it has none. The salt is part of the first block's hash,
    and so of all block hashes. A salt that is no text keeps blocks apart as vLLM's hashes do."""
    salt: Any = request.cache_salt
    if not isinstance(salt, str | None):
        salt = repr(salt)
    return (salt or "").encode(errors="surrogatepass")


def kv_params(request: Any) -> Mapping[str, Any] | None:
    """The client's parameters for the connector; None if there are none, or if they are no object.
    vLLM takes whatever a client writes under that name in `vllm_xargs`."""
    return _kv_params(request.kv_transfer_params)


def _kv_params(given: Any) -> Mapping[str, Any] | None:
    if given is None or isinstance(given, Mapping):
        return given
    _warn_of_params(type(given).__name__)
    return None


@functools.lru_cache(maxsize=16)
def _warn_of_params(kind: str) -> None:
    # Once for each type: a client may send such with every request.
    logger.warning(
        "Penstock: a request's %s is no object but %s: the request is served without it",
        _PARAMS,
        kind,
    )


def drop_wrong_params() -> None:
    """Has frontends drop parameters for the connector that are no object, once in a process, for
    engines with Penstock. vLLM's own code would fail on them."""
    from vllm.v1.engine.input_processor import InputProcessor

    process = InputProcessor.process_inputs
    if hasattr(process, "drops_wrong_params"):
        return

    @functools.wraps(process)
    def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
        request = process(self, *arguments, **options)
        sampling: Any = getattr(request, "sampling_params", None)
        extra = (sampling is not None and sampling.extra_args) or {}
        given = extra.get(_PARAMS)
        if given is None or not has_penstock(self.vllm_config):
            return request
        if _kv_params(given) is None:
            # Not in place: the client's own parameters may be used for other requests too.
            sampling.extra_args = {key: extra[key] for key in extra if key != _PARAMS}
        return request

    wrapped.drops_wrong_params = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = wrapped


def kv_hints(request: Any) -> dict[str, Any] | None:
    """The hints that an orchestrator attached to the request, as far as they are Penstock's, by
    their names; None if there are none. vLLM carries them since 0.32: the action's type is the
    name, its version is "1", and its payload has one entry, ``value``."""
    if (envelope := getattr(request, "kv_hints", None)) is None:
        return None
    return {
        action.action_type: action.payload.get("value")
        for action in envelope.actions
        if str(action.action_type).startswith(PREFIX)
        and action.action_version == _HINT_VERSION
        and isinstance(action.payload, Mapping)
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
