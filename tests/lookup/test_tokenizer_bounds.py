"""What text may have the service load: so many tokenizers, so large, and so often."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.lookup import tokenizing
from penstock.lookup.models import Refused
from penstock.lookup.tokenizing import MOST_BYTES, MOST_LOADED, Tokenize, Tokenizers


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that are loaded; those with `bad` in their names cannot be."""
    loaded: list[str] = []

    def load(source: str) -> Tokenize:
        loaded.append(source)
        if "bad" in source:
            raise Refused(f"{source} cannot be loaded")
        return lambda text: [len(text)]

    monkeypatch.setattr(tokenizing, "_load", load)
    return loaded


def test_those_used_last_stay_loaded(loads: list[str]) -> None:
    tokenizers = Tokenizers({})
    names = [f"nowhere/{number}" for number in range(MOST_LOADED)]
    for name in (*names, names[0], "nowhere/more", names[0]):
        assert tokenizers.tokens(name, name, "text") == [4]
    assert loads == [*names, "nowhere/more"]
    # The second made room for the one more.
    tokenizers.tokens(names[1], names[1], "text")
    assert loads[-1] == names[1]


def test_what_cannot_be_loaded_is_not_tried_with_every_question(loads: list[str]) -> None:
    now = 0.0
    tokenizers = Tokenizers({}, lambda: now)
    for now in (0.0, 1.0, 59.0):  # noqa: B007, the clock reads it
        with pytest.raises(Refused, match="nowhere/bad cannot be loaded"):
            tokenizers.tokens("nowhere/bad", "nowhere/bad", "text")
    assert len(loads) == 1
    now = 60.0
    with pytest.raises(Refused):
        tokenizers.tokens("nowhere/bad", "nowhere/bad", "text")
    assert len(loads) == 2


def test_refusals_take_bounded_memory(loads: list[str]) -> None:
    tokenizers = Tokenizers({})
    for number in range(500):
        with pytest.raises(Refused):
            tokenizers.tokens("x", f"nowhere/bad{number}", "text")
    assert len(tokenizers._refused) == tokenizing._MOST_REFUSED


def test_files_larger_than_any_tokenizers_are_not_read(loads: list[str], tmp_path: Path) -> None:
    large, weights = tmp_path / "large", tmp_path / "weights"
    for folder, name in ((large, "tokenizer.json"), (weights, "model.safetensors")):
        folder.mkdir()
        with (folder / name).open("wb") as file:
            file.truncate(MOST_BYTES + 1)
    tokenizers = Tokenizers({"model": str(large), "other": str(weights)})
    with pytest.raises(Refused, match=r"256 MiB, more than 256.*--tokenizer"):
        tokenizers.tokens("model", "model", "text")
    assert loads == []
    assert tokenizers.tokens("other", "other", "text") == [4]
