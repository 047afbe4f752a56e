"""Models from Hugging Face configurations, without torch or the transformers library.

The sizes of weights follow each family's published modules. `FAMILIES` lists the known families.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.errors import ConfigError
from penstock.plan.model import Kind, Kv, Layer, Model

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
_QUANTIZED_BITS = {"fp8": 8, "fbgemm_fp8": 8, "mxfp4": 4.25}
"""Bits of a weight, for quantizations whose configuration does not give them. In mxfp4, 32 weights
share one more byte."""

Windows = Literal["none", "all", "gemma2", "pattern", "gpt_oss", "llama4"]


@dataclass(frozen=True)
class Family:
    """How a family of models differs from Llama."""

    attention: Literal["gqa", "mla", "falcon", "mha"] = "gqa"
    windows: Windows = "none"
    """Which layers look back over a window, unless the configuration lists them."""
    pattern: int = 6
    """With windows by pattern: one layer in this many attends to all tokens."""
    longer_window: int = 0
    """How many tokens vLLM's window is longer than the configuration's."""
    mlp_matrices: int = 3
    """Matrices of a dense feed-forward layer: 3 with a gate, 2 without."""
    experts: bool = False
    head: int | None = None
    """Elements of a head where the configuration does not say. None: hidden size divided by the
    number of heads."""
    tied: bool = False
    """Whether embeddings are tied, where the configuration does not say."""
    everywhere: bool = False
    """Whether vLLM's model puts embedding and output projection on every rank of a pipeline."""


FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(
        ("llama", "granite", "internlm3", "exaone", "deci", "nemotron-nas", "qwen2"), Family()
    ),
    **dict.fromkeys(("qwen3", "glm", "glm4"), Family(head=128)),
    **dict.fromkeys(("stablelm", "internlm2"), Family(everywhere=True)),
    "mistral": Family(windows="all"),
    "phi3": Family(windows="all"),
    "nemotron": Family(mlp_matrices=2),
    "gemma": Family(head=256, tied=True, everywhere=True),
    "gemma2": Family(windows="gemma2", head=256, tied=True, everywhere=True),
    "gemma3_text": Family(windows="pattern", head=256, tied=True, everywhere=True),
    "cohere": Family(tied=True, everywhere=True),
    "cohere2": Family(windows="pattern", pattern=4, longer_window=1, tied=True, everywhere=True),
    "mixtral": Family(windows="all", experts=True, everywhere=True),
    "qwen2_moe": Family(experts=True, everywhere=True),
    "qwen3_moe": Family(experts=True, head=128, everywhere=True),
    "olmoe": Family(experts=True, everywhere=True),
    "glm4_moe": Family(experts=True, head=128),
    "gpt_oss": Family(windows="gpt_oss", experts=True, head=64, everywhere=True),
    "llama4_text": Family(windows="llama4", experts=True, head=128),
    "deepseek_v2": Family(attention="mla", experts=True),
    "deepseek_v3": Family(attention="mla", experts=True),
    "kimi_k2": Family(attention="mla", experts=True),
    "gpt2": Family(attention="mha", mlp_matrices=2, tied=True, everywhere=True),
    "opt": Family(attention="mha", mlp_matrices=2, tied=True, everywhere=True),
    "falcon": Family(attention="falcon", mlp_matrices=2, tied=True, everywhere=True),
}
"""Families by `model_type`; where a model has several parts, by the text model's. Checked against
the models of vLLM 0.32 (which layers have windows, which ranks have an embedding)."""

_ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head",),
    "hidden_size": ("n_embd",),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "max_position_embeddings": ("n_positions", "seq_length"),
}


_WANTED = "give a config.json of Hugging Face's, or a model's folder"


