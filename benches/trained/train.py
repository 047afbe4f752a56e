"""Trains a small model on `text`, seeded, and keeps it under target/trained.

`python -m benches.trained.train` trains both models: a Llama, and an LFM2, which has short
convolutions beside attention. Each takes some minutes of one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from benches.trained import text
from benches.trained.text import Text

FOLDER = Path(__file__).parents[2] / "target" / "trained"
END = "<|end|>"
"""Between documents."""
KINDS = ("llama", "lfm2")
VALIDATION_TOKENS = 16_384


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


@dataclass(frozen=True)
class Trained:
    """A model and its tokenizer in a folder, and what is known of the training."""

    folder: Path
    facts: dict[str, Any]


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


def bigram_loss(learnt: Sequence[int], held_out: Sequence[int], vocabulary: int) -> float:
    """Nats a token of a model that counts pairs of tokens, smoothed by how often each token is."""
    single = Counter(learnt)
    pairs = Counter(itertools.pairwise(learnt))
    weight = 20.0
    lost = 0.0
    for before, token in itertools.pairwise(held_out):
        usual = (single[token] + 1) / (len(learnt) + vocabulary)
        lost -= math.log((pairs[before, token] + weight * usual) / (single[before] + weight))
    return lost / (len(held_out) - 1)


def unigram_loss(learnt: Sequence[int], held_out: Sequence[int], vocabulary: int) -> float:
    """Nats a token of a model that knows only how often each token is."""
    single = Counter(learnt)
    lost = [math.log((single[each] + 1) / (len(learnt) + vocabulary)) for each in held_out]
    return -sum(lost) / len(lost)


def trained(recipe: Recipe, source: Text | None = None, threads: int = 1) -> Trained:
    """The model of a recipe: from its folder, or trained now."""
    source = source or text.read()
    folder = FOLDER / f"{recipe.kind}-{recipe.digest(source)}"
    facts = folder / "training.json"
    if not facts.exists():
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        shutil.rmtree(unfinished, ignore_errors=True)
        found = _train(recipe, source, unfinished, threads)
        (unfinished / "training.json").write_text(json.dumps(found, indent=1) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    return Trained(folder, json.loads(facts.read_text()))


def _train(recipe: Recipe, source: Text, folder: Path, threads: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(threads)
    began, worked = time.monotonic(), time.process_time()
    tokenizer = tokenizer_of(recipe, source.learnt)
    order = random.Random(recipe.seed)
    learnt = stream(tokenizer, order.sample(source.learnt, len(source.learnt)))
    held_out = stream(tokenizer, source.held_out)[:VALIDATION_TOKENS]
    model = model_of(recipe)
    optimizers = _optimizers(model, recipe)
    samples = _samples(learnt, recipe, order)
    columns = TextColumn(recipe.kind), BarColumn(), TextColumn("loss {task.fields[loss]:.2f}")
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=recipe.steps, loss=math.nan)
        for step in range(recipe.steps):
            batch = torch.tensor([next(samples) for _ in range(recipe.batch)])
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, rate in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate * share_of_rate(step, recipe)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            bar.update(task, advance=1, loss=loss.item())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {
        "recipe": dataclasses.asdict(recipe),
        "text": source.digest,
        "characters": sum(map(len, source.learnt)),
        "tokens_of_text": len(learnt),
        "tokens_learnt": recipe.steps * recipe.batch * recipe.context,
        "parameters": sum(each.numel() for each in model.parameters()),
        "held_out_loss": held_out_loss(model, held_out, recipe.context),
        "bigram_loss": bigram_loss(learnt, held_out, recipe.vocabulary),
        "unigram_loss": unigram_loss(learnt, held_out, recipe.vocabulary),
        "threads": threads,
        "seconds": time.monotonic() - began,
        "processor_seconds": time.process_time() - worked,
        "torch": torch.__version__,
    }


def share_of_rate(step: int, recipe: Recipe) -> float:
    """What of the learning rate a step has: it rises, stays and falls."""
    left = (recipe.steps - step) / (recipe.cool_down * recipe.steps)
    return min(1.0, (step + 1) / recipe.warm_up, left)


def _optimizers(model: Any, recipe: Recipe) -> list[tuple[Any, float]]:
    import torch

    matrices: list[Any] = []
    others: list[Any] = []
    for name, each in model.named_parameters():
        (matrices if each.ndim == 2 and "embed" not in name else others).append(each)
    return [
        (torch.optim.Muon(matrices, lr=recipe.matrix_rate, weight_decay=0.01), recipe.matrix_rate),
        (
            torch.optim.AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.95), weight_decay=0.0),
            recipe.other_rate,
        ),
    ]


def _samples(tokens: Sequence[int], recipe: Recipe, order: random.Random) -> Any:
    """Pieces of the text in random order, cut at other places each time it is gone through."""
    while True:
        first = order.randrange(recipe.context)
        begins = list(range(first, len(tokens) - recipe.context, recipe.context))
        order.shuffle(begins)
        for begin in begins:
            yield tokens[begin : begin + recipe.context]


def held_out_loss(model: Any, tokens: Sequence[int], context: int) -> float:
    """Nats a token on text that was not learnt, in pieces of `context` tokens."""
    import torch

    losses: list[float] = []
    with torch.no_grad():
        for begin in range(0, len(tokens) - context + 1, context):
            piece = torch.tensor([tokens[begin : begin + context]])
            losses.append(model(input_ids=piece, labels=piece).loss.item())
    return sum(losses) / len(losses)


def main() -> None:
    """Trains what is missing, and says how well."""
    parser = argparse.ArgumentParser(prog="benches.trained.train", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    os.nice(10)
    for kind in args.models:
        found = trained(Recipe(kind), threads=args.threads)
        print(found.folder.name, json.dumps(found.facts, indent=1))


if __name__ == "__main__":
    main()
