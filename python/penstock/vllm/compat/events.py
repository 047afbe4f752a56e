"""KV events: what vLLM's publisher tells routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

STORAGE, LOCAL, REMOTE = "STORAGE", "LOCAL", "REMOTE"
"""vLLM's names: a medium that is neither GPU nor host memory; this machine, or another."""

_OWNER = "penstock"


def publishes_events(vllm_config: Any) -> bool:
    """Whether this engine publishes KV events."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


class _Shown:
    """A request as events show it: whoever listens must not learn its salt."""

    def __init__(self, request: Any, salt: str | None, *, has_content: bool) -> None:
        self._request = request
        self.cache_salt = salt
        if not has_content:
            self.mm_features: Sequence[Any] = ()
            self.prompt_embeds = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def stored_event(
    request: Any,
    group: Any,
    block_hashes: Sequence[bytes],
    parent_block_hash: bytes | None,
    first: int,
    locality: str,
    *,
    salt: str | None = None,
    has_content: bool = False,
) -> Any:
    """Blocks of a request that came into the pool, one after the other; the first of them begins at
    the token `first`. `group` is the :class:`~penstock.vllm.groups.Group` that they are of.

    The event has `salt` where vLLM's own has the request's cache salt. What the request holds is in
    the event only with `has_content`: token ids, names of images, digests of embeddings, its
    session.
    """
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.core import kv_cache_utils

    end = first + len(block_hashes) * group.block_size
    shown_request = _Shown(request, salt, has_content=has_content)
    extra = [
        kv_cache_utils.generate_block_hash_extra_keys(shown_request, at, at + group.block_size, 0)[
            0
        ]
        for at in range(first, end, group.block_size)
    ]
    # Since 0.31, the keys have tags, which events leave out.
    shown = getattr(kv_cache_utils, "to_event_extra_keys", list)(extra)
    lora = request.lora_request
    convert = kv_cache_utils.maybe_convert_block_hash
    values = {
        "block_hashes": [convert(block_hash) for block_hash in block_hashes],
        "parent_block_hash": None if parent_block_hash is None else convert(parent_block_hash),
        "token_ids": list(request.all_token_ids[first:end]) if has_content else [],
        "block_size": group.block_size,
        "lora_id": None if lora is None else lora.adapter_id,
        "medium": STORAGE,
        "lora_name": None if lora is None else lora.name,
        "extra_keys": shown,
        "group_idx": group.index,
        "kv_cache_spec_kind": group.kind,
        "kv_cache_spec_sliding_window": group.window,
        "locality": locality,
        "ownership": _OWNER,
        "session_id": getattr(request, "session_id", None) if has_content else None,
    }
    known = BlockStored.__struct_fields__
    return BlockStored(**{name: value for name, value in values.items() if name in known})


def removed_event(group: Any, block_hashes: Sequence[bytes], locality: str) -> Any:
    """Blocks that are not in the pool any more, or of which nobody here knows."""
    from vllm.distributed.kv_events import BlockRemoved
    from vllm.v1.core import kv_cache_utils

    convert = kv_cache_utils.maybe_convert_block_hash
    return BlockRemoved(
        block_hashes=[convert(block_hash) for block_hash in block_hashes],
        medium=STORAGE,
        group_idx=group.index,
        locality=locality,
        ownership=_OWNER,
    )
