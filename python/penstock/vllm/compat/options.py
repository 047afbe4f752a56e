"""What in vLLM's configuration may change KV: all of it, but for a list.

An option at its default says nothing, so a newer vLLM with more options names the same. An option
that nobody knows yet counts as soon as it is set.
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import PurePath
from typing import Any

_TOLD_ELSEWHERE = "is told by another fact"
ROUNDING = "changes rounding only: which kernel computes, where, with how much at a time"
_WHEN = "decides when something is computed, not what"
MEMORY = "decides how much memory there is, and where"
WATCHING = "is about what people and other programs see of the engine"
ADDRESSES = "says where others are reached"
_AFTER = "is about the tokens that come out of the model, not about what it keeps of those before"
_POSITIONS = "matters where rotary embeddings differ, which are told as they are"

MAY_DIFFER: Mapping[str, str] = {
    # Parts of the configuration that nothing in KV depends on.
    "device_config": ROUNDING,
    "kernel_config": ROUNDING,
    "compilation_config": ROUNDING,
    "optimization_level": ROUNDING,
    "performance_mode": ROUNDING,
    "parallel_config": ROUNDING,
    "scheduler_config": _WHEN,
    "offload_config": MEMORY,
    "observability_config": WATCHING,
    "logging_config": WATCHING,
    "profiler_config": WATCHING,
    "kv_events_config": WATCHING,
    "instance_id": WATCHING,
    "shutdown_timeout": WATCHING,
    "watchdog_config": WATCHING,
    "structured_outputs_config": _AFTER,
    "reasoning_config": _AFTER,
    "watermark_config": _AFTER,
    "aux_output_config": _AFTER,
    "kv_transfer_config": _TOLD_ELSEWHERE,
    "weight_transfer_config": _TOLD_ELSEWHERE,
    # What another encoder computed may be of other weights.
    "ec_transfer_config.engine_id": WATCHING,
    "ec_transfer_config.ec_ip": ADDRESSES,
    "ec_transfer_config.ec_port": ADDRESSES,
    "ec_transfer_config.ec_buffer_*": MEMORY,
    "ec_transfer_config.mm_encoder_output_widths": "notes what was worked out",
    "ec_manager_config": MEMORY,
    "load_config": "says how weights come; they are told as they are once they are there",
    "quant_config": "is made of options and files that are told, and of the model's configuration",
    "speculative_config": "proposes tokens that the model checks; a drafter's own KV is told apart",
    "additional_config.penstock.*": _TOLD_ELSEWHERE,
    # A drafter with KV of its own.
    "speculative_config.method": _TOLD_ELSEWHERE,
    "speculative_config.model": _TOLD_ELSEWHERE,
    "speculative_config.revision": _TOLD_ELSEWHERE,
    "speculative_config.code_revision": _TOLD_ELSEWHERE,
    "speculative_config.quantization": _TOLD_ELSEWHERE,
    "speculative_config.kv_cache_dtype": _TOLD_ELSEWHERE,
    "speculative_config.target_*_config": _TOLD_ELSEWHERE,
    "speculative_config.draft_load_config": _TOLD_ELSEWHERE,
    "speculative_config.draft_parallel_config": ROUNDING,
    "speculative_config.*tensor_parallel_size": ROUNDING,
    "speculative_config.*_backend": ROUNDING,
    "speculative_config.enforce_eager": ROUNDING,
    "speculative_config.disable_padded_drafter_batch": ROUNDING,
    "speculative_config.max_model_len": _POSITIONS,
    "speculative_config.num_speculative_tokens*": _AFTER,
    "speculative_config.prompt_lookup_*": _AFTER,
    "speculative_config.suffix_decoding_*": _AFTER,
    "speculative_config.rejection_*": _AFTER,
    "speculative_config.synthetic_*": _AFTER,
    "speculative_config.*_sample_method": _AFTER,
    "speculative_config.draft_lm_head_quantization": _AFTER,
    "speculative_config.fly_*": _AFTER,
    "speculative_config.disable_lookahead_block_hashes": "changes nothing beside a connector",
    "speculative_config.use_local_argmax_reduction": _AFTER,
    "speculative_config.enable_adaptive_verification": _AFTER,
    # The model.
    "model_config.set": _TOLD_ELSEWHERE,
    "model_config.model": _TOLD_ELSEWHERE,
    "model_config.model_weights": _TOLD_ELSEWHERE,
    "model_config.revision": _TOLD_ELSEWHERE,
    "model_config.code_revision": _TOLD_ELSEWHERE,
    "model_config.hf_config": _TOLD_ELSEWHERE,
    "model_config.hf_text_config": _TOLD_ELSEWHERE,
    "model_config.hf_config_path": _TOLD_ELSEWHERE,
    "model_config.config_format": _TOLD_ELSEWHERE,
    "model_config.dtype": _TOLD_ELSEWHERE,
    "model_config.quantization": _TOLD_ELSEWHERE,
    "model_config.tokenizer*": "makes tokens of text; a block is named by its tokens",
    "model_config.skip_tokenizer_init": "makes tokens of text; a block is named by its tokens",
    "model_config.trust_remote_code": "allows code, which is told as it is",
    "model_config.seed": _AFTER,
    "model_config.max_model_len": _POSITIONS,
    "model_config.spec_target_max_model_len": _POSITIONS,
    "model_config.enforce_eager": ROUNDING,
    "model_config.disable_cascade_attn": ROUNDING,
    "model_config.use_fp64_gumbel": _AFTER,
    "model_config.max_logprobs": _AFTER,
    "model_config.logprobs_mode": _AFTER,
    "model_config.logits_processors": _AFTER,
    "model_config.generation_config": _AFTER,
    "model_config.override_generation_config": _AFTER,
    "model_config.return_sampling_mask": _AFTER,
    "model_config.enable_return_routed_experts": _AFTER,
    "model_config.enable_trace_replay": WATCHING,
    "model_config.served_model_name": WATCHING,
    "model_config.hf_token": "lets the model be fetched",
    "model_config.allowed_*": "says which files and addresses requests may name",
    "model_config.io_processor_plugin": "makes prompts of what requests bring",
    "model_config.renderer_num_workers": _WHEN,
    "model_config.enable_prompt_embeds": "allows prompts without tokens, whose blocks are named so",
    "model_config.*sleep*": MEMORY,
    "model_config.enable_nccl_comm_suspend": MEMORY,
    "model_config.enable_cumem_allocator": MEMORY,
    # The KV cache.
    "cache_config.cache_dtype": _TOLD_ELSEWHERE,
    "cache_config.block_size": _TOLD_ELSEWHERE,
    "cache_config.hash_block_size": _TOLD_ELSEWHERE,
    "cache_config.prefix_caching_hash_algo": _TOLD_ELSEWHERE,
    "cache_config.kv_cache_layout": _TOLD_ELSEWHERE,
    "cache_config.mamba_block_size": _TOLD_ELSEWHERE,
    "cache_config.mamba_*cache_dtype": _TOLD_ELSEWHERE,
    "cache_config.*page_size_padded": _TOLD_ELSEWHERE,
    "cache_config.user_specified_*": _TOLD_ELSEWHERE,
    "cache_config._*": "notes what was worked out",
    "cache_config.effective_attention_block_size": "notes what was worked out",
    "cache_config.kv_cache_*concurrency": "notes what was worked out",
    "cache_config.kv_cache_size_tokens": "notes what was worked out",
    "cache_config.cache_hit_alignment_tokens": "notes what was worked out",
    "cache_config.is_attention_free": "notes what was worked out",
    "cache_config.sliding_window": "notes what was worked out",
    "cache_config.enable_prefix_caching": _WHEN,
    "cache_config.prefix_*": _WHEN,
    "cache_config.gpu_memory_utilization*": MEMORY,
    "cache_config.num_*_blocks*": MEMORY,
    "cache_config.simple_cpu_offload_num_blocks": MEMORY,
    "cache_config.kv_cache_memory_bytes": MEMORY,
    "cache_config.kv_offloading_*": MEMORY,
    # Attention.
    "attention_config.backend*": ROUNDING,
    "attention_config.*_backend": ROUNDING,
    "attention_config.flash_attn_*": ROUNDING,
    "attention_config.flex_attn_*": ROUNDING,
    "attention_config.use_trtllm_*": ROUNDING,
    "attention_config.*_splits*": ROUNDING,
    "attention_config.*_min_split_kv": ROUNDING,
    "attention_config.disable_flashinfer_*": ROUNDING,
    "attention_config.*workspace_factor": ROUNDING,
    "attention_config.sparse_mla_force_mqa": ROUNDING,
    "attention_config.indexer_tp_shard_min_rows": ROUNDING,
    "attention_config.minimax_m3_indexer_cp": ROUNDING,
    "mamba_config.backend": ROUNDING,
    "mamba_config.ssu_algorithm": ROUNDING,
    # Adapters.
    "lora_config.set": "allows adapters, which are in the blocks' names",
    "lora_config.max_*": MEMORY,
    "lora_config.lora_dtype": ROUNDING,
    "lora_config.fully_sharded_loras": ROUNDING,
    "lora_config.specialize_active_lora": ROUNDING,
    "lora_config.default_mm_loras": "names adapters, which are in the blocks' names",
    # Images and the like.
    "model_config.multimodal_config.limit_per_prompt": "says how much a request may bring",
    "model_config.multimodal_config.mm_processor_cache_*": MEMORY,
    "model_config.multimodal_config.mm_shm_*": MEMORY,
    "model_config.multimodal_config.mm_*ipc*": MEMORY,
    "model_config.multimodal_config.skip_mm_profiling": MEMORY,
    "model_config.multimodal_config.mm_device_do_normalize": ROUNDING,
    "model_config.multimodal_config.mm_encoder_fp8_scale_path": _TOLD_ELSEWHERE,
    "model_config.multimodal_config.mm_encoder_fp8_scale_save_*": WATCHING,
    "model_config.multimodal_config.mm_encoder_tp_mode": ROUNDING,
    "model_config.multimodal_config.mm_encoder_attn_backend": ROUNDING,
}
"""Options, or parts of the configuration, in which engines that share KV may differ, each with the
reason. A pattern's star stands for any text within one name. A part that may be left out has the
option ``set``, for that it is there."""

COUNTED = (
    # They choose the types of numbers too.
    "kernel_config.moe_backend",
    "kernel_config.linear_backend",
    "kernel_config.linear_backend_per_quant",
    # Code of others.
    "parallel_config.worker_cls",
    "scheduler_config.scheduler_cls",
    "compilation_config.inductor_passes",
)
"""Options that count though the part with them may differ. Code of vLLM's own does not count."""

