"""A model's identity: its configuration, its weights, and the files that turn images into numbers.

It goes into the namespace, so that engines share only equal KV.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock._native import FileDigests
from penstock.programs import cache_folder

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")

_VOLATILE = ("_name_or_path", "transformers_version", "_commit_hash", "_attn_implementation")
"""Keys of a Hugging Face configuration that do not change the model's computation."""

_READ_BY_NO_MODEL = (
    *("/config.json", "/generation_config.json", "*.index.json", "chat_template*", ".*"),
    *("*.md", "*.pdf", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.webp", "*.mp4"),
    *("LICENSE*", "NOTICE*", "USE_POLICY*"),
    # The same weights once more, for other programs, and what training leaves.
    *("*.onnx*", "*.gguf", "*.h5", "*.msgpack", "original", "metal", "np"),
    *("checkpoint-*", "global_step*", "optimizer*", "scheduler.pt", "rng_state*", "runs", "*.log"),
    *("trainer_state.json", "training_args.*", "*tfevents*", "lost+found", "configuration.json"),
    "__pycache__",
    # The weights themselves.
    *("/*.safetensors", "/*.bin", "/*.pth"),
)
"""Files and folders of a model's folder that change nothing that the model computes, or that other
facts tell of. With a slash, those in the folder itself alone."""

_MOST_THREADS = 8


def config_digest(config: dict[str, Any]) -> str:
    """SHA-256 of the content of a Hugging Face configuration, volatile parts left out."""
    content = _without_volatile(config)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _without_volatile(content: Any) -> Any:
    if isinstance(content, dict):
        return {k: _without_volatile(v) for k, v in content.items() if k not in _VOLATILE}
    if isinstance(content, (list, tuple)):
        return [_without_volatile(item) for item in content]
    return content


def digest_threads() -> int:
    """Threads that digest weights: as many as this process may use, but not many."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def _cache() -> Path | None:
    """Where digests are kept; None for a user without a home."""
    try:
        return cache_folder() / "digests"
    except RuntimeError:
        return None


class WeightFiles:
    """Files of weights, digested whole by native threads beside other work.

    Files that did not change since they were last digested on this machine are not read again.
    Their digests lie in the folder of Penstock's cache.
    """

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self._paths = sorted(Path(path) for path in set(paths))
        self._digests = FileDigests(self._paths, threads=digest_threads(), cache=_cache())

    @property
    def paths(self) -> Sequence[Path]:
        """The files, in order."""
        return self._paths

    @property
    def progress(self) -> tuple[int, int, int]:
        """Bytes of all files, bytes that are digested or were known, and bytes that were read."""
        return self._digests.progress

    def digest(self) -> str:
        """Waits for the digest of what is in all files, in the order of their names.

        Raises:
            IoError: a file cannot be read.
            ConfigError: a file was changed while it was read.
        """
        found = self._digests.wait()
        assert found is not None
        whole = hashlib.sha256()
        for content in found:
            whole.update(content)
        return whole.hexdigest()


def weights_digest(folder: Path, *, all_formats: bool = False) -> str | None:
    """A digest of all weights in a model's folder, of every byte; None if it has no weights.

    If there are safetensors files, they are the weights: others are taken for the same in another
    form. With `all_formats`, files of every format count, for whoever does not know which are read.

    Raises:
        IoError: a file cannot be read.
        ConfigError: a file was changed while it was read.
    """
    files = [p for p in folder.iterdir() if p.suffix in _WEIGHT_SUFFIXES and p.is_file()]
    if not all_formats and any(p.suffix == ".safetensors" for p in files):
        files = [p for p in files if p.suffix == ".safetensors"]
    return WeightFiles(files).digest() if files else None


def files_beside_weights(folder: Path) -> dict[str, str]:
    """Name → digest of the files in a model's folder but its weights, and but a list: what turns
    images and sounds into numbers, and weights that a model reads on its own.

    Raises:
        IoError: a file cannot be read.
        ConfigError: a file was changed while it was read.
    """
    files = {
        "/".join(path.relative_to(folder).parts): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return file_digests({n: path for n, path in files.items() if not _is_read_by_no_model(n)})


def _is_read_by_no_model(name: str) -> bool:
    parts = name.split("/")
    # A name in the folder itself fits patterns with a slash too.
    names = [*parts, f"/{name}"] if len(parts) == 1 else parts
    return any(fnmatch.fnmatchcase(n, pattern) for n in names for pattern in _READ_BY_NO_MODEL)


def file_digests(files: Mapping[str, Path]) -> dict[str, str]:
    """Name → digest of what is in the file, for small files.

    Raises:
        IoError: a file cannot be read.
        ConfigError: a file was changed while it was read.
    """
    found = FileDigests(list(files.values()), threads=1, cache=_cache()).wait()
    assert found is not None
    return {name: content.hex() for name, content in zip(files, found, strict=True)}


def model_folder(model: str, revision: str | None) -> Path | None:
    """The folder of a model: `model` itself, or where the Hugging Face hub's client has put it.

    None if it is not on this machine.
    """
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (ImportError, OSError, ValueError):
        return None


def weights_identity(model: str, revision: str | None, *, all_formats: bool = False) -> str | None:
    """The text that stands for a model's weights in the namespace. None if they are not in files
    that can be read here.

    Raises:
        IoError: a file cannot be read.
        ConfigError: a file was changed while it was read.
    """
    folder = model_folder(model, revision)
    digest = weights_digest(folder, all_formats=all_formats) if folder is not None else None
    return None if digest is None else f"files:{digest}"
