"""A tiny configuration of an architecture, made from its class's defaults by rule."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, VOCABULARY, LENGTH = 256, 4, 4, 2, 64, 512, 4096
EXPERTS, EXPERTS_A_TOKEN, EXPERT = 4, 2, 128

_SIZES: tuple[tuple[str, int], ...] = (
    (
        r"hidden_size|d_model|n_embd|dim|embed_dim|model_dim|embedding_size|word_embed_proj_dim",
        HIDDEN,
    ),
    (
        r"intermediate_size|intermediate_size_mlp|ffn_dim|ffn_hidden_size|n_inner|.*coder_ffn_dim",
        512,
    ),
    (
        r"num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|depth|num_nextn.*|.*num_blocks",
        LAYERS,
    ),
    (r"num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads", HEADS),
    (r"head_dim|kv_channels|attention_head_dim|global_head_dim|swa_head_dim", HEAD),
    (r"vocab_size|padded_vocab_size|vocab_size_per_layer_input|embedding_vocab_size", VOCABULARY),
    (r"max_position_embeddings|n_positions|seq_length|max_sequence_length|max_seq_len", LENGTH),
    (r"(num|n|moe_num|num_local|n_routed|num_moe)_?(routed_|local_)?experts", EXPERTS),
    (
        r"num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts|num_selected_experts",
        EXPERTS_A_TOKEN,
    ),
    (
        r"(moe_|expert_|shared_expert_|shared_|moe_shared_expert_)(intermediate|ffn_hidden)_size",
        EXPERT,
    ),
    (r"n_shared_experts|num_shared_experts|n_group|topk_group|first_k_dense_replace", 1),
    (r"expand|num_layers_per_stack", 1),
    (r"num_kv_shared_layers", 2),
    (r"q_lora_rank", 96),
    (r"sliding_window(_size)?|window_size|attention_window_size", 256),
    (r"mamba_(n_heads|num_heads)|n_mamba_heads", 8),
    (r"mamba_(d_head|head_dim)|mamba_d_state|ssm_state_size|state_size", HEAD),
    (r"mamba_d_ssm|mamba_intermediate_size", 2 * HIDDEN),
    (r"mamba_n_groups|n_groups", 1),
    (r"linear_num_value_heads|linear_num_heads", HEADS),
    (r"linear_num_key_heads", KV_HEADS),
    (r"linear_(key|value)_head_dim", HEAD),
    (r"hidden_size_per_layer_input|laurel_rank", 32),
    (r"attn_layer_period|expert_layer_period|decoder_sparse_step|moe_layer_freq", 2),
    (r"attn_layer_offset|expert_layer_offset", 1),
)
"""What each number becomes, by its name. Numbers that are None or 0 stay so: they switch a part of
the model off."""

_NEEDED = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": EXPERTS_A_TOKEN}
"""What vLLM's CPU build needs where a configuration has None."""

_ASKED = {
    "head_dim": HEAD,
    "rotary_dim": HEAD,
    "block_dim": HIDDEN,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "score_func": "sigmoid",
}
"""What vLLM asks of some text models whose class here lacks it: checkpoints have it."""

_KV = re.compile(r"num_key_value_heads|num_kv_heads|multi_query_group_num|num_query_groups")
_LAYERS = re.compile(_SIZES[2][0])
_TOKEN = re.compile(r".*(token_id|token_index|token_idx)")


class NotMade(Exception):
    """An architecture whose configuration cannot be made by these rules, and why."""


def architectures() -> list[str]:
    """vLLM's names of all architectures that generate text, each once."""
    from vllm.model_executor.models import registry

    return sorted({*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS})


def tiny(architecture: str) -> dict[str, Any]:
    """The configuration, as in a model's `config.json`.

    Raises:
        NotMade: no class of configurations has the architecture's name, or it has no defaults.
    """
    kind = _class_of(architecture)
    try:
        config = kind()
    except Exception as error:
        raise NotMade(f"its configuration has no defaults: {_line(error)}") from error
    told = config.to_dict()
    # What a class computes cannot be set.
    shrunk = _shrunk(told).items()
    made = {key: v for key, v in shrunk if not isinstance(getattr(kind, key, None), property)}
    made |= {"architectures": [architecture], "model_type": kind.model_type}
    made |= {"torch_dtype": "float32", "dtype": "float32", "use_mamba_kernels": False}
    return made


