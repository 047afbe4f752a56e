"""Models whose layers all attend, and LoRA adapters for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lab.models.saved import COMMON, VOCABULARY, save


def llama(
    folder: Path,
    *,
    seed: int = 0,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    dtype: str = "float32",
) -> Path:
    """A Llama without tokenizer; prompts are token ids."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **COMMON,
    )
    return save(folder, LlamaForCausalLM, config, seed, dtype)


def looped(folder: Path, *, seed: int = 0) -> Path:
    """An IQuest-LoopCoder: all layers run twice, with KV of their own each time, and the second
    time they look back over a window besides."""
    import json

    import torch
    from safetensors.torch import save_file

    layers, heads, head = 4, 4, 64
    llama(folder, seed=seed, layers=layers, heads=heads)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["IQuestLoopCoderForCausalLM"], "loop_num": 2}
    config |= {"loop_window_size": 256}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    gates = {}
    for layer in range(layers):
        name = f"model.gate_projections.{layer}"
        gates[f"{name}.weight"] = torch.randn((heads, head), generator=generator)
        gates[f"{name}.bias"] = torch.zeros(heads)
    save_file(gates, folder / "gates.safetensors")
    return folder


def lora(folder: Path, model: Path, *, seed: int) -> Path:
    """A LoRA adapter for a Llama, with random weights that change its output."""
    import json

    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    config = LlamaConfig.from_pretrained(model)
    rank, head = 8, config.hidden_size // config.num_attention_heads
    sizes = {"q_proj": config.num_attention_heads, "v_proj": config.num_key_value_heads}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config.num_hidden_layers):
        for module, heads in sizes.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (("A", (rank, config.hidden_size)), ("B", (heads * head, rank))):
                weights[f"{name}.lora_{part}.weight"] = 0.3 * torch.randn(
                    shape, generator=generator
                )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    content = {
        "peft_type": "LORA",
        "base_model_name_or_path": "llama",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(sizes),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


def gemma2(folder: Path, *, seed: int = 0, window: int = 256) -> Path:
    """A Gemma-2: every other layer looks back over a window only."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=window,
        **COMMON | {"tie_word_embeddings": True},
    )
    return save(folder, Gemma2ForCausalLM, config, seed, "float32")


def gemma3n(folder: Path, *, seed: int = 0) -> Path:
    """A Gemma-3n: windows, and the last layers use the KV of others."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    config = Gemma3nTextConfig(
        hidden_size=256,
        intermediate_size=[512] * 8,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=256,
        layer_types=["sliding_attention", "full_attention"] * 4,
        num_kv_shared_layers=4,
        activation_sparsity_pattern=[0.0] * 8,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=VOCABULARY,
        laurel_rank=16,
        **COMMON | {"tie_word_embeddings": True},
    )
    return save(folder, Gemma3nForCausalLM, config, seed, "float32")


def gemma4(folder: Path, *, seed: int = 0) -> Path:
    """A Gemma-4, as E2B: windows, heads of two sizes, and the last layers use the KV of others."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        global_head_dim=512,
        sliding_window=256,
        layer_types=["sliding_attention", "full_attention"] * 4,
        num_kv_shared_layers=4,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCABULARY,
        **COMMON | {"tie_word_embeddings": True},
    )
    return save(folder, Gemma4ForCausalLM, config, seed, "float32")


LATENT_ENGINE = {"attention_backend": "CPU_MLA"}
"""Options of an engine with multi-head latent attention. Left alone, vLLM takes AMX_MLA where the
CPU has AMX, and that one refuses float32."""


def longrope(folder: Path, *, seed: int = 0, original: int = 1024) -> Path:
    """A Phi-3 that has other rotary factors for contexts longer than `original` tokens."""
    from transformers import Phi3Config, Phi3ForCausalLM

    half = 32
    config = Phi3Config(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        original_max_position_embeddings=original,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0] * half,
            "long_factor": [1.0 + 0.5 * each for each in range(half)],
        },
        **COMMON,
    )
    return save(folder, Phi3ForCausalLM, config, seed, "float32")


def deepseek_v2(folder: Path, *, seed: int = 0, **options: Any) -> Path:
    """A DeepSeek-V2: multi-head latent attention."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        **COMMON,
        **options,
    )
    return save(folder, DeepseekV2ForCausalLM, config, seed, "float32")


def qwen3(folder: Path, *, text: str, seed: int = 0) -> Path:
    """A Qwen3 with a tokenizer that has words for `text`. Other text has a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    trainer = trainers.BpeTrainer(
        special_tokens=list(special.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text * 100], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = Qwen3Config(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        **COMMON | {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 40_960},
    )
    return save(folder, Qwen3ForCausalLM, config, seed, "bfloat16")
