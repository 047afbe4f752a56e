"""Do answers stay what they are when the KV of their prompts comes from the pool?

On small models that have learnt a text (`benches/trained`). Each engine answers the same prompts
cold, from vLLM's own prefix cache, and from the pool: questions that lm-eval puts, and
conversations of several turns. Run it as ``python -m benches.accuracy``, after
``benches/setup_accuracy.sh``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches import report
from benches.report import progress
from benches.trained import harness, text
from benches.trained.conditions import (
    COLD,
    FORCED,
    LOADED,
    OWN,
    Cold,
    Condition,
    Loaded,
    Own,
    Request,
    settle,
)
from benches.trained.harness import Score
from benches.trained.questions import (
    ANSWER_TOKENS,
    Conversation,
    Question,
    conversations,
    questions,
)
from benches.trained.train import KINDS, Recipe, Trained, trained
from lab.engines.forks import Fork
from lab.engines.node import Answer, Node, StartError

DTYPES: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8_e4m3": {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"},
}
"""Options of engines, by the KV's data type."""
LAYOUTS = ("LBHNC", "BLHNC")
BLOCK = 128
"""Tokens of a block. Unless told, vLLM on CPUs cuts prompts of hybrid models elsewhere."""
ENGINE: dict[str, Any] = {
    "block_size": BLOCK,
    "max_model_len": 1024,
    # Room for all prompts of a condition: an own hit has to come from the own cache.
    "kv_cache_memory_bytes": 512 << 20,
    # vLLM's CPU kernel rotates the wrong heads of an LFM2's queries and keys, which have a
    # dimension for heads: what it computes depends on how many tokens a step has.
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    "launch": Fork,
    **FORCED,
}


@dataclass(frozen=True)
class Asked:
    """What every engine of a model is asked."""

    tokenizer: Any
    questions: list[Question]
    conversations: list[Conversation]
    together: int
    """Requests that the engine has at a time."""


@dataclass(frozen=True)
class Turn:
    """A turn of a conversation: all that was said before it, too, and the answer."""

    prompt: tuple[int, ...]
    answer: Answer


@dataclass(frozen=True)
class Outcome:
    """What an engine answered under a condition."""

    score: Score
    turns: list[Turn]
    seconds: float


def talk(condition: Condition, asked: Asked) -> list[Turn]:
    """Leads conversations: what the engine answers is part of the next prompt."""
    turns: list[Turn] = []
    for begin in range(0, len(asked.conversations), asked.together):
        group = asked.conversations[begin : begin + asked.together]
        prompts: list[tuple[int, ...]] = [()] * len(group)
        for said in zip(*(each.turns for each in group), strict=True):
            prompts = [before + new for before, new in zip(prompts, said, strict=True)]
            answered = _answer(condition, prompts)
            prompts = [turn.prompt + turn.answer.tokens for turn in answered]
            turns += answered
    return turns


def repeat(condition: Condition, turns: Sequence[Turn], together: int) -> list[Turn]:
    """Asks what was asked in another condition, whatever this one answers."""
    answered: list[Turn] = []
    for begin in range(0, len(turns), together):
        answered += _answer(condition, [turn.prompt for turn in turns[begin : begin + together]])
    return answered