def load(path: Path) -> tuple[dict[str, Any], Path]:
    """The configuration in a model folder or a `config.json`, and the folder.

    Raises:
        ConfigError: there is no configuration, or it is not JSON.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; {_WANTED}") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}; {_WANTED}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} has no JSON object at its top; {_WANTED}")
    return config, file.parent


def estimate(config: Mapping[str, Any], dtype: str = "auto") -> Model:
    """The model that a configuration describes. The bytes of its weights are computed from its
    sizes.

    `dtype` is vLLM's option. With `auto`, a model stored in 32 bits computes in 16 bits.

    Raises:
        ConfigError: an unknown architecture, or a size that is missing or makes no sense.
    """
    text = _text(config)
    name = str(text.get("model_type", ""))
    family = FAMILIES.get(name)
    if family is None:
        raise ConfigError(
            f"unknown architecture {name or 'without model_type'!r}: its KV cannot be planned. "
            f"Known: {', '.join(sorted(FAMILIES))}"
        )
    reader = _Reader(text, name, family)
    count = reader.size("num_hidden_layers")
    hidden = reader.size("hidden_size")
    element = _element_bytes(config, text, dtype)
    weight = _weight_bytes(config, text, element)
    kvs = [_kv(reader, family, layer) for layer in range(count)]
    kvs = _without_shared(kvs, reader)
    layers = tuple(
        Layer(int(_layer_weights(reader, family, layer) * weight), kvs[layer])
        for layer in range(count)
    )
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", family.tied)))
    embedding = reader.size("vocab_size") * hidden * element
    return Model(
        architecture=name,
        layers=layers,
        embedding_bytes=embedding,
        head_bytes=0 if tied else embedding,
        tied=tied,
        everywhere=family.everywhere,
        front_bytes=0,
        hidden=hidden,
        element_bytes=element,
        kv_element_bytes=1 if _has_fp8_kv(config, text) else element,
        max_length=reader.size("max_position_embeddings"),
        weights_from="estimated from the configuration",
    )


class _Reader:
    """Reads the numbers of a configuration, by the names that its family gives them."""

    def __init__(self, text: Mapping[str, Any], architecture: str, family: Family) -> None:
        self.text, self._architecture, self._family = text, architecture, family

    def get(self, name: str, default: Any = None) -> Any:
        for candidate in (name, *_ALIASES.get(name, ())):
            if self.text.get(candidate) is not None:
                return self.text[candidate]
        return default

    def size(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            said = "is missing" if value is None else f"is {value!r}, not a positive whole number"
            raise ConfigError(f"configuration of {self._architecture}: {name} {said}")
        return value

    @property
    def head(self) -> int:
        """Elements of a head."""
        if self.get("head_dim") is not None:
            return self.size("head_dim")
        derived = self.size("hidden_size") // self.size("num_attention_heads")
        return self._family.head or derived


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a configuration."""
    for name in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(name), dict):
            return dict(config[name])
    return config


def _element_bytes(config: Mapping[str, Any], text: Mapping[str, Any], dtype: str) -> int:
    """Bytes of an element in the type that the model computes in."""
    if dtype != "auto":
        return _known_type(dtype)
    for source in (text, config):
        for name in ("dtype", "torch_dtype"):
            if isinstance(given := source.get(name), str):
                return min(2, _known_type(given.removeprefix("torch.")))
    return 2


def _known_type(name: str) -> int:
    if name not in _ELEMENT_BYTES:
        raise ConfigError(f"data type {name!r}: known are {', '.join(_ELEMENT_BYTES)}")
    return _ELEMENT_BYTES[name]