def _class_of(architecture: str) -> Any:
    """The class that transformers has for it, or whose name has the architecture's or its model's.

    Text models of vLLM that have a configuration only beside their weights mostly read Llama's
    names: they get Llama's.
    """
    from vllm.model_executor.models import registry

    served = {**registry._TEXT_GENERATION_MODELS, **registry._MULTIMODAL_MODELS}[architecture][1]
    for wanted in (architecture, served):
        if (kind := _named(wanted)) is not None:
            return kind
    if architecture in registry._TEXT_GENERATION_MODELS:
        return _named("LlamaForCausalLM")
    raise NotMade("no class of configurations here has its name")


def _named(architecture: str) -> Any:
    for name, kind in _known():
        if name == architecture:
            return kind
    wanted = _stem(architecture)
    for suffix in ("", "text"):
        for name, kind in _classes():
            if name == wanted + suffix:
                return kind
    return None


def _known() -> Iterator[tuple[str, Any]]:
    """Architectures that transformers has, with the classes of their configurations."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    for names in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES):
        for model_type, architecture in names.items():
            if isinstance(architecture, str) and model_type in CONFIG_MAPPING:
                yield architecture, CONFIG_MAPPING[model_type]


def _classes() -> Iterator[tuple[str, Any]]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    for architecture, kind in _known():
        yield _stem(architecture), kind
    for mapping in (_CONFIG_REGISTRY, CONFIG_MAPPING):
        for model_type in mapping:
            try:
                kind = mapping[model_type]
            except Exception:
                # Its class needs a package that is not here.
                continue
            yield kind.__name__.removesuffix("Config").lower(), kind


def _stem(architecture: str) -> str:
    cut = "(ForCausalLM|ForConditionalGeneration|LMHeadModel|ForTextGeneration|LMHead|Model)$"
    return re.sub(cut, "", architecture).lower()


def _shrunk(told: dict[str, Any]) -> dict[str, Any]:
    layers = next((n for key, n in told.items() if _LAYERS.fullmatch(key) and _is_number(n)), 0)
    kept = _kept(told, layers)
    heads = [
        n for key, n in told.items() if key.startswith("num_attention_heads") and _is_number(n)
    ]
    made = {}
    for place, (key, value) in enumerate(told.items()):
        made[key] = _small(key, value, place, kept, layers, heads[0] if heads else 0)
    return _ASKED | made if heads and "vocab_size" in made else made


def _kept(told: dict[str, Any], layers: int) -> list[int]:
    """The layers that are kept: the first of each kind, and then those that come first."""
    lists = [each for each in told.values() if isinstance(each, list) and len(each) == layers > 0]
    kinds = list(zip(*(map(repr, each) for each in lists), strict=True)) or [()] * layers
    firsts = [place for place, kind in enumerate(kinds) if kind not in kinds[:place]][:LAYERS]
    rest = (place for place in range(layers) if place not in firsts)
    return (
        sorted([*firsts, *rest][:LAYERS])
        if len(firsts) >= LAYERS
        else sorted([*firsts, *list(rest)[: LAYERS - len(firsts)]])
    )


def _small(key: str, value: Any, place: int, kept: list[int], layers: int, heads: int) -> Any:
    if key == "per_layer_config" and isinstance(value, dict):
        return {new: _shrunk(value[old]) for new, old in enumerate(kept) if old in value}
    if isinstance(value, dict):
        return _shrunk(value) if key.endswith("config") else _small_positions(value)
    if isinstance(value, list):
        if len(value) == layers > 0:
            return [
                _small(key, value[layer], place, [], 0, heads) for layer in kept if layer < layers
            ]
        if (
            value
            and all(_is_number(each) for each in value)
            and key.endswith(("_idxs", "_indices"))
        ):
            return [each for each in value if each < LAYERS] or [LAYERS - 1]
        return [min(each, 2) for each in value] if _TOKEN.fullmatch(key) else value
    if value is None:
        return _NEEDED.get(key)
    if not _is_number(value) or value == 0:
        return value
    if _TOKEN.fullmatch(key):
        # Special tokens differ from each other, and lie beyond those of prompts.
        return value if value < 3 else VOCABULARY - 1 - place % 100
    if _KV.fullmatch(key):
        return HEADS if value == heads else KV_HEADS
    for names, size in _SIZES:
        if re.fullmatch(names, key):
            return min(value, size) if size <= EXPERTS_A_TOKEN else size
    return value


def _small_positions(told: dict[str, Any]) -> dict[str, Any]:
    """Rotary embeddings: their sections sum up to half a head."""
    made = dict(told)
    if isinstance(sections := told.get("mrope_section"), list) and sum(sections):
        made["mrope_section"] = [each * (HEAD // 2) // sum(sections) for each in sections]
        made["mrope_section"][0] += HEAD // 2 - sum(made["mrope_section"])
    return made


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return textwrap.shorten(f"{type(error).__name__}: {text}", 160, placeholder=" …")
