"""What `penstock doctor` says of a model, from its configuration alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.models import attention, hybrids, images
from penstock.errors import ConfigError
from penstock.vllm.families import FAMILIES, TRIED, family_of
from penstock.vllm.models import describe

ROOT = Path(__file__).parents[2]

_COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
_LATENT: dict[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "qwen3": {**_COMMON, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "gemma3": {
        **_COMMON,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 12,
        "head_dim": 64,
        "sliding_window": 1024,
    },
    "mistral": {
        **_COMMON,
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 4096,
    },
    "deepseek_v3": {
        **_LATENT,
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
    },
    "deepseek_v32": {
        **_LATENT,
        "model_type": "deepseek_v32",
        "architectures": ["DeepseekV32ForCausalLM"],
        "index_head_dim": 128,
        "index_n_heads": 4,
        "index_topk": 64,
    },
    "llama4": {
        **_COMMON,
        "model_type": "llama4_text",
        "architectures": ["Llama4ForCausalLM"],
        "attention_chunk_size": 1024,
        "head_dim": 64,
        "intermediate_size_mlp": 512,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
    },
    "whisper": {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "d_model": 256,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "vocab_size": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "decoder_start_token_id": 3,
        "dtype": "bfloat16",
    },
    "jamba": {
        **_COMMON,
        "model_type": "jamba",
        "architectures": ["JambaForCausalLM"],
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 1,
    },
}


def configured(folder: Path, name: str) -> Path:
    """A model of which there is nothing but the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGURATIONS[name]))
    return folder


MADE: dict[str, Callable[[Path], Path]] = {
    "llama": attention.llama,
    "gemma2": attention.gemma2,
    "gemma4": attention.gemma4,
    "deepseek_v2": attention.deepseek_v2,
    "idefics3": images.idefics3,
    **{name: hybrid.make for name, hybrid in hybrids.HYBRIDS.items()},
}


def model(folder: Path, name: str) -> str:
    return str(MADE[name](folder) if name in MADE else configured(folder, name))


@pytest.mark.parametrize(
    ("name", "examples"),
    [
        ("llama", "Llama, Qwen3, Mistral"),
        ("qwen3", "Llama, Qwen3, Mistral"),
        ("idefics3", "Llama, Qwen3, Mistral"),
        ("deepseek_v2", "DeepSeek-V2 and V3"),
        ("deepseek_v3", "DeepSeek-V2 and V3"),
        ("gemma2", "Gemma 2, 3 and 4"),
        ("gemma3", "Gemma 2, 3 and 4"),
        ("gemma4", "Gemma 2, 3 and 4"),
        ("lfm2", "LFM2"),
        ("qwen3_next", "Qwen3-Next"),
        ("granite_hybrid", "Granite 4, Nemotron-H"),
        ("nemotron_h", "Granite 4, Nemotron-H"),
        ("falcon_h1", "Falcon-H1"),
        ("jamba", "Jamba"),
    ],
)
def test_a_model_has_its_row(name: str, examples: str, tmp_path: Path) -> None:
    found = describe(model(tmp_path / name, name), "auto")
    assert found.family is not None
    assert found.family.examples == examples
    assert found.refusal is None
    assert found.layout is not None
    assert found.takes_images == (name == "idefics3")
    assert "bfloat16" in found.dtypes


@pytest.mark.parametrize(
    ("name", "examples", "reason"),
    [
        ("llama4", "Llama 4", "KV of the kind ChunkedLocalAttentionSpec; "),
        ("whisper", "Whisper", "KV of the kind CrossAttentionSpec; "),
        ("deepseek_v32", "DeepSeek-V3.2", "indexes of sparse attention. "),
    ],
)
def test_a_refused_model_has_its_row_and_the_engines_words(
    name: str, examples: str, reason: str, tmp_path: Path
) -> None:
    found = describe(model(tmp_path / name, name), "auto")
    assert found.family is not None
    assert (found.family.examples, found.family.is_refused) == (examples, True)
    assert found.layout is None
    assert found.refusal is not None
    assert reason in found.refusal
    assert found.refusal.endswith(" without Penstock")


def test_a_model_without_a_row_is_not_called_tried(tmp_path: Path) -> None:
    found = describe(model(tmp_path / "mistral", "mistral"), "auto")
    assert (found.kinds, found.family, found.refusal) == (("sliding_window",), None, None)


@pytest.mark.parametrize("name", ["deepseek_v2", "gemma4"])
def test_a_layout_that_is_not_possible_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="KV layout BLHNC cannot be had"):
        describe(model(tmp_path / "model", name), "BLHNC")


def doctor(*options: str) -> subprocess.CompletedProcess[str]:
    # In a process of its own: it loads vLLM's plug-ins, which would change the tests after it.
    command = [str(Path(sys.executable).with_name("penstock")), "doctor", *options]
    environ = {name: value for name, value in os.environ.items() if "LOGGING" not in name}
    environ["HF_HUB_OFFLINE"] = "1"
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300)


def test_the_command_says_it(tmp_path: Path) -> None:
    served, refused = (model(tmp_path / name, name) for name in ("llama", "llama4"))
    done = doctor("--model", served, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["can_serve"] is True
    assert said["examples"] == "Llama, Qwen3, Mistral"
    assert said["layout"] == "BLHNC"
    assert said["on_gpu"] == "not confirmed"
    assert list(said["tried"]) == list(TRIED)
    done = doctor("--model", refused, "--json")
    assert done.returncode == 1, done.stderr
    said = json.loads(done.stdout)
    assert (said["can_serve"], said["layout"]) == (False, None)
    assert "ChunkedLocalAttentionSpec" in said["refusal"]
    done = doctor("--model", refused)
    assert done.returncode == 1
    assert "chunks, as Llama 4" in done.stdout


def test_every_row_is_found_by_its_kinds_and_names_tests_that_exist() -> None:
    for family in FAMILIES:
        assert family_of(family.kinds, in_each_layer=family.in_each_layer) is family
        assert set(family.tried) <= set(TRIED)
        for shown in (family.shown_by, *family.tried.values()):
            assert not shown or (ROOT / shown).is_file(), shown
