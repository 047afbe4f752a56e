"""Prompts are hashed as vLLM hashes them, without vLLM."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.pretended import NONE_HASH, hashes
from penstock._native import PrefixHasher
from penstock.errors import ConfigError

TOKENS = st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 300) | st.integers(65_000, 66_000))
# A text of one letter may be one object in Python, which pickle writes once.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=2, max_size=400)


@given(TOKENS, st.integers(1, 20), st.none() | TEXT, st.none() | st.tuples(TEXT, TEXT, TEXT))
def test_as_pickle_and_sha256(
    tokens: list[int], block: int, salt: str | None, lora: tuple[str, str, str] | None
) -> None:
    prefix = PrefixHasher("sha256", NONE_HASH, block).prefix(
        tokens, lora=lora or (), cache_salt=salt
    )
    assert prefix.hashes == hashes(tokens, block, salt=salt, lora=lora)
    assert prefix.tokens == len(tokens)


def test_no_salt_and_an_empty_one_are_the_same() -> None:
    hasher = PrefixHasher("sha256", NONE_HASH, 2)
    assert hasher.prefix([1, 2], cache_salt="").hashes == hasher.prefix([1, 2]).hashes


@pytest.mark.parametrize("prompt", [[1, -1], [1, 2**31], [1, 2**70], [1, 2.0], [True], ["1"]])
def test_what_is_no_token_is_refused(prompt: list[int]) -> None:
    with pytest.raises(ConfigError, match="token"):
        PrefixHasher("sha256", NONE_HASH, 2).prefix(prompt)


def test_an_unknown_algorithm_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r'"blake".*sha256_cbor'):
        PrefixHasher("blake", NONE_HASH, 2)
