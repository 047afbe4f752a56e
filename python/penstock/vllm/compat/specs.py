"""KV-cache groups and specs: which can be transferred, and which are refused."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.vllm.compat.devices import is_rocm
from penstock.vllm.compat.drafts import parts, speculation_problems
from penstock.vllm.compat.states import named, state_of
from penstock.vllm.compat.versions import installed
from penstock.vllm.groups import Group, Groups, Packing, State

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
        for index in kv_cache_config.prefix_cacheable_group_ids
        for part in parts(vllm_config, kv_cache_config, index)
    )
    for index, group, draft in found:
        spec, kind = group.kv_cache_spec, spec_kind(group.kv_cache_spec)
        _check_kind(group)
        keeps_state = kind == "mamba"
        state = state_of(group, kv_cache_config) if keeps_state else None
        if state is None:
            _check_attention(spec)
        packing = _packing(spec) if state is None else None
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
                packing=packing,
                element=_numbers(spec, state, vllm_config, _ELEMENTS) if packing is None else None,
                # What a drafter keeps of a block's last token depends on the next one too, so it
                # cannot be compared. Packed slots have scales and other types beside the numbers.
                numbers=_numbers(spec, state, vllm_config, _NUMBERS)
                if draft is None and packing is None
                else None,
            )
        )
    if not groups:
        raise ConfigError("vLLM finds none of the model's KV cache by prefix: nothing to pool")
    parallel = vllm_config.parallel_config
    problems = {
        "AMD GPUs (ROCm): copies are made for CUDA": is_rocm(),
        "decode context parallelism, where a rank has only some of a block's tokens "
        "(--decode-context-parallel-size 1 has them all)": (
            parallel.decode_context_parallel_size > 1
        ),
        "prefill context parallelism, where a rank has only some of a block's tokens "
        "(--prefill-context-parallel-size 1 has them all)": (
            parallel.prefill_context_parallel_size > 1
        ),
        # Then it hashes no images, but counts them.
        "images without names: vLLM gives them some with --enable-prefix-caching, or with an "
        "--mm-processor-cache-gb of more than 0": _has_no_names_for_images(vllm_config),
        "KV scales calculated at run time": bool(
            getattr(vllm_config.cache_config, "calculate_kv_scales", False)
        ),
        # It may take the KV cache's memory away during a copy that was ordered before.
        "sleep mode (--enable-sleep-mode, --enable-cumem-allocator) with this vLLM; 0.33 tells "
        "connectors before": not installed().TELLS_BEFORE_SLEEP
        and bool(
            vllm_config.model_config.enable_sleep_mode
            or vllm_config.model_config.enable_cumem_allocator
        ),
    }
    _refuse(name for name, present in problems.items() if present)
    _refuse(_brought_types(vllm_config))
    check_block_hashing(vllm_config.cache_config.prefix_caching_hash_algo)
    return Groups(groups)


def _brought_types(vllm_config: Any) -> Iterator[str]:
    """Types of KV that a plug-in has brought, in words. vLLM's specs have one name for the packing
    of all of them."""
    drafter = vllm_config.speculative_config
    of_drafter = None if drafter is None else drafter.kv_cache_dtype
    for kv_type in (vllm_config.cache_config.cache_dtype, of_drafter):
        if kv_type is not None and installed().is_brought_type(kv_type):
            yield f"KV of the type {kv_type}, which a plug-in has brought"


def _has_no_names_for_images(vllm_config: Any) -> bool:
    images = vllm_config.model_config.multimodal_config
    return bool(
        images is not None
        and images.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
    )


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
    if hasattr(spec, "kv_cache_specs"):
        for each in spec.kv_cache_specs.values():
            _check_attention(each)
        raise ConfigError(
            f"the model's layers {named(group)} share blocks, but their pages differ in size or "
            "type: leave out --kv-cache-dtype-skip-layers if it is given, or serve this model "
            "without Penstock"
        )
    kind = spec_kind(spec)
    # Exactly these classes, because a derived class may keep more state.
    if type(spec) is not known.get(kind):
        raise ConfigError(
            f"the model's layers {named(group)} keep KV of the kind {type(spec).__name__}; full "
            "attention (MHA, GQA, MQA, MLA), sliding windows and layers with a state (Mamba, "
            "gated delta net, short convolution) are supported. Serve this model without Penstock"
        )


def _check_attention(spec: Any) -> None:
    role = getattr(spec, "cache_role", None)
    problems = {
        # A page has fewer rows than its block has tokens.
        "several tokens in one state of the KV cache": spec.tokens_per_state != 1,
        "indexes of sparse attention": role is not None and role.name == "INDEXER",
        "windows longer than the sliding one": bool(getattr(spec, "extra_retained_tokens", 0)),
    }
    _refuse(name for name, present in problems.items() if present)


def _packing(spec: Any) -> Packing | None:
    """How pages of this kind are packed. Padding after a page is no part of it."""
    from vllm.platforms import current_platform

    mode = spec.kv_quant_mode
    has_own_size = spec.num_head_slots is not None or spec.state_content_bytes is not None
    if not has_own_size and mode.name in ("NONE", "FP8_PER_TENSOR"):
        return None
    # With a scale for each token and head, vLLM puts K, its scale, V and its scale side by side.
    # Of all else it is not known whether a slot can be read without the others.
    is_cut = mode.is_per_token_head and spec.num_head_slots is None
    capability = current_platform.get_device_capability()
    return Packing(
        mode=str(mode.name).lower(),
        content_bytes=int(spec.state_content_size_bytes),
        slots=None if is_cut else int(spec.num_heads),
        device=f"{current_platform.device_type} {capability or ''}".strip(),
    )


_ELEMENTS = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float8_e4m3fn": "fp8_e4m3",
    "torch.float8_e4m3fnuz": "fp8_e4m3",
    "torch.float8_e5m2": "fp8_e5m2",
}
"""Types of numbers that there is a coder for."""

_NUMBERS = _ELEMENTS | {"torch.float32": "fp32"}
"""Types of numbers that can be compared."""


def _numbers(
    spec: Any, state: State | None, vllm_config: Any, names: Mapping[str, str]
) -> str | None:
    """The name of the type of the numbers that pages are made of, if they all have one."""
    dtypes = (str(spec.dtype),) if state is None else state.dtypes
    if state is None and spec.kv_quant_mode.name not in ("NONE", "FP8_PER_TENSOR"):
        # There are scales among them.
        return None
    if state is None and spec.kv_quant_mode.name == "FP8_PER_TENSOR":
        # vLLM may say no more of them than that they are bytes.
        is_e5m2 = vllm_config.cache_config.cache_dtype == "fp8_e5m2"
        dtypes = ("torch.float8_e5m2" if is_e5m2 else "torch.float8_e4m3fn",)
    found = {names.get(dtype) for dtype in dtypes}
    return found.pop() if len(found) == 1 else None


def _refuse(problems: Iterable[str]) -> None:
    if found := list(problems):
        raise ConfigError(
            f"not supported yet: {', '.join(found)}. Switch it off, or serve without Penstock"
        )


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
    return bool(spec.has_layer_views)
