"""How models are saved, and what they have in common: greedy output that varies."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 512
"""Tokens that a model knows."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    # With the usual 0.02 greedy output is one token repeated, which proves nothing.
    "initializer_range": 0.12,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}


def save(folder: Path, kind: Any, config: Any, seed: int, dtype: str) -> Path:
    """A model of this kind with random weights, in a folder."""
    import torch

    torch.manual_seed(seed)
    model = kind(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    return folder


def changed(folder: Path, model: Path, name: str, change: Callable[[Any], object]) -> Path:
    """A copy of a model, but for one tensor, which `change` is called with."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder, dirs_exist_ok=True)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})
    return folder
