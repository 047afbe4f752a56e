"""KV-cache groups and specs: which can be transferred, and which are refused."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.vllm.compat.devices import is_cpu
from penstock.vllm.compat.drafts import parts, speculation_problems
from penstock.vllm.compat.states import named, state_of
from penstock.vllm.compat.versions import installed
from penstock.vllm.groups import Group, Groups

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

_SEEDED_HASHES = ("xxhash", "xxhash_cbor")


def transfer_groups(vllm_config: Any, kv_cache_config: KVCacheConfig) -> Groups:
    """The KV-cache groups that the connector loads and stores: all groups that vLLM finds by
    prefix. A drafter's layers are groups of their own.

    Raises:
        ConfigError: the model or an option is not supported. The message says what, and what to do
            about it.
    """
    if not kv_cache_config.kv_cache_groups:
        raise ConfigError("the model keeps no KV cache, so there is nothing to pool")
    _refuse(name for name, present in speculation_problems(vllm_config).items() if present)
    groups = []
    found = (
        (index, *part)
        for index in installed().prefix_cacheable_groups(kv_cache_config)
        for part in parts(vllm_config, kv_cache_config, index)
    )
    for index, group, draft in found:
        spec, kind = group.kv_cache_spec, spec_kind(group.kv_cache_spec)
        _check_kind(group)
        keeps_state = kind == "mamba"
        state = state_of(group, kv_cache_config) if keeps_state else None
        if state is None:
            _check_attention(group)
        groups.append(
            Group(
                index=index,
                kind=kind,
                block_size=spec.block_size,
                window=spec.sliding_window if kind == "sliding_window" else None,
                dtype=str(spec.dtype) if state is None else ",".join(state.dtypes),
                layer_names=tuple(group.layer_names),
                state=state,
                draft=draft,
            )
        )
    if not groups:
        raise ConfigError("vLLM finds none of the model's KV cache by prefix: nothing to pool")
    parallel = vllm_config.parallel_config
    problems = {
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "KV scales calculated at run time": bool(
            getattr(vllm_config.cache_config, "calculate_kv_scales", False)
        ),
        # Both may take the KV cache's memory away during a copy that was ordered before.
        "sleep mode (--enable-sleep-mode, --enable-cumem-allocator)": bool(
            vllm_config.model_config.enable_sleep_mode
            or vllm_config.model_config.enable_cumem_allocator
        ),
    }
    _refuse(name for name, present in problems.items() if present)
    check_block_hashing(vllm_config.cache_config.prefix_caching_hash_algo)
    return Groups(groups)


def zeroes_early(vllm_config: Any, kv_cache_config: KVCacheConfig) -> bool:
    """Whether vLLM writes zeros into blocks that change hands, before workers learn of it. A store
    that still read such a block would put zeros into the pool, under the hash of the old content.

    vLLM zeroes blocks if layers keep a state, or if KV has several precisions. Model runner V2 does
    it first (`update_requests`, then `pre_forward`), and copies states then too. V1 tells
    connectors first (`handle_preemptions`, then `_update_states`).
    """
    return bool(kv_cache_config.needs_kv_cache_zeroing and vllm_config.use_v2_model_runner)


def _check_kind(group: Any) -> None:
    from vllm.v1 import kv_cache_interface

    known = {
        "full_attention": kv_cache_interface.FullAttentionSpec,
        "mla_attention": kv_cache_interface.MLAAttentionSpec,
        "sliding_window": kv_cache_interface.SlidingWindowSpec,
        "mamba": kv_cache_interface.MambaSpec,
    }
    spec = group.kv_cache_spec
    kind = spec_kind(spec)
    # Exactly these classes, because a derived class may keep more state.
    if type(spec) is not known.get(kind):
        raise ConfigError(
            f"the model's layers {named(group)} keep KV of the kind {type(spec).__name__}; full "
            "attention (MHA, GQA, MQA, MLA), sliding windows and layers with a state (Mamba, "
            "gated delta net, short convolution) are supported. Serve this model without Penstock"
        )


def _check_attention(group: Any) -> None:
    spec = group.kv_cache_spec
    problems = {
        "compressed KV states": spec.tokens_per_state != 1,
        "padded KV pages": spec.page_size_padded is not None,
        "packed heads": spec.num_head_slots is not None or spec.state_content_bytes is not None,
        "per-token KV quantization": spec.kv_quant_mode.value not in (0, 1),
        "windows longer than the sliding one": bool(getattr(spec, "extra_retained_tokens", 0)),
    }
    _refuse(name for name, present in problems.items() if present)


def _refuse(problems: Iterable[str]) -> None:
    if found := list(problems):
        raise ConfigError(
            f"not supported yet: {', '.join(found)}. Switch it off, or serve without Penstock"
        )


def continues_prefixes(vllm_config: Any) -> bool:
    """Whether the engine can compute several tokens after some that are in its KV cache.

    vLLM's CPU kernels for MLA cannot, so vLLM switches its prefix cache off there. A load must then
    leave exactly one token to compute, as in decoding.
    """
    return not (vllm_config.model_config.use_mla and is_cpu())


def check_block_hashing(algorithm: str) -> None:
    """Refuses block hashes that differ from process to process.

    Raises:
        ConfigError: the algorithm is seeded at random.
    """
    if algorithm in _SEEDED_HASHES and os.environ.get("PYTHONHASHSEED") is None:
        raise ConfigError(
            f"--prefix-caching-hash-algo {algorithm} hashes blocks with a random seed, so no "
            "other process would find them: use sha256 (the default), or set PYTHONHASHSEED to "
            "the same number on every node"
        )


def spec_kind(spec: Any) -> str:
    """vLLM's name for a KV-cache spec's kind, like ``full_attention``."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    return str(get_kv_cache_spec_kind(spec).value)


def has_layer_views(spec: Any) -> bool:
    """Whether vLLM makes one view of the KV cache for each layer with this spec."""
    return installed().has_layer_views(spec)
