"""Text into tokens, where a tokenizer is at hand. Routers that send token ids need none."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.lookup.models import Refused

Tokenize = Callable[[str], list[int]]

_NAME = re.compile(r"(\w[\w.-]{0,95}/)?\w[\w.-]{0,95}", re.ASCII)
"""What a model hub takes for a name: of an owner, if there is one, and of a model."""

_ADVICE = (
    "send token ids, or name a folder that has its tokenizer (--tokenizer MODEL=FOLDER), with "
    "transformers or tokenizers installed"
)


class Tokenizers:
    """Tokenizers by the name of their model. A tokenizer is loaded when it is first needed."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        """`sources`: name of a model → a folder, or a name that Hugging Face's cache has. Of a
        model that is not among them, the name in the pool is looked for in that cache, and
        nowhere else: whoever may write to the pool may have written it."""
        self._sources = dict(sources)
        self._loaded: dict[str, Tokenize] = {}
        self._loading = threading.Lock()

    def tokens(self, model: str, described: str, text: str) -> list[int]:
        """The text's tokens, with those that the tokenizer puts around a text. `described` is the
        model's name in the pool, from which its engines load it.

        Raises:
            Refused: no tokenizer of the model is at hand.
        """
        source = self._sources.get(model, self._sources.get(described))
        if source is None:
            source = _cached_name(described)
        if (tokenize := self._loaded.get(source)) is None:
            with self._loading:
                tokenize = self._loaded.get(source) or _load(source)
                self._loaded[source] = tokenize
        return tokenize(text)


def _cached_name(described: str) -> str:
    """The name of a model as Hugging Face's cache has it.

    >>> _cached_name("Qwen/Qwen3-8B")
    'Qwen/Qwen3-8B'
    >>> _cached_name("/models/mine")
    Traceback (most recent call last):
    penstock.lookup.models.Refused: the pool names the model '/models/mine', which is no name of a \
model hub, and a path is not opened because a pool names it: send token ids, or name a folder that \
has its tokenizer (--tokenizer MODEL=FOLDER), with transformers or tokenizers installed

    Raises:
        Refused: it is no such name, or a path here.
    """
    # The library takes a name for a path if there is one.
    if _NAME.fullmatch(described) is None or Path(described).exists():
        raise Refused(
            f"the pool names the model {described!r}, which is no name of a model hub, and a path "
            f"is not opened because a pool names it: {_ADVICE}"
        )
    return described


def _load(source: str) -> Tokenize:
    """A tokenizer, from files of this machine only. No code that lies beside them is run.

    Raises:
        Refused: neither library is installed, or the files are not here.
    """
    try:
        # vLLM takes this one, so its tokens are the engine's.
        from transformers import AutoTokenizer
    except ImportError:
        return _load_plain(source)
    try:
        # Without the second option, it asks on the terminal whether to run code.
        found: Any = AutoTokenizer.from_pretrained(
            source, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        # Files of strangers fail in many ways.
        raise Refused(
            f"the tokenizer of {source!r} cannot be loaded ({error}): {_ADVICE}"
        ) from None
    return lambda text: [int(token) for token in found.encode(text)]


def _load_plain(source: str) -> Tokenize:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise Refused(f"text needs a tokenizer, and no library is installed: {_ADVICE}") from None
    try:
        found: Any = Tokenizer.from_file(str(Path(source) / "tokenizer.json"))
    except Exception as error:
        raise Refused(
            f"the tokenizer of {source!r} cannot be loaded ({error}): {_ADVICE}"
        ) from None
    return lambda text: list(found.encode(text).ids)


def _not_loaded(source: str, error: Exception) -> Refused:
    return Refused(f"the tokenizer of {source!r} cannot be loaded ({error}): {_ADVICE}")