def _quantization(config: Mapping[str, Any], text: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("quantization_config") or text.get("quantization_config")
    return found if isinstance(found, dict) else {}


def _has_fp8_kv(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Whether the checkpoint says that KV is kept in 8 bits."""
    quantization = _quantization(config, text)
    return bool(quantization.get("kv_cache_scheme")) or (
        str(quantization.get("kv_cache_quant_algo", "")).upper() == "FP8"
    )


def _weight_bytes(config: Mapping[str, Any], text: Mapping[str, Any], element: int) -> float:
    """Bytes of one weight inside the layers."""
    quantization = _quantization(config, text)
    if not quantization:
        return element
    method = str(quantization.get("quant_method", ""))
    groups = quantization.get("config_groups") or {}
    widths = [
        group["weights"]["num_bits"]
        for group in groups.values()
        if isinstance(group, dict) and (group.get("weights") or {}).get("num_bits")
    ]
    bits = max(widths, default=None) or quantization.get(
        "bits", quantization.get("w_bit", _QUANTIZED_BITS.get(method))
    )
    if not isinstance(bits, (int, float)) or bits <= 0:
        raise ConfigError(
            f"quantization {method!r} does not say its bits: the weights cannot be estimated; "
            "give the model's folder with its safetensors files"
        )
    return bits / 8


def _kv(reader: _Reader, family: Family, layer: int) -> Kv | None:
    if family.attention == "mla":
        latent = reader.size("kv_lora_rank") + reader.size("qk_rope_head_dim")
        return Kv("mla", 1, latent)
    heads = _kv_heads(reader, family, layer)
    if heads == 0:
        return None
    window = _window(reader, family, layer)
    content = 2 * reader.head
    if window is None:
        return Kv("full", heads, content)
    kind: Kind = "chunked" if family.windows == "llama4" else "sliding"
    return Kv(kind, heads, content, window + family.longer_window)


def _kv_heads(reader: _Reader, family: Family, layer: int) -> int:
    """KV heads of a layer; 0 where it has no attention."""
    queries = reader.size("num_attention_heads")
    if family.attention == "mha":
        return queries
    if family.attention == "falcon":
        if reader.get("new_decoder_architecture"):
            return reader.size("num_kv_heads", queries)
        return 1 if reader.get("multi_query", True) else queries
    if (blocks := reader.get("block_configs")) is not None:
        attention = blocks[layer].get("attention", {})
        if attention.get("no_op") or attention.get("replace_with_linear"):
            return 0
        return queries // int(attention["n_heads_in_group"])
    return reader.size("num_key_value_heads", queries)


def _window(reader: _Reader, family: Family, layer: int) -> int | None:
    """Tokens that a layer attends to; None for all."""
    kinds = reader.get("layer_types")
    if isinstance(kinds, list):
        kind = kinds[layer] if layer < len(kinds) else None
        if kind not in ("full_attention", "sliding_attention", "chunked_attention"):
            raise ConfigError(
                f"layer {layer} keeps state of the kind {kind!r}, which is not planned yet"
            )
        if kind == "full_attention" or family.windows == "none":
            return None
        chunk = kind == "chunked_attention"
        return reader.size("attention_chunk_size" if chunk else "sliding_window")
    match family.windows:
        case "all":
            windowed = reader.get("sliding_window") is not None
        case "gemma2" | "gpt_oss":
            windowed = layer % 2 == 0
        case "pattern":
            every = reader.size("sliding_window_pattern", family.pattern)
            windowed = (layer + 1) % every != 0
        case "llama4":
            rope = reader.get("no_rope_layers")
            windowed = bool(rope[layer]) if rope else (layer + 1) % 4 != 0
        case _:
            windowed = False
    if not windowed:
        return None
    name = "attention_chunk_size" if family.windows == "llama4" else "sliding_window"
    return reader.size(name)


def _without_shared(kvs: list[Kv | None], reader: _Reader) -> list[Kv | None]:
    """The layers' KV, with None for the layers at the end that read the KV of other layers and keep
    none."""
    shared = int(reader.get("num_kv_shared_layers", 0))
    return kvs[: len(kvs) - shared] + [None] * shared


def _layer_weights(reader: _Reader, family: Family, layer: int) -> int:
    """Number of weights of a layer."""
    hidden = reader.size("hidden_size")
    return (
        _attention_weights(reader, family, layer)
        + _mlp_weights(reader, family, layer)
        + (2 * hidden)
    )


def _attention_weights(reader: _Reader, family: Family, layer: int) -> int:
    hidden, queries = reader.size("hidden_size"), reader.size("num_attention_heads")
    if family.attention == "mla":
        rank, rope = reader.size("kv_lora_rank"), reader.size("qk_rope_head_dim")
        nope, value = reader.size("qk_nope_head_dim"), reader.size("v_head_dim")
        width = queries * (nope + rope)
        query = hidden * width if not (low := reader.get("q_lora_rank")) else low * (hidden + width)
        pair = hidden * (rank + rope) + rank * queries * (nope + value)
        return int(query + pair + queries * value * hidden)
    heads = _kv_heads(reader, family, layer)
    return hidden * reader.head * 2 * (queries + heads) if heads else 0


def _mlp_weights(reader: _Reader, family: Family, layer: int) -> int:
    hidden = reader.size("hidden_size")
    if (blocks := reader.get("block_configs")) is not None:
        ffn = blocks[layer].get("ffn", {})
        if ffn.get("no_op"):
            return 0
        wide = 2 * float(ffn["ffn_mult"]) * hidden / 3
        return family.mlp_matrices * hidden * (-(-int(wide) // 256) * 256)
    dense = family.mlp_matrices * hidden
    if not family.experts or _is_dense(reader, layer):
        name = (
            "intermediate_size_mlp"
            if reader.get("intermediate_size_mlp")
            else ("intermediate_size")
        )
        return dense * reader.size(name, 4 * hidden)
    experts = next(
        int(number)
        for name in ("num_local_experts", "num_experts", "n_routed_experts")
        if (number := reader.get(name))
    )
    width = reader.size("moe_intermediate_size", reader.get("intermediate_size"))
    shared = int(reader.get("n_shared_experts", 0) or 0) * width
    shared = int(reader.get("shared_expert_intermediate_size", shared))
    if family.windows == "llama4":
        shared = width
    return dense * (experts * width + shared) + hidden * experts


def _is_dense(reader: _Reader, layer: int) -> bool:
    """Whether a layer is dense (has no experts) in a model with experts."""
    if not any(
        reader.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts")
    ):
        return True
    if layer < int(reader.get("first_k_dense_replace", 0)):
        return True
    if layer in (reader.get("mlp_only_layers") or ()):
        return True
    step = int(
        reader.get("decoder_sparse_step")
        or reader.get("moe_layer_freq")
        or reader.get("interleave_moe_layer_step")
        or 1
    )
    return (layer + 1) % step != 0
