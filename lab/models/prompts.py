"""Prompts of random tokens: nobody has seen them, and each seed gives its own."""

from __future__ import annotations

import random

from lab.models.saved import VOCABULARY


def tokens(count: int, seed: int | str) -> list[int]:
    """Random tokens, the same for the same seed. All models of the laboratory know them."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]
