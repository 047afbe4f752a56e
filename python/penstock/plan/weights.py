"""The bytes of a model's weights, layer by layer, from the headers of its safetensors files."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

from penstock.errors import ConfigError
from penstock.plan.model import Model
from penstock.safetensors import Tensor, read_header

INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
_ENCODERS = ("vision", "visual", "audio", "image", "encoder", "multi_modal", "mm_proj")
_FLOATS = {"F64", "F32", "F16", "BF16"}
_EMBEDDINGS = ("embed_tokens.", "wte.", "word_embeddings.", "tok_embeddings.")
_HEADS = ("lm_head.", "output.weight", "embed_out.")


def weigh(model: Model, folder: Path) -> Model:
    """The model with the weights' bytes from its files; the same model if the folder has no files.

    If there is an index but some of its files are missing, the index's total is spread over the
    layers in proportion to the estimates.

    Raises:
        ConfigError: a file or the index is damaged, or the files lack weights.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX
    if index.exists():
        total, named = _read_index(index)
        files = [folder / name for name in sorted(named)]
        if not all(file.exists() for file in files):
            return _scaled(model, total)
    if not files:
        return model
    layers = [0] * len(model.layers)
    embedding = head = front = 0
    for file in files:
        for name, tensor in read_header(file).tensors.items():
            nbytes = _loaded_bytes(tensor, model.element_bytes)
            if any(mark in name for mark in _ENCODERS):
                front += nbytes
            elif found := _LAYER.search(name):
                # Layers after the last one are for predicting several tokens at once. vLLM leaves
                # them out.
                if (layer := int(found[1])) < len(layers):
                    layers[layer] += nbytes
            elif any(mark in name for mark in _EMBEDDINGS):
                embedding += nbytes
            elif any(mark in name for mark in _HEADS):
                head += nbytes
    if not all(layers) or not embedding:
        raise ConfigError(
            f"{folder}: its safetensors files lack weights of layer "
            f"{layers.index(0) if 0 in layers else 'embeddings'}; is the download complete?"
        )
    return replace(
        model,
        layers=tuple(
            replace(layer, weight_bytes=nbytes)
            for layer, nbytes in zip(model.layers, layers, strict=True)
        ),
        embedding_bytes=embedding,
        front_bytes=front,
        head_bytes=0 if model.tied else head,
        weights_from=f"{len(files)} safetensors file{'s' if len(files) > 1 else ''}",
    )


def _scaled(model: Model, total: int) -> Model:
    estimated = model.weight_bytes(0, len(model.layers))
    factor = total / estimated
    return replace(
        model,
        layers=tuple(
            replace(layer, weight_bytes=int(layer.weight_bytes * factor)) for layer in model.layers
        ),
        embedding_bytes=int(model.embedding_bytes * factor),
        head_bytes=int(model.head_bytes * factor),
        weights_from="the index's total, spread over the layers as estimated",
    )


def _read_index(path: Path) -> tuple[int, set[str]]:
    try:
        index = json.loads(path.read_text())
        total, names = index["metadata"]["total_size"], set(index["weight_map"].values())
        if not isinstance(total, int) or total <= 0 or not names:
            raise ValueError("no total_size, or no files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not an index of safetensors files: {error!r}") from None
    if any("/" in name or name.startswith(".") for name in names):
        raise ConfigError(f"{path}: names a file outside its folder")
    return total, names


def _loaded_bytes(tensor: Tensor, element_bytes: int) -> int:
    """Bytes that a tensor takes once it is loaded. Floating-point tensors are loaded in the type
    that the model computes in, quantized tensors as they are."""
    if tensor.dtype in _FLOATS:
        return math.prod(tensor.shape) * element_bytes
    return tensor.end - tensor.begin
