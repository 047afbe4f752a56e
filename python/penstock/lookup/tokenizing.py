"""Text into tokens, where a tokenizer is at hand. Routers that send token ids need none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.lookup.models import Refused

Tokenize = Callable[[str], list[int]]


class Tokenizers:
    """Tokenizers by the name of their model. A tokenizer is loaded when it is first needed."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        """`sources`: name of a model → a folder, or a name that Hugging Face's cache has. A model
        that is not among them is its own source."""
        self._sources = dict(sources)
        self._loaded: dict[str, Tokenize] = {}
        self._loading = threading.Lock()

    def tokens(self, model: str, described: str, text: str) -> list[int]:
        """The text's tokens, with those that the tokenizer puts around a text. `described` is the
        model's name in the pool, from which its engines load it.

        Raises:
            Refused: no tokenizer of the model is at hand.
        """
        source = self._sources.get(model, self._sources.get(described, described))
        if (tokenize := self._loaded.get(source)) is None:
            with self._loading:
                tokenize = self._loaded.get(source) or _load(source)
                self._loaded[source] = tokenize
        return tokenize(text)


def _load(source: str) -> Tokenize:
    """A tokenizer, from files of this machine only.

    Raises:
        Refused: neither library is installed, or the files are not here.
    """
    advice = (
        "send token ids, or name a folder that has its tokenizer (--tokenizer MODEL=FOLDER), with "
        "transformers or tokenizers installed"
    )
    try:
        # vLLM takes this one, so its tokens are the engine's.
        from transformers import AutoTokenizer
    except ImportError:
        return _load_plain(source, advice)
    try:
        found: Any = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except Exception as error:
        # Files of strangers fail in many ways.
        raise Refused(f"the tokenizer of {source!r} cannot be loaded ({error}): {advice}") from None
    return lambda text: [int(token) for token in found.encode(text)]


def _load_plain(source: str, advice: str) -> Tokenize:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise Refused(f"text needs a tokenizer, and no library is installed: {advice}") from None
    try:
        found: Any = Tokenizer.from_file(str(Path(source) / "tokenizer.json"))
    except Exception as error:
        raise Refused(f"the tokenizer of {source!r} cannot be loaded ({error}): {advice}") from None
    return lambda text: list(found.encode(text).ids)
