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
    element = 4 if text is GPT2 else 2
    layer_element = 1 if text is DEEPSEEK else element
    inside = sum(layer.weight_bytes for layer in model.layers) / layer_element
    outside = (model.embedding_bytes + model.head_bytes) / element
    assert inside + outside == pytest.approx(parameters, rel=0.02)


def test_tied_embeddings_weigh_on_the_first_and_the_last_rank() -> None:
    model = config.estimate(GEMMA2)
    assert model.tied
    half = 13
    both = model.weight_bytes(0, half) + model.weight_bytes(half, 26)
    assert both == model.weight_bytes(0, 26) + model.embedding_bytes


def test_an_unknown_architecture_names_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"unknown architecture 'mamba2'.*deepseek_v3"):
        config.estimate(LLAMA | {"model_type": "mamba2"})


def test_state_that_is_not_planned_is_refused() -> None:
    kinds = ["linear_attention", "full_attention"] * 32
    with pytest.raises(ConfigError, match="layer 0 keeps state of the kind 'linear_attention'"):
        config.estimate(LLAMA | {"model_type": "gpt_oss", "layer_types": kinds})


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
            "model.norm.weight": 3,
            "lm_head.weight": 90,
        },
    )
    model = weights.weigh(config.estimate(SMALL), tmp_path)
    assert [layer.weight_bytes for layer in model.layers] == [40, 11]
    assert model.weight_bytes(0, 1) == 143
    assert model.weight_bytes(1, 2) == 101
    assert model.weights_from == "1 safetensors file"


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
