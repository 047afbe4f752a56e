"""Speculative decoding: drafters that have layers of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from penstock.vllm.compat.topology import layer_index
from penstock.vllm.compat.versions import installed
from penstock.vllm.groups import Draft

_CARRIED = ("eagle", "eagle3", "mtp", "draft_model")
"""vLLM's names for the methods whose layers are loaded and stored."""

_OWN_PREFIXES = ("draft_model.", "mtp.")
"""Names of a drafter's layers begin so, if it counts them from 0. Others are counted on after the
model's last layer."""


def has_draft_layers(vllm_config: Any) -> bool:
    """Whether a drafter keeps KV of its own."""
    speculation = vllm_config.speculative_config
    return speculation is not None and bool(
        speculation.use_eagle()
        or speculation.uses_draft_model()
        or speculation.method == "extract_hidden_states"
    )


def drops_last_block(vllm_config: Any) -> bool:
    """Whether vLLM computes the last block of a hit in its own prefix cache again.

    It does so for drafters that read the model's hidden states: what they keep of a block's last
    token depends on the token after it, which the block's hash does not cover."""
    return has_draft_layers(vllm_config) and bool(
        vllm_config.speculative_config.use_eagle_block_drop()
    )


def speculation_problems(vllm_config: Any) -> dict[str, bool]:
    """What is not supported of speculative decoding, each with whether it is present."""
    speculation = vllm_config.speculative_config
    if speculation is None:
        return {}
    parallel = vllm_config.parallel_config
    drafts, method = has_draft_layers(vllm_config), speculation.method
    carries = installed().CARRIES_DRAFTS
    degree = speculation.draft_tensor_parallel_size
    return {
        # Model runner V1 does not tell connectors when a step of the first stages has ended.
        "speculative decoding over several pipeline stages": parallel.pipeline_parallel_size > 1,
        f"speculative decoding by {method}, which has layers of its own; n-grams are supported, "
        "and EAGLE, MTP and draft models from vLLM 0.32 on": drafts and not carries,
        f"speculative decoding by {method}, which keeps other states than KV; n-grams, EAGLE, MTP "
        "and draft models are supported": drafts and carries and method not in _CARRIED,
        # Its modules read several tokens after the one whose KV they keep.
        "MTP with several modules (num_speculative_tokens 1 uses one)": (
            drafts and carries and speculation.use_multi_module_mtp()
        ),
        "parallel drafting": drafts and speculation.parallel_drafting,
        f"a drafter over {degree} tensor-parallel ranks of {parallel.tensor_parallel_size}": (
            drafts and degree not in (None, parallel.tensor_parallel_size)
        ),
    }


def parts(vllm_config: Any, kv_cache_config: Any, index: int) -> Iterator[tuple[Any, Draft | None]]:
    """A KV-cache group of vLLM, without the drafter's layers and then these alone, each with what
    is special about the drafter.

    vLLM puts a drafter's layers into groups with the model's own, if their blocks are as long."""
    group = kv_cache_config.kv_cache_groups[index]
    if not has_draft_layers(vllm_config):
        spec = _common_spec(group.kv_cache_spec, group.layer_names)
        yield dataclasses.replace(group, kv_cache_spec=spec), None
        return
    layers = int(vllm_config.model_config.get_total_num_hidden_layers())
    model = vllm_config.speculative_config.draft_model_config
    drafted = {
        name: draft_layer_index(name, layers)
        for each in kv_cache_config.kv_cache_groups
        for name in each.layer_names
        if is_draft_layer(name, layers)
    }
    draft = Draft(
        layers=1 + max(drafted.values(), default=0),
        heads=1 if model.use_mla else int(model.get_total_num_kv_heads()),
    )
    own = [name for name in group.layer_names if name not in drafted]
    others = [name for name in group.layer_names if name in drafted]
    for names, special in ((own, None), (others, draft)):
        if names:
            spec = _common_spec(group.kv_cache_spec, names)
            yield dataclasses.replace(group, layer_names=names, kv_cache_spec=spec), special


def is_draft_layer(name: str, layers: int) -> bool:
    """Whether a layer is a drafter's, beside a model of so many layers."""
    return name.startswith(_OWN_PREFIXES) or layer_index(name) >= layers


def draft_layer_index(name: str, layers: int) -> int:
    """The index of a drafter's layer among the drafter's own."""
    index = layer_index(name)
    return index if name.startswith(_OWN_PREFIXES) else index - layers


def _common_spec(spec: Any, names: list[str]) -> Any:
    """The spec of some of a group's layers. On workers a group may have a spec for each layer."""
    by_layer = getattr(spec, "kv_cache_specs", None)
    if by_layer is None:
        return spec
    first, *others = [by_layer[name] for name in names]
    return first if all(other == first for other in others) else spec