def _answer(condition: Condition, prompts: Sequence[tuple[int, ...]]) -> list[Turn]:
    answers = condition.ask([Request(prompt, ANSWER_TOKENS) for prompt in prompts])
    return [Turn(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def outcome(condition: Condition, asked: Asked, turns: Sequence[Turn] | None) -> Outcome:
    """Has lm-eval ask, then leads conversations, or repeats those that were led."""
    began = time.monotonic()
    score = harness.evaluate(condition, asked.tokenizer, asked.questions, asked.together)
    answered = talk(condition, asked) if turns is None else repeat(condition, turns, asked.together)
    seconds = time.monotonic() - began
    progress(f"  {condition.name}: {score.accuracy:.3f}, {seconds:.0f} s")
    return Outcome(score, answered, seconds)


def pooled(
    model: Trained, dtype: str, layout: str, asked: Asked, folder: Path
) -> tuple[dict[str, Outcome], dict[str, Any]]:
    """One engine has own hits, and stores; it never loads. Another has the same from the pool."""
    name = f"{model.facts['recipe']['kind']}-{dtype}-{layout}"
    # On a busy machine, too, a prompt of a pool comes from the pool.
    patience = {"penstock.lookup_timeout": 20.0, "penstock.load_timeout": 30.0}
    options = ENGINE | {
        "pool": f"file://{folder}/{name}?size=4GiB",
        "settings": {"penstock.kv_layout": layout, **patience},
        **DTYPES[dtype],
    }
    with Node(model.folder, folder / f"{name}-own.log", role="kv_producer", **options) as node:
        assert f"KV layout {layout}" in node.log.read_text()
        own = Own(node)
        found = {OWN: outcome(own, asked, None)}
        assert own.loaded() == 0, "an own hit came from the pool"
        settle(node)
    with Node(model.folder, folder / f"{name}-loaded.log", role="kv_consumer", **options) as node:
        assert f"KV layout {layout}" in node.log.read_text()
        loaded = Loaded(node)
        found[LOADED] = outcome(loaded, asked, found[OWN].turns)
        counters = node.counters()
        return found, {
            "loaded_tokens": loaded.loaded(),
            "loaded_bytes": int(counters.get("loaded_bytes", 0)),
            "load_failed_blocks": int(counters.get("load_failed_blocks", 0)),
        }


def cold(model: Trained, dtype: str, asked: Asked, turns: Sequence[Turn], folder: Path) -> Outcome:
    """vLLM alone, which computes every prompt."""
    log = folder / f"{model.facts['recipe']['kind']}-{dtype}-cold.log"
    with Node(model.folder, log, enable_prefix_caching=False, **DTYPES[dtype], **ENGINE) as node:
        return outcome(Cold(node), asked, turns)


def compare(found: Outcome, reference: Outcome) -> dict[str, Any]:
    """How much of what an engine answered is not what it answered in another condition."""
    pairs = list(zip(found.turns, reference.turns, strict=True))
    assert all(one.prompt == other.prompt for one, other in pairs)
    scored = list(zip(found.score.answers, reference.score.answers, strict=True))
    apart = [
        abs(one - other)
        for a, b in scored
        for one, other in zip(a.logprobs, b.logprobs, strict=True)
    ]
    return {
        "answers": len(pairs),
        "answers_differ": sum(a.answer.tokens != b.answer.tokens for a, b in pairs),
        "answers_differ_in_a_bit": sum(a.answer.text != b.answer.text for a, b in pairs),
        "cached_differ": sum(a.answer.cached != b.answer.cached for a, b in pairs)
        + sum(a.cached != b.cached for a, b in scored),
        "scored": len(scored),
        "scored_differ_in_a_bit": sum(a.logprobs != b.logprobs for a, b in scored),
        "largest_difference": max(apart),
    }


def figures(found: Outcome) -> dict[str, Any]:
    """A condition's own figures. Losses are in nats a token."""
    said = [-logprob for turn in found.turns for logprob in turn.answer.logprobs]
    loss = sum(found.score.losses) / len(found.score.losses)
    return {
        "score": found.score.accuracy,
        "stderr": found.score.stderr,
        "loss": loss,
        "perplexity": math.exp(loss),
        "loss_of_answers": sum(said) / len(said),
        "tokens_scored": len(found.score.losses),
        "tokens_cached": sum(turn.answer.cached for turn in found.turns)
        + sum(answer.cached for answer in found.score.answers),
        "seconds": found.seconds,
    }


def measure(model: Trained, asked: Asked, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A model in every dtype and layout."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        for dtype in args.dtypes:
            computed: Outcome | None = None
            for layout in args.layouts:
                row = {"model": model.facts["recipe"]["kind"], "dtype": dtype, "layout": layout}
                progress(" ".join(row.values()))
                try:
                    found, loads = pooled(model, dtype, layout, asked, Path(name))
                except StartError as error:
                    rows.append(row | {"failure": report.cause(str(error))})
                    progress(f"  {rows[-1]['failure']}")
                    continue
                led = found[OWN].turns
                if computed is None or [each.prompt for each in computed.turns] != [
                    each.prompt for each in led
                ]:
                    computed = cold(model, dtype, asked, led, Path(name))
                found[COLD] = computed
                rows.append(
                    row
                    | loads
                    | {
                        "conditions": {each: figures(found[each]) for each in (COLD, OWN, LOADED)},
                        "loaded_against_own_hit": compare(found[LOADED], found[OWN]),
                        "own_hit_against_cold": compare(found[OWN], found[COLD]),
                        "lm_eval": found[OWN].score.version,
                        "said": said(asked, led),
                    }
                )
    return rows


def said(asked: Asked, turns: Sequence[Turn], count: int = 2) -> list[dict[str, str]]:
    """Some answers as text, with the end of what they answer."""
    return [
        {
            "prompt": asked.tokenizer.decode(turn.prompt[-40:]),
            "answer": asked.tokenizer.decode(turn.answer.tokens),
        }
        for turn in itertools.islice(turns, 0, None, max(1, len(turns) // count))
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each engine with a pool."""
    lines = []
    for row in rows:
        head = [row["model"], row["dtype"], row["layout"]]
        if "failure" in row:
            lines.append([*head, row["failure"], *[""] * 6])
            continue
        found = row["conditions"]
        hits, colds = row["loaded_against_own_hit"], row["own_hit_against_cold"]
        lines.append(
            [
                *head,
                *(
                    " / ".join(f"{found[each][key]:.{digits}f}" for each in (COLD, OWN, LOADED))
                    for key, digits in (("score", 3), ("loss", 4), ("loss_of_answers", 4))
                ),
                f"{hits['answers_differ']} of {hits['answers']}",
                f"{hits['answers_differ_in_a_bit'] + hits['scored_differ_in_a_bit']}",
                f"{colds['answers_differ']} of {colds['answers']}",
                f"{row['loaded_tokens']:,} of {found[LOADED]['tokens_cached']:,}",
            ]
        )
    return report.table(
        [
            "model",
            "dtype",
            "layout",
            "score: cold / own hit / loaded",
            "loss",
            "loss of answers",
            "answers: loaded, own hit differ",
            "in a bit",
            "answers: own hit, cold differ",
            "tokens cached: from the pool",
        ],
        lines,
    )


def main() -> None:
    """Trains what is missing, measures, prints tables and writes the result."""
    parser = argparse.ArgumentParser(prog="benches.accuracy", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--questions", type=int, default=75)
    parser.add_argument("--conversations", type=int, default=125)
    parser.add_argument("--turns", type=int, default=4, help="answers of a conversation")
    parser.add_argument("--together", type=int, default=25, help="requests at a time")
    parser.add_argument("--threads", type=int, default=1, help="of the training, where it is due")
    args = report.begin(parser)
    source = text.read()
    rows: list[dict[str, Any]] = []
    models = {}
    for kind in args.models:
        from transformers import AutoTokenizer

        model = trained(Recipe(kind), source, args.threads)
        models[kind] = model.facts
        tokenizer = AutoTokenizer.from_pretrained(model.folder)
        asked = Asked(
            tokenizer,
            questions(tokenizer, source.held_out, args.questions),
            conversations(tokenizer, source.held_out, args.conversations, args.turns),
            args.together,
        )
        rows += measure(model, asked, args)
    settings = {
        "questions": args.questions,
        "conversations": args.conversations,
        "turns": args.turns,
        "together": args.together,
        "answer_tokens": ANSWER_TOKENS,
    }
    report.finish(args, table(rows), {**settings, "models": models, "rows": rows})


if __name__ == "__main__":
    main()