_DRAFT = "speculative_config."


def options(vllm_config: Any) -> dict[str, Any]:
    """The options that are set to something else than their default, without those that may differ.
    Plain JSON."""
    return dict(_set(vllm_config, "")) | dict(_counted(vllm_config))


def draft_options(vllm_config: Any) -> dict[str, Any]:
    """Options for a drafter, see :func:`options`: those of speculative decoding and of its
    model."""
    return dict(_set(vllm_config.speculative_config, _DRAFT))


def _set(config: Any, path: str) -> Iterator[tuple[str, Any]]:
    for each in dataclasses.fields(config):
        name = f"{path}{each.name}"
        if may_differ(name) or not hasattr(config, each.name):
            continue
        value = getattr(config, each.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            if _default(each) is None and not may_differ(f"{name}.set"):
                yield f"{name}.set", True
            yield from _set(value, f"{name}.")
        elif isinstance(value, dict) and name == "additional_config":
            for key, inner in sorted(value.items()):
                if not may_differ(f"{name}.{key}"):
                    yield f"{name}.{key}", plain(inner)
        elif (set_to := plain(value)) != plain(_default(each)):
            yield name, set_to


def _counted(config: Any) -> Iterator[tuple[str, Any]]:
    for path in COUNTED:
        part, name = path.split(".")
        owner = getattr(config, part)
        field = next((each for each in dataclasses.fields(owner) if each.name == name), None)
        if field is None:
            continue
        set_to = plain(getattr(owner, name))
        is_own = isinstance(set_to, str) and set_to.startswith("vllm.")
        if not is_own and set_to != plain(_default(field)):
            yield path, set_to


def named_files(model_config: Any) -> Iterator[tuple[str, str]]:
    """Options of a model that name a file, each with the file."""
    overrides = model_config.hf_overrides
    if isinstance(overrides, dict) and (named := overrides.get("quantization_config_file")):
        yield "quantization_config_file", named
    images = model_config.multimodal_config
    if named := getattr(images, "mm_encoder_fp8_scale_path", None):
        yield "mm_encoder_fp8_scale_path", named


def may_differ(name: str) -> bool:
    """Whether engines that share KV may differ in an option."""
    names = (name, name.replace(f"{_DRAFT}draft_model_config.", "model_config."))
    return any(_fits(each, pattern) for pattern in MAY_DIFFER for each in names)


def _fits(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _default(field: Any) -> Any:
    for holder in (field, field.default):
        factory = getattr(holder, "default_factory", None)
        if callable(factory):
            return factory()
    default = getattr(field.default, "default", field.default)
    return None if default is dataclasses.MISSING else default


def plain(value: Any) -> Any:
    """A value as JSON that is the same in every process."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in sorted(value.items(), key=_by_text)}
    if isinstance(value, Set):
        return sorted((plain(inner) for inner in value), key=str)
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, type) or inspect.isroutine(value):
        return _named(value)
    if type(value).__module__ == "torch":
        return str(value)
    fields = getattr(value, "__dict__", {})
    return {"kind": _named(type(value)), **{key: plain(fields[key]) for key in sorted(fields)}}


def _by_text(item: tuple[Any, Any]) -> str:
    return str(item[0])


def _named(value: type | Callable[..., Any]) -> str:
    """A class's or a function's name, with a digest of its code if that can be read."""
    name = f"{value.__module__}.{value.__qualname__}"
    if value.__module__.partition(".")[0] in ("builtins", "vllm", "torch", "transformers"):
        return name
    try:
        source = inspect.getsource(value)
    except (OSError, TypeError):
        return name
    return f"{name} {hashlib.sha256(source.encode()).hexdigest()[:16]}"
