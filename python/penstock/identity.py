"""A model's identity: its configuration and its weights.

It goes into the namespace, so that engines share only equal KV.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.safetensors import read_header

SAMPLE_BYTES = 4096
"""Bytes read at the start, the middle and the end of every tensor."""

_FILE_SAMPLES = 64
"""Places to read in a weight file of a format whose tensors cannot be told apart."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")

_VOLATILE = ("_name_or_path", "transformers_version", "_commit_hash", "_attn_implementation")
"""Keys of a Hugging Face configuration that do not change the model's computation."""


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


def weights_digest(folder: Path) -> str | None:
    """SHA-256 over samples of all weights in a model folder; None if the folder has no weights.

    For each tensor this reads its name, type, shape and three pieces of :data:`SAMPLE_BYTES`. So
    the cost is a few reads per tensor, whatever the size of the model. Training changes nearly
    every element of a tensor that it touches. But two revisions that agree in every sampled piece
    and differ elsewhere have the same digest. Give such revisions different values of the setting
    ``model_id``.

    Raises:
        ConfigError: a file that is named safetensors is not one.
    """
    files = sorted(p for p in folder.iterdir() if p.suffix in _WEIGHT_SUFFIXES and p.is_file())
    if any(p.suffix == ".safetensors" for p in files):
        files = [p for p in files if p.suffix == ".safetensors"]
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb", buffering=0) as file:
            if path.suffix == ".safetensors":
                places = _tensor_places(path, digest)
            else:
                places = iter(size * i // _FILE_SAMPLES for i in range(_FILE_SAMPLES))
            for place in places:
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, place))
    return digest.hexdigest()


def _tensor_places(path: Path, digest: Any) -> Iterator[int]:
    """Offsets to sample in a safetensors file. Also adds the header's facts about each tensor to
    the digest."""
    header = read_header(path)
    said = {
        name: {"data_offsets": [each.begin, each.end], "dtype": each.dtype, "shape": each.shape}
        for name, each in header.tensors.items()
    }
    digest.update(json.dumps(said, sort_keys=True).encode())
    for begin, end in sorted((each.begin, each.end) for each in header.tensors.values()):
        for place in (begin, (begin + end) // 2, max(begin, end - SAMPLE_BYTES)):
            yield header.data + place


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


def weights_identity(model: str, revision: str | None) -> str | None:
    """The text that stands for a model's weights in the namespace. None if they are not in files
    that can be read here.

    Raises:
        ConfigError: a file that is named safetensors is not one.
    """
    folder = model_folder(model, revision)
    digest = weights_digest(folder) if folder is not None else None
    return None if digest is None else f"sha256:{digest}"
