"""What a small model is made of before it learns: its recipe, its shape, its tokenizer."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benches.trained.text import Text

END = "<|end|>"
"""Between documents."""
KINDS = ("llama", "lfm2")


@dataclass(frozen=True)
class Recipe:
    """All that decides what a model learns, but for the text and the versions of the libraries."""

    kind: str
    vocabulary: int = 2048
    hidden: int = 256
    context: int = 512
    """Tokens of a sample: the longest prompt that the model is good at."""
    batch: int = 4
    """Samples of a step."""
    steps: int = 400
    matrix_rate: float = 0.02
    """Learning rate of matrices, which Muon trains."""
    other_rate: float = 4e-3
    """Learning rate of all else, which AdamW trains."""
    warm_up: int = 20
    cool_down: float = 0.6
    """Share of the steps over which the rate falls to nothing, at the end."""
    seed: int = 1

    def digest(self, source: Text) -> str:
        """Names what comes of the recipe with this text."""
        whole = json.dumps([dataclasses.asdict(self), source.digest])
        return hashlib.sha256(whole.encode()).hexdigest()[:16]


def model_of(recipe: Recipe) -> Any:
    """The model before it has learnt anything."""
    import torch
    from transformers import Lfm2Config, Lfm2ForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(recipe.seed)
    common: dict[str, Any] = {
        "vocab_size": recipe.vocabulary,
        "hidden_size": recipe.hidden,
        "intermediate_size": 2 * recipe.hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    if recipe.kind == "llama":
        return LlamaForCausalLM(
            LlamaConfig(**common | {"num_hidden_layers": 4, "tie_word_embeddings": True})
        )
    types = ["conv", "conv", "full_attention", "conv", "full_attention"]
    return Lfm2ForCausalLM(
        Lfm2Config(
            **common
            | {
                "num_hidden_layers": len(types),
                "layer_types": types,
                "block_auto_adjust_ff_dim": False,
                "tie_embedding": True,
                # Read by vLLM alone.
                "conv_dim": recipe.hidden,
                "conv_dim_out": recipe.hidden,
                "block_dim": recipe.hidden,
                "block_ff_dim": 2 * recipe.hidden,
                "block_norm_eps": 1e-5,
            }
        )
    )


def tokenizer_of(recipe: Recipe, documents: Sequence[str]) -> Any:
    """A byte-level BPE with words for what is learnt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END
    )


def stream(tokenizer: Any, documents: Sequence[str]) -> list[int]:
    """All documents behind each other."""
    end = tokenizer.convert_tokens_to_ids(END)
    tokens: list[int] = []
    for document in documents:
        tokens += [end, *tokenizer.encode(document, add_special_tokens=False)]
    return tokens
