"""Text into tokens, where a tokenizer is at hand. Routers that send token ids need none.

Which tokenizer a question needs, its asker and the pool's descriptions say. So what that may load
is bounded: in size, in number, and in how often it is tried.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import OrderedDict
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

MOST_LOADED = 8
"""Tokenizers in memory. The one that was used longest ago makes room."""
MOST_BYTES = 256 << 20
"""The most bytes of one tokenizer's files. The largest in use have some tens of MiB."""
_AGAIN_SECONDS = 60.0
"""Seconds after which a tokenizer that could not be loaded is tried again."""
_MOST_REFUSED = 64
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx")


class Tokenizers:
    """Tokenizers by the name of their model. A tokenizer is loaded when it is first needed."""

    def __init__(
        self, sources: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`sources`: name of a model → a folder, or a name that Hugging Face's cache has. Of a
        model that is not among them, the name in the pool is looked for in that cache, and
        nowhere else: whoever may write to the pool may have written it."""
        self._sources = dict(sources)
        self._clock = clock
        self._loaded: OrderedDict[str, Tokenize] = OrderedDict()
        """Source → tokenizer, the one that was used last at the end."""
        self._refused: OrderedDict[str, tuple[float, str]] = OrderedDict()
        """Source → until when it is not tried again, and why."""
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
        # Nobody who has a tokenizer waits while another is loaded.
        if (tokenize := self._used(source)) is None:
            with self._loading:
                tokenize = self._used(source) or self._new(source)
        return tokenize(text)

    def _used(self, source: str) -> Tokenize | None:
        with contextlib.suppress(KeyError):
            # One step, which no other thread sees half done; it may be gone right after.
            self._loaded.move_to_end(source)
        return self._loaded.get(source)

    def _new(self, source: str) -> Tokenize:
        until, why = self._refused.pop(source, (0.0, ""))
        now = self._clock()
        if now >= until:
            try:
                _check_size(source)
                tokenize = self._loaded[source] = _load(source)
            except Refused as error:
                until, why = now + _AGAIN_SECONDS, str(error)
            else:
                if len(self._loaded) > MOST_LOADED:
                    self._loaded.popitem(last=False)
                return tokenize
        self._refused[source] = until, why
        if len(self._refused) > _MOST_REFUSED:
            self._refused.popitem(last=False)
        raise Refused(why)


def _check_size(source: str) -> None:
    """Raises:
    Refused: the files beside a tokenizer are larger than any tokenizer's.
    """
    folder = Path(source)
    try:
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(source, local_files_only=True))
        sizes = [
            each.stat().st_size
            for each in folder.iterdir()
            if each.is_file() and each.suffix not in _WEIGHTS
        ]
    except Exception:
        # It is not here, or cannot be read: loading it says so.
        return
    if sum(sizes) > MOST_BYTES:
        raise Refused(
            f"the tokenizer of {source!r} is not loaded: its files have {sum(sizes) >> 20} MiB, "
            f"more than {MOST_BYTES >> 20}: send token ids, or name a folder that has the "
            "tokenizer alone (--tokenizer MODEL=FOLDER)"
        )


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
        raise _not_loaded(source, error) from None
    return lambda text: [int(token) for token in found.encode(text)]


def _load_plain(source: str) -> Tokenize:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise Refused(f"text needs a tokenizer, and no library is installed: {_ADVICE}") from None
    try:
        found: Any = Tokenizer.from_file(str(Path(source) / "tokenizer.json"))
    except Exception as error:
        raise _not_loaded(source, error) from None
    return lambda text: list(found.encode(text).ids)


def _not_loaded(source: str, error: Exception) -> Refused:
    return Refused(f"the tokenizer of {source!r} cannot be loaded ({error}): {_ADVICE}")
