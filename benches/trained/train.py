"""Trains a small model on `text`, seeded, and keeps it under target/trained.

`python -m benches.trained.train` trains both models: a Llama, and an LFM2, which has short
convolutions beside attention. Each takes some minutes of one core.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from benches.trained.recipe import KINDS, Recipe, model_of, stream, tokenizer_of
from benches.trained.text import Text

FOLDER = Path(__file__).parents[2] / "target" / "trained"
VALIDATION_TOKENS = 16_384


@dataclass(frozen=True)
class Trained:
    """A model and its tokenizer in a folder, and what is known of the training."""

    folder: Path
    facts: dict[str, Any]


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
