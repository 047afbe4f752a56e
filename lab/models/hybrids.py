"""Hybrid models: some layers attend, others keep a state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.models.saved import COMMON, save

_ATTENTION: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def lfm2(folder: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Short convolutions in three of five layers, full attention in two."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    types = ["conv", "conv", "full_attention", "conv", "full_attention"]
    config = Lfm2Config(
        **_ATTENTION
        | COMMON
        | {
            "num_hidden_layers": len(types),
            "layer_types": types,
            "block_auto_adjust_ff_dim": False,
            # Read by vLLM alone.
            "conv_dim": 256,
            "conv_dim_out": 256,
            "block_dim": 256,
            "block_ff_dim": 512,
            "block_norm_eps": 1e-5,
        },
    )
    return save(folder, Lfm2ForCausalLM, config, seed, dtype)


def qwen3_next(folder: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Gated delta net in three of four layers, full attention in the fourth. Only the last layer
    has experts: vLLM refuses a model without any."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **_ATTENTION
        | COMMON
        | {
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "mlp_only_layers": [0, 1, 2],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        },
    )
    return save(folder, Qwen3NextForCausalLM, config, seed, dtype)


def granite_hybrid(folder: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Mamba-2 in three of four layers, full attention in the third; no experts."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        **_ATTENTION
        | COMMON
        | {
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 512,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 64,
            "mamba_chunk_size": 64,
            "position_embedding_type": "rope",
        },
    )
    return save(folder, GraniteMoeHybridForCausalLM, config, seed, dtype)


def falcon_h1(folder: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Mamba-2 and full attention beside each other in every layer."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    config = FalconH1Config(
        **_ATTENTION
        | COMMON
        | {
            "mamba_d_ssm": 256,
            "mamba_n_heads": 4,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 64,
            "mamba_chunk_size": 64,
        },
    )
    return save(folder, FalconH1ForCausalLM, config, seed, dtype)


def nemotron_h(folder: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Mamba-2, MLP and full attention in layers of their own."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        **COMMON
        | {
            "hidden_size": 256,
            "intermediate_size": 512,
            "layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba", "mlp"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "n_groups": 1,
            "ssm_state_size": 64,
            "chunk_size": 64,
        },
    )
    return save(folder, NemotronHForCausalLM, config, seed, dtype)


@dataclass(frozen=True)
class Hybrid:
    """A model, and how vLLM's CPU kernels can serve it."""

    make: Callable[..., Path]
    dtype: str
    block: int
    """Tokens of a block. vLLM on CPUs must be told, as it cuts prompts at others otherwise."""
    block_bytes: int
    """Bytes of the KV cache that a block of any group takes."""
    groups: int
    """KV-cache groups that vLLM makes of its layers."""
    options: dict[str, Any] = field(default_factory=dict)

    def saved(self, folder: Path) -> Path:
        """The model, in a folder."""
        return self.make(folder, dtype=self.dtype)

    @property
    def engine(self) -> dict[str, Any]:
        """Options of an engine that serves it."""
        return {"dtype": self.dtype, "block_size": self.block, **self.options}


_STEP = "max_num_batched_tokens"
# vLLM's rotary kernel for CPUs rotates other rows of an LFM2 than it should.
_ROTATED_BY_TORCH = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
# vLLM's Mamba-2 kernels for CPUs compute no step that passes the end of a block.
HYBRIDS = {
    "lfm2": Hybrid(lfm2, "float32", 128, 256 << 10, 3, _ROTATED_BY_TORCH),
    "qwen3_next": Hybrid(qwen3_next, "bfloat16", 256, 128 << 10, 4),
    "granite_hybrid": Hybrid(granite_hybrid, "float32", 256, 256 << 10, 4, {_STEP: 256}),
    "falcon_h1": Hybrid(falcon_h1, "float32", 128, 512 << 10, 2, {_STEP: 128}),
    "nemotron_h": Hybrid(nemotron_h, "float32", 256, 256 << 10, 3, {_STEP: 256}),
}
"""Short convolutions, gated delta net, and Mamba-2 in three arrangements."""
