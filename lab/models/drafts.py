"""Models with drafters of every kind that has layers.

Only a few tokens ever come out of them. So even a drafter with random weights is right now and
then, and how often tells whether its KV is what it should be.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.models.saved import COMMON, VOCABULARY

_LAYERS, _HIDDEN, _HEADS, _KV_HEADS = 4, 256, 4, 2
_SPREAD = COMMON["initializer_range"]

_ANSWERS = 6
"""Tokens that come out."""


@dataclass(frozen=True)
class Drafted:
    """A model with its drafter."""

    model: Path
    speculative_config: dict[str, Any]
    drops_last: bool
    """Whether vLLM computes the last block that it finds again."""


def drafted(method: str, folder: Path) -> Drafted:
    """The model and drafter of a method's name in vLLM; `narrow` is a draft model with fewer KV
    heads than the model."""
    if method == "mtp":
        speculation = {"method": "mtp", "num_speculative_tokens": 1}
        return Drafted(_mimo(folder / "model"), speculation, drops_last=True)
    model = _llama(folder / "model", seed=0)
    if method == "draft_model":
        draft = _noisy(folder / "draft", model)
    elif method == "narrow":
        draft = _llama(folder / "draft", seed=5, layers=2, kv_heads=1)
    else:
        draft = _eagle(folder / "draft", is_third=method == "eagle3")
    is_eagle = method.startswith("eagle")
    speculation = {
        "method": method if is_eagle else "draft_model",
        "model": str(draft),
        "num_speculative_tokens": 3,
    }
    return Drafted(model, speculation, drops_last=is_eagle)


def _llama(folder: Path, *, seed: int, layers: int = _LAYERS, kv_heads: int = _KV_HEADS) -> Path:
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(_llama_config(layers, kv_heads))
    _narrow(model.lm_head.weight)
    model.save_pretrained(folder)
    return folder


def _llama_config(layers: int, kv_heads: int = _KV_HEADS) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=kv_heads,
        **COMMON,
    )


def _narrow(lm_head: Any) -> None:
    """Leaves a few tokens that may come out. All others get the logit 0, which is less than the
    best of these."""
    lm_head.data[:-_ANSWERS] = 0


def _noisy(folder: Path, model: Path) -> Path:
    """The model with noise on its weights."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    draft = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if weight.dim() > 1 and "lm_head" not in name:
                weight += 0.05 * weight.std() * torch.randn_like(weight)
    draft.save_pretrained(folder)
    return folder


def _eagle(folder: Path, *, is_third: bool) -> Path:
    """An EAGLE or EAGLE-3 head of one layer for the Llama."""
    import torch

    torch.manual_seed(3 if is_third else 2)
    more: dict[str, Any]
    if is_third:
        weights = _layer("midlayer", attention_width=2 * _HIDDEN)
        weights["midlayer.hidden_norm.weight"] = torch.ones(_HIDDEN)
        weights["fc.weight"] = _SPREAD * torch.randn(_HIDDEN, 3 * _HIDDEN)
        weights["norm.weight"] = torch.ones(_HIDDEN)
        weights["lm_head.weight"] = _SPREAD * torch.randn(VOCABULARY, _HIDDEN)
        _narrow(weights["lm_head.weight"])
        more = {
            "architectures": ["Eagle3LlamaForCausalLM"],
            "draft_vocab_size": VOCABULARY,
            # The usual three are not distinct in so shallow a model.
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        }
    else:
        weights = _layer("layers.0")
        # The first layer has no norm of its input.
        del weights["layers.0.input_layernorm.weight"]
        weights["fc.weight"] = _SPREAD * torch.randn(_HIDDEN, 2 * _HIDDEN)
        more = {"architectures": ["EagleLlamaForCausalLM"]}
    return _save(folder, _llama_config(layers=1), weights, model_type="llama", **more)


def _mimo(folder: Path) -> Path:
    """A MiMo: a Qwen2 with an MTP layer in the same checkpoint."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(4)
    config = Qwen2Config(
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        **COMMON,
    )
    model = Qwen2ForCausalLM(config)
    _narrow(model.lm_head.weight)
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    name = "model.mtp_layers.0"
    weights |= _layer(name)
    for part, size in (("q_proj", _HIDDEN), ("k_proj", _HIDDEN // 2), ("v_proj", _HIDDEN // 2)):
        weights[f"{name}.self_attn.{part}.bias"] = torch.zeros(size)
    weights[f"{name}.input_proj.weight"] = _SPREAD * torch.randn(_HIDDEN, 2 * _HIDDEN)
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{name}.{norm}.weight"] = torch.ones(_HIDDEN)
    more = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    return _save(folder, config, weights, **more)


def _layer(name: str, attention_width: int = _HIDDEN) -> dict[str, Any]:
    """Random weights of a decoder layer whose attention reads rows of a width."""
    import torch

    kv = _KV_HEADS * _HIDDEN // _HEADS
    shapes = {
        "self_attn.q_proj": (_HIDDEN, attention_width),
        "self_attn.k_proj": (kv, attention_width),
        "self_attn.v_proj": (kv, attention_width),
        "self_attn.o_proj": (_HIDDEN, _HIDDEN),
        "mlp.gate_proj": (2 * _HIDDEN, _HIDDEN),
        "mlp.up_proj": (2 * _HIDDEN, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, 2 * _HIDDEN),
    }
    weights = {
        f"{name}.{part}.weight": _SPREAD * torch.randn(shape) for part, shape in shapes.items()
    }
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{name}.{norm}.weight"] = torch.ones(_HIDDEN)
    return weights


def _save(folder: Path, config: Any, weights: dict[str, Any], **more: Any) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    content = config.to_dict() | {"dtype": "float32"} | more
    (folder / "config.json").write_text(json.dumps(content))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
