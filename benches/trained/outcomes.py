"""What an engine answers to questions and conversations under a condition, and how far answers
differ."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benches.shared.report import progress
from benches.shared.rows import groups
from benches.trained import harness
from benches.trained.conditions import Condition, Request
from benches.trained.harness import Score
from benches.trained.questions import ANSWER_TOKENS, Conversation, Question
from lab.engines.node import Answer


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
    for group in groups(asked.conversations, asked.together):
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
    for group in groups(turns, together):
        answered += _answer(condition, [turn.prompt for turn in group])
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


def said(asked: Asked, turns: Sequence[Turn], count: int = 2) -> list[dict[str, str]]:
    """Some answers as text, with the end of what they answer."""
    return [
        {
            "prompt": asked.tokenizer.decode(turn.prompt[-40:]),
            "answer": asked.tokenizer.decode(turn.answer.tokens),
        }
        for turn in itertools.islice(turns, 0, None, max(1, len(turns) // count))
    ]
