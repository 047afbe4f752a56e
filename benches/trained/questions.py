"""What is asked: passages of text that was not learnt, and how they go on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CHOICES = 4
PASSAGE_TOKENS = (270, 380)
"""Of a question's passage. Two blocks of 128 and a rest, which every hit computes anew."""
CONTINUATION_TOKENS = 12
OPENING = 16
"""So many first tokens are different in all prompts, so that no two of them share a block."""
OPENING_TOKENS = (140, 200)
"""Of a conversation's first turn: more than a block."""
TURN_TOKENS = (30, 60)
"""Of every later turn, beside the answers before it."""
ANSWER_TOKENS = 16


@dataclass(frozen=True)
class Question:
    """A passage, and four ways to go on: its own, and those of other passages."""

    passage: str
    choices: tuple[str, ...]
    right: int


@dataclass(frozen=True)
class Conversation:
    """What is said to the engine in turn, in tokens; its answers come between."""

    turns: tuple[tuple[int, ...], ...]


def questions(
    tokenizer: Any, documents: Sequence[str], count: int, seed: int = 3
) -> list[Question]:
    """So many questions, each with a passage that begins like no other.

    Every choice begins with a new word, so that none is cut badly.
    """
    rng = random.Random(seed)
    encoded = _encoded(tokenizer, documents, PASSAGE_TOKENS[1] + CONTINUATION_TOKENS + 1)
    found: dict[str, str] = {}
    begun: set[tuple[int, ...]] = set()
    for _ in range(100 * count):
        tokens = rng.choice(encoded)
        length = rng.randint(*PASSAGE_TOKENS)
        begin = rng.randrange(len(tokens) - length - CONTINUATION_TOKENS)
        end = begin + length
        passage = tokenizer.decode(tokens[begin:end])
        continuation = tokenizer.decode(tokens[end : end + CONTINUATION_TOKENS])
        whole = tokens[begin : end + CONTINUATION_TOKENS]
        opening = tuple(whole[:OPENING])
        if opening not in begun and _is_clean(tokenizer, passage, continuation, whole):
            begun.add(opening)
            found[passage] = continuation
        if len(found) == count:
            break
    else:
        raise ValueError(f"{len(found)} passages fit, not {count}: take fewer")
    asked = []
    for passage, continuation in found.items():
        others = sorted({each for each in found.values() if each != continuation})
        choices = [continuation, *rng.sample(others, CHOICES - 1)]
        rng.shuffle(choices)
        asked.append(Question(passage, tuple(choices), choices.index(continuation)))
    return asked


def _is_clean(tokenizer: Any, passage: str, continuation: str, tokens: Sequence[int]) -> bool:
    """Whether both halves are words of their own, which give the same tokens alone."""
    if passage[-1:].isspace() or continuation[:1] != " " or not continuation[1:2].isalpha():
        return False
    return bool(encode(tokenizer, passage) + encode(tokenizer, continuation) == list(tokens))


def encode(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, and no others."""
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens


def conversations(
    tokenizer: Any, documents: Sequence[str], count: int, turns: int, seed: int = 5
) -> list[Conversation]:
    """So many conversations. Each goes through a part of a document, and no two begin alike."""
    rng = random.Random(seed)
    longest = OPENING_TOKENS[1] + (turns - 1) * TURN_TOKENS[1]
    encoded = _encoded(tokenizer, documents, longest + 1)
    begun: set[tuple[int, ...]] = set()
    found: list[Conversation] = []
    while len(found) < count:
        tokens = rng.choice(encoded)
        at = rng.randrange(len(tokens) - longest)
        if (opening := tuple(tokens[at : at + OPENING])) in begun:
            continue
        begun.add(opening)
        said = []
        for turn in range(turns):
            length = rng.randint(*(TURN_TOKENS if turn else OPENING_TOKENS))
            said.append(tuple(tokens[at : at + length]))
            at += length
        found.append(Conversation(tuple(said)))
    return found


def _encoded(tokenizer: Any, documents: Sequence[str], shortest: int) -> list[list[int]]:
    """Documents that are long enough, in tokens."""
    every = [encode(tokenizer, document) for document in documents]
    enough = [tokens for tokens in every if len(tokens) > shortest]
    if not enough:
        raise ValueError(f"no document has {shortest} tokens")
    return enough
