"""Penstock's access to vLLM's internals, for the supported versions.

Every version check and every use of a name that vLLM does not document is in this package, with one
file for each subject. vLLM is imported when it is needed, not with this package.
"""

from __future__ import annotations

from penstock.vllm.compat.adapters import adapter, name_adapters, watch_adapters
from penstock.vllm.compat.backends import backend_names, check_kv_types, make_scales
from penstock.vllm.compat.blocks import BlockPool
from penstock.vllm.compat.changes import watch_changes, wrap_calls, wrap_encoder_resets
from penstock.vllm.compat.code import own_code
from penstock.vllm.compat.configuration import (
    CONNECTOR,
    engine_config,
    extra_config,
    has_penstock,
    holds_prompts,
    is_penstock,
    register_connector,
    requests_per_step,
    tokens_per_step,
)
from penstock.vllm.compat.devices import (
    cuda_device,
    current_stream,
    is_cpu,
    kernel_packing,
    operators_cores,
)
from penstock.vllm.compat.drafts import (
    draft_layer_index,
    drops_last_block,
    has_draft_layers,
)
from penstock.vllm.compat.embeddings import require_embeddings
from penstock.vllm.compat.environment import MAY_DIFFER_BY_ENVIRONMENT, environment
from penstock.vllm.compat.events import (
    LOCAL,
    REMOTE,
    publishes_events,
    removed_event,
    stored_event,
)
from penstock.vllm.compat.expected import (
    attends_in_each_layer,
    expected_backends,
    expected_dtypes,
    expected_kinds,
    expected_refusal,
    expected_specs,
    takes_images,
)
from penstock.vllm.compat.hashing import lookup_facts, prompt_hasher
from penstock.vllm.compat.layouts import (
    attention_backends,
    forced_layout,
    has_shared_layers,
    kernel_block_size,
    listed_layouts,
    own_specs,
    takes_any_layout,
    wrap_layout_resolution,
)
from penstock.vllm.compat.memory import block_bytes, request_blocks, wrap_kv_memory
from penstock.vllm.compat.options import (
    COUNTED,
    MAY_DIFFER,
    draft_options,
    may_differ,
    named_files,
    options,
)
from penstock.vllm.compat.requests import (
    NULL_BLOCK,
    block_tables,
    boundary_states,
    cache_salt,
    drop_wrong_params,
    hash_block_size,
    hit_source,
    kv_hints,
    kv_params,
    names_sessions_anew,
    newly_allocated,
    none_hash,
    scheduled,
)
from penstock.vllm.compat.resets import wrap_resets
from penstock.vllm.compat.rounding import has_noisy_inputs, rounding
from penstock.vllm.compat.specs import (
    check_block_hashing,
    has_layer_views,
    spec_kind,
    transfer_groups,
    zeroes_early,
)
from penstock.vllm.compat.topology import (
    layer_index,
    model_extent,
    stages,
    tp_rank,
)
from penstock.vllm.compat.versions import SUPPORTED, check_version
from penstock.vllm.compat.waiting import rest
from penstock.vllm.compat.weights import (
    attention_settings,
    buffers,
    configuration,
    hides_weights,
    models,
    position_settings,
    weight_files,
    weight_tensors,
    wrap_loading,
)

__all__ = [
    "CONNECTOR",
    "COUNTED",
    "LOCAL",
    "MAY_DIFFER",
    "MAY_DIFFER_BY_ENVIRONMENT",
    "NULL_BLOCK",
    "REMOTE",
    "SUPPORTED",
    "BlockPool",
    "adapter",
    "attends_in_each_layer",
    "attention_backends",
    "attention_settings",
    "backend_names",
    "block_bytes",
    "block_tables",
    "boundary_states",
    "buffers",
    "cache_salt",
    "check_block_hashing",
    "check_kv_types",
    "check_version",
    "configuration",
    "cuda_device",
    "current_stream",
    "draft_layer_index",
    "draft_options",
    "drop_wrong_params",
    "drops_last_block",
    "engine_config",
    "environment",
    "expected_backends",
    "expected_dtypes",
    "expected_kinds",
    "expected_refusal",
    "expected_specs",
    "extra_config",
    "forced_layout",
    "has_draft_layers",
    "has_layer_views",
    "has_noisy_inputs",
    "has_penstock",
    "has_shared_layers",
    "hash_block_size",
    "hides_weights",
    "hit_source",
    "holds_prompts",
    "is_cpu",
    "is_penstock",
    "kernel_block_size",
    "kernel_packing",
    "kv_hints",
    "kv_params",
    "layer_index",
    "listed_layouts",
    "lookup_facts",
    "make_scales",
    "may_differ",
    "model_extent",
    "models",
    "name_adapters",
    "named_files",
    "names_sessions_anew",
    "newly_allocated",
    "none_hash",
    "operators_cores",
    "options",
    "own_code",
    "own_specs",
    "position_settings",
    "prompt_hasher",
    "publishes_events",
    "register_connector",
    "removed_event",
    "request_blocks",
    "requests_per_step",
    "require_embeddings",
    "rest",
    "rounding",
    "scheduled",
    "spec_kind",
    "stages",
    "stored_event",
    "takes_any_layout",
    "takes_images",
    "tokens_per_step",
    "tp_rank",
    "transfer_groups",
    "watch_adapters",
    "watch_changes",
    "weight_files",
    "weight_tensors",
    "wrap_calls",
    "wrap_encoder_resets",
    "wrap_kv_memory",
    "wrap_layout_resolution",
    "wrap_loading",
    "wrap_resets",
    "zeroes_early",
]
