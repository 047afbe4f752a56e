"""Configurations of real models, their sizes against the published ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.plan import config, weights
from tests.plan.test_kv import DEEPSEEK, GEMMA2, LLAMA

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "sliding_window": None,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "torch_dtype": "float32",
}


@pytest.mark.parametrize(
    ("text", "parameters"),
    [(LLAMA, 32.76e9), (DEEPSEEK, 671e9), (GEMMA2, 2.61e9), (MIXTRAL, 46.7e9), (GPT2, 124e6)],
    ids=["qwen-32b", "deepseek-v3", "gemma-2-2b", "mixtral-8x7b", "gpt2"],
)
def test_estimates_come_near_the_published_sizes(text: dict[str, Any], parameters: float) -> None:
    """Within 2 %: biases, norms of queries and the like are left out."""
    model = config.estimate(text)
    inside = sum(layer.weight_bytes for layer in model.layers) / (1 if text is DEEPSEEK else 2)
    outside = (model.embedding_bytes + model.head_bytes) / 2
    assert inside + outside == pytest.approx(parameters, rel=0.02)


def test_types_are_vllms() -> None:
    """What is stored in 32 bits is computed in 16, unless 32 are asked for."""
    assert config.estimate(GPT2).element_bytes == 2
    assert config.estimate(GPT2, "float32").kv_element_bytes == 4
    fp8 = {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    quantized = config.estimate(LLAMA | {"quantization_config": fp8})
    assert (quantized.element_bytes, quantized.kv_element_bytes) == (2, 1)
    groups = {"group_0": {"weights": {"num_bits": 4}}}
    packed = {"quant_method": "compressed-tensors", "config_groups": groups}
    four = config.estimate(LLAMA | {"quantization_config": packed})
    assert four.layers[0].weight_bytes * 4 == pytest.approx(
        config.estimate(LLAMA).layers[0].weight_bytes, rel=1e-6
    )


FALCON: dict[str, Any] = {
    "model_type": "falcon",
    "num_hidden_layers": 32,
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "num_kv_heads": 71,
    "multi_query": True,
    "vocab_size": 65024,
    "max_position_embeddings": 2048,
}


@pytest.mark.parametrize(
    ("change", "heads"),
    [
        ({}, 1),
        ({"multi_query": False}, 71),
        ({"new_decoder_architecture": True, "num_kv_heads": 8}, 8),
    ],
)
def test_falcons_have_one_head_unless_they_say_otherwise(
    change: dict[str, Any], heads: int
) -> None:
    kv = config.estimate(FALCON | change).layers[0].kv
    assert kv is not None
    assert kv.heads == heads


@pytest.mark.parametrize(
    ("name", "more", "windows"),
    [
        ("gpt_oss", {"num_local_experts": 4, "sliding_window": 128}, [128, None, 128, None]),
        ("cohere2", {"sliding_window": 4096}, [4097, 4097, 4097, None]),
        ("mistral", {"sliding_window": 4096}, [4096] * 4),
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("llama4_text", {"attention_chunk_size": 8192}, [8192, 8192, 8192, None]),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9}, [None] * 4),
    ],
)
def test_windows_follow_the_family_where_none_are_listed(
    name: str, more: dict[str, Any], windows: list[int | None]
) -> None:
    model = config.estimate(LLAMA | {"model_type": name, "num_hidden_layers": 4} | more)
    assert [layer.kv.window if layer.kv else None for layer in model.layers] == windows


def test_heads_are_not_always_hidden_size_by_their_number() -> None:
    kv = config.estimate(LLAMA | {"model_type": "gemma2", "sliding_window": 4}).layers[0].kv
    assert kv is not None
    assert kv.content == 2 * 256


def test_some_models_have_their_embeddings_on_every_rank() -> None:
    model = config.estimate(LLAMA | {"model_type": "mixtral", "num_local_experts": 8})
    middle = model.weight_bytes(10, 20) - sum(layer.weight_bytes for layer in model.layers[10:20])
    assert middle == model.embedding_bytes + model.head_bytes > 0


def test_tied_embeddings_weigh_on_the_first_and_the_last_rank() -> None:
    model = config.estimate(LLAMA | {"tie_word_embeddings": True})
    assert model.tied
    stages = [model.weight_bytes(*stage) for stage in ((0, 20), (20, 40), (40, 64))]
    assert sum(stages) == model.weight_bytes(0, 64) + model.embedding_bytes


def test_an_unknown_architecture_names_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"unknown architecture 'mamba2'.*deepseek_v3"):
        config.estimate(LLAMA | {"model_type": "mamba2"})


def test_state_that_is_not_planned_is_refused() -> None:
    kinds = ["linear_attention", "full_attention"] * 32
    text = LLAMA | {"model_type": "gpt_oss", "layer_types": kinds, "sliding_window": 128}
    # Of a family without windows too.
    for name in ("gpt_oss", "llama"):
        with pytest.raises(ConfigError, match="layer 0 keeps state of the kind 'linear_attention'"):
            config.estimate(text | {"model_type": name})
    with pytest.raises(ConfigError, match="layer 1 keeps state of the kind None"):
        config.estimate(text | {"layer_types": ["full_attention"]})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": "eight"}, "num_key_value_heads is 'eight'"),
        ({"torch_dtype": "int3"}, "data type 'int3'"),
        ({"quantization_config": {"quant_method": "new"}}, "does not say its bits"),
    ],
)
def test_bad_sizes_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config.estimate(LLAMA | change)


def test_the_text_part_of_a_model_of_pictures_counts() -> None:
    model = config.estimate({"model_type": "llava", "text_config": LLAMA})
    assert len(model.layers) == 64


def write_tensors(path: Path, tensors: dict[str, int]) -> None:
    header, offset = {}, 0
    for name, nbytes in tensors.items():
        header[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


SMALL = LLAMA | {"num_hidden_layers": 2}


def test_weights_are_read_from_files(tmp_path: Path) -> None:
    write_tensors(
        tmp_path / "model.safetensors",
        {
            "model.embed_tokens.weight": 100,
            "model.layers.0.self_attn.q_proj.weight": 10,
            "model.layers.0.mlp.up_proj.weight": 30,
            "model.layers.1.self_attn.q_proj.weight": 11,
            "model.layers.2.predicts_ahead.weight": 999,
            "vision_tower.encoder.layers.0.weight": 1000,
            "visual.blocks.1.weight": 2000,
            "model.norm.weight": 3,
            "lm_head.weight": 90,
        },
    )
    model = weights.weigh(config.estimate(SMALL), tmp_path)
    assert [layer.weight_bytes for layer in model.layers] == [40, 11]
    assert model.weight_bytes(0, 1) == 100 + 40 + 3000
    assert model.weight_bytes(1, 2) == 101
    assert model.weights_from == "1 safetensors file"


def test_floating_point_weights_are_loaded_in_16_bits(tmp_path: Path) -> None:
    header = {
        f"model.{name}.weight": {"dtype": "F32", "shape": [4, 5], "data_offsets": [0, 80]}
        for name in ("embed_tokens", "layers.0.a", "layers.1.a", "lm_head")
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert weights.weigh(config.estimate(SMALL), tmp_path).weight_bytes(0, 2) == 4 * 40
    whole = weights.weigh(config.estimate(SMALL, "float32"), tmp_path)
    assert whole.weight_bytes(0, 2) == 4 * 80


def test_an_index_without_its_files_gives_the_total(tmp_path: Path) -> None:
    index = {"metadata": {"total_size": 10_000_000}, "weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / weights.INDEX).write_text(json.dumps(index))
    model = weights.weigh(config.estimate(SMALL), tmp_path)
    assert model.weight_bytes(0, 2) == pytest.approx(10_000_000, abs=4)
    assert "total" in model.weights_from


def test_no_files_leave_the_estimate(tmp_path: Path) -> None:
    model = config.estimate(SMALL)
    assert weights.weigh(model, tmp_path) == model


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 8, struct.pack("<Q", 4) + b"[1]x", struct.pack("<Q", 2) + b"{"],
    ids=["empty", "huge header", "no object", "cut"],
)
def test_damaged_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors: not a safetensors file"):
        weights.weigh(config.estimate(SMALL), tmp_path)


def test_a_download_cut_short_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", {"model.layers.0.a.weight": 5})
    with pytest.raises(ConfigError, match="lack weights of layer 1"):
        weights.weigh(config.estimate(SMALL), tmp_path)
