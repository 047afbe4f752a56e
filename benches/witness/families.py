"""Families of models whose KV is computed again, and the element types that they store."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.models import attention, hybrids
from lab.models.prompts import tokens
from lab.models.saved import COMMON, save

MLA = attention.LATENT_ENGINE | {
    "prepare": "lab.engines.mla_on_cpu:right_rotary_and_own_hits",
    "enable_prefix_caching": True,
}


@dataclass(frozen=True)
class Family:
    """A kind of model, and the type in which vLLM keeps its KV."""

    make: Callable[..., Path]
    """Called with a folder and `seed`."""
    element: str
    """Element type of payloads. `mixed`: they have several, or none that is known."""
    block: int = 32
    """Tokens of a block."""
    prompt: int = 256
    """Tokens of each prompt."""
    answer: int = 40
    """Tokens that are decoded."""
    prompts: int = 10
    options: dict[str, Any] = field(default_factory=dict)
    """Of its engines."""
    steps: tuple[int, ...] = (2048, 64)
    """Tokens of a step at most: the longest first."""
    is_trained: bool = False

    def prompt_tokens(self, model: Path, number: int) -> list[int]:
        """A prompt: text that a trained model has not learnt, or else random tokens."""
        if not self.is_trained:
            return tokens(self.prompt, f"witness {number}")
        return _text(model)[number * self.prompt : (number + 1) * self.prompt]


_texts: dict[Path, list[int]] = {}


def _text(model: Path) -> list[int]:
    if model not in _texts:
        from transformers import AutoTokenizer

        from benches.trained import text
        from benches.trained.recipe import stream

        _texts[model] = stream(AutoTokenizer.from_pretrained(model), text.read().held_out)
    return _texts[model]


def _llama(kv_heads: int, dtype: str, layers: int = 12, hidden: int = 512) -> Callable[..., Path]:
    def make(folder: Path, seed: int = 0) -> Path:
        return attention.llama(
            folder,
            seed=seed,
            hidden=hidden,
            layers=layers,
            heads=hidden // 64,
            kv_heads=kv_heads,
            dtype=dtype,
        )

    return make


def _usual_spread(folder: Path, seed: int = 0) -> Path:
    """A Llama whose weights are as small as is usual before training."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=2,
        **COMMON | {"initializer_range": 0.02},
    )
    return save(folder, LlamaForCausalLM, config, seed, "bfloat16")


def _trained(folder: Path, seed: int = 0) -> Path:
    """The Llama that `benches.trained` trains. Another seed replaces its weights by random ones."""
    import shutil

    from benches.trained.recipe import Recipe
    from benches.trained.train import trained

    shutil.copytree(trained(Recipe("llama")).folder, folder)
    if seed:
        from benches.witness.faults import rewritten

        rewritten(
            folder, lambda name, tensor: tensor.copy_(tensor.flatten().flip(0).view_as(tensor))
        )
    return folder


def _deep(make: Callable[..., Path], layers: int, dtype: str) -> Callable[..., Path]:
    """A model of `lab.models`, with more layers."""

    def made(folder: Path, seed: int = 0) -> Path:
        import transformers

        shallow = make(folder, seed=seed)
        content = json.loads((shallow / "config.json").read_text())
        config = transformers.AutoConfig.from_pretrained(shallow)
        kind = getattr(transformers, content["architectures"][0])
        kinds = content.get("layer_types")
        config.num_hidden_layers = layers
        if kinds:
            config.layer_types = (kinds * layers)[:layers]
        if content.get("mlp_only_layers"):
            config.mlp_only_layers = list(range(layers - 1))
        for file in folder.glob("*.safetensors"):
            file.unlink()
        return save(folder, kind, config, seed, dtype)

    return made


def _hybrid(name: str, dtype: str, layers: int | None = None, **more: Any) -> Family:
    hybrid = hybrids.HYBRIDS[name]
    block = hybrid.block

    def make(folder: Path, seed: int = 0) -> Path:
        return hybrid.make(folder, dtype=dtype, seed=seed)

    options = {key: value for key, value in hybrid.options.items() if key != _STEP}
    return Family(
        make if layers is None else _deep(make, layers, dtype),
        "mixed",
        block,
        prompt=2 * block + 3 * block // 4,
        answer=block // 4 + 8,
        prompts=6,
        options=options | {"dtype": dtype},
        steps=(hybrid.options.get(_STEP, 2 * block), block),
        **more,
    )


_STEP = "max_num_batched_tokens"


def _dense(make: Callable[..., Path], dtype: str, kv: str | None = None, **more: Any) -> Family:
    element = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[dtype]
    options = more.pop("options", {}) | {"dtype": dtype}
    if kv is not None:
        element, options["kv_cache_dtype"] = kv, kv
    return Family(make, element, options=options, **more)


_LATENT: dict[str, Any] = {"block": 16, "prompt": 160, "answer": 40, "options": MLA}
_LATENT["steps"] = (1024, 32)

FAMILIES: dict[str, Family] = {
    "gqa bf16": _dense(_llama(2, "bfloat16"), "bfloat16"),
    "mha bf16": _dense(_llama(8, "bfloat16", layers=8), "bfloat16", prompts=6),
    "gqa fp16": _dense(_llama(2, "float16"), "float16"),
    "gqa fp32": _dense(_llama(2, "float32"), "float32"),
    "gqa e4m3": _dense(_llama(2, "bfloat16"), "bfloat16", "fp8_e4m3"),
    "gqa e5m2": _dense(_llama(2, "bfloat16"), "bfloat16", "fp8_e5m2"),
    "small spread bf16": _dense(_usual_spread, "bfloat16"),
    "trained bf16": _dense(_trained, "bfloat16", is_trained=True),
    "trained fp16": _dense(_trained, "float16", is_trained=True),
    "trained e4m3": _dense(_trained, "bfloat16", "fp8_e4m3", is_trained=True),
    "small fp32": _dense(attention.llama, "float32", block=128),
    "small bf16": _dense(attention.llama, "bfloat16"),
    "windows bf16": _dense(_deep(attention.gemma2, 8, "bfloat16"), "bfloat16", prompts=6),
    "windows fp32": _dense(attention.gemma2, "float32", prompts=6),
    "mla bf16": _dense(_deep(attention.deepseek_v2, 6, "bfloat16"), "bfloat16", **_LATENT),
    "mla fp32": _dense(attention.deepseek_v2, "float32", **_LATENT),
    "delta net bf16": _hybrid("qwen3_next", "bfloat16", 8),
    "mamba fp32": _hybrid("granite_hybrid", "float32"),
    "mamba beside fp32": _hybrid("falcon_h1", "float32"),
    "short convolutions fp32": _hybrid("lfm2", "float32"),
    "short convolutions bf16": _hybrid("lfm2", "bfloat16"),
}
