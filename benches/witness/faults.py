"""Faults: models that compute wrong KV, and payloads that are wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benches.witness.statistic import Array

RANK = 8


def rewritten(folder: Path, change: Callable[[str, Any], object]) -> Path:
    """Calls `change` with the name and the tensor of each weight, and saves them."""
    from safetensors.torch import load_file, save_file

    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    for name, tensor in tensors.items():
        change(name, tensor)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def _reconfigured(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        if name not in config:
            raise NotSuitable(f"no {name}")
        config[name] = value(config[name])
    path.write_text(json.dumps(config))
    return folder


class NotSuitable(Exception):
    """The family has nothing that this fault changes."""


def _random(tensor: Any) -> Any:
    import torch

    generator = torch.Generator().manual_seed(tensor.numel())
    return torch.randn(tensor.shape, generator=generator)


def _one(folder: Path, part: str, place: float, change: Callable[[Any], object]) -> Path:
    """Changes one tensor of the layer at this place, from 0 to 1."""
    from safetensors import safe_open

    (path,) = folder.glob("*.safetensors")
    with safe_open(path, "pt") as file:
        names = [name for name in file.keys() if re.search(rf"layers\.\d+\.{part}", name)]  # noqa: SIM118
    if not names:
        raise NotSuitable(f"no {part}")
    names.sort(key=lambda name: int(re.findall(r"layers\.(\d+)\.", name)[0]))
    chosen = names[min(int(place * len(names)), len(names) - 1)]

    def only(name: str, tensor: Any) -> None:
        if name == chosen:
            change(tensor)

    return rewritten(folder, only)


def _replace(tensor: Any) -> None:
    tensor.copy_(_random(tensor) * tensor.float().std())


def _scale(factor: float) -> Callable[[Any], object]:
    return lambda tensor: tensor.mul_(factor)


def _tensor(part: str, change: Callable[[Any], object], place: float = 0.5) -> Callable[..., Path]:
    return lambda folder: _one(folder, part, place, change)


def _noise(share: float) -> Callable[[Path], Path]:
    def change(name: str, tensor: Any) -> None:
        if tensor.dim() > 1:
            spread = tensor.float().std()
            tensor.copy_(tensor.float() + share * spread * _random(tensor))

    return lambda folder: rewritten(folder, change)


def _rounded(folder: Path) -> Path:
    import torch

    def change(name: str, tensor: Any) -> None:
        if tensor.dim() == 2 and "layers." in name:
            scale = tensor.float().abs().max() / 448
            rounded = (tensor.float() / scale).to(torch.float8_e4m3fn)
            tensor.copy_(rounded.float() * scale)

    return rewritten(folder, change)


def _adapter(share: float, parts: str = r"\.(q|v)_proj\.") -> Callable[[Path], Path]:
    """A LoRA adapter merged into the weights: the norm of each change is this share of the
    tensor's."""
    import torch

    def change(name: str, tensor: Any) -> None:
        if tensor.dim() == 2 and re.search(parts, name):
            generator = torch.Generator().manual_seed(len(name) + tensor.numel())
            rows = torch.randn((tensor.shape[0], RANK), generator=generator)
            columns = torch.randn((RANK, tensor.shape[1]), generator=generator)
            delta = rows @ columns
            delta *= share * tensor.float().norm() / delta.norm()
            tensor.copy_(tensor.float() + delta)

    return lambda folder: rewritten(folder, change)


def _rope(**changes: Any) -> Callable[[Path], Path]:
    def changed(folder: Path) -> Path:
        return _reconfigured(folder, rope_parameters=lambda known: _rotary(known, changes))

    return changed


def _rotary(known: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    if "rope_type" in known:
        return known | changes
    # By kind of layer.
    return {kind: rotary | changes for kind, rotary in known.items()}


MODEL_FAULTS: dict[str, Callable[[Path], Path]] = {
    "q_proj replaced": _tensor(r".*\bq(_a)?_proj", _replace),
    "k_proj replaced": _tensor(r".*\bk_proj", _replace),
    "v_proj replaced": _tensor(r".*\bv_proj", _replace),
    "o_proj replaced": _tensor(r".*\b(o|out)_proj", _replace),
    "down_proj replaced": _tensor(r".*(down_proj|output_linear|w2)\b", _replace),
    "last v_proj replaced": _tensor(r".*\b(v_proj|kv_a_proj_with_mqa)", _replace, 1),
    "v_proj times 1.01": _tensor(r".*\b(v_proj|kv_a_proj_with_mqa)", _scale(1.01)),
    "v_proj times 1.1": _tensor(r".*\b(v_proj|kv_a_proj_with_mqa)", _scale(1.1)),
    "o_proj times 1.01": _tensor(r".*\b(o|out)_proj", _scale(1.01)),
    "o_proj times 1.1": _tensor(r".*\b(o|out)_proj", _scale(1.1)),
    "noise of 0.1 %": _noise(0.001),
    "noise of 1 %": _noise(0.01),
    "weights as e4m3": _rounded,
    "adapter of 0.3 %": _adapter(0.003),
    "adapter of 1 %": _adapter(0.01),
    "adapter of 5 %": _adapter(0.05),
    "rope theta times 10": _rope(rope_theta=100_000.0),
    "rope linear 2": _rope(rope_type="linear", factor=2.0),
    "rope yarn 4": _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048),
}
"""What is done to a copy of the model. Another seed is besides."""

OTHER_SEED = "other seed"


def payload_faults(payload: Array, layers: int, rows: int) -> dict[str, Array]:
    """Wrong forms of a payload of so many layers and rows. A row has the keys of a head and a
    token, then the values."""
    found: dict[str, Array] = {}
    middle = rows // 2

    def wrong(name: str, change: Callable[[Array], None]) -> None:
        found[name] = payload.copy()
        change(found[name])

    def one_row(name: str, change: Callable[[Array], None]) -> None:
        wrong(name, lambda each: change(each.reshape(rows, -1)[middle - 1 : middle + 1]))

    def swap(each: Array) -> None:
        both = each.reshape(-1, 2, row // 2)
        both[:] = both[:, ::-1].copy()

    def last_swapped(each: Array) -> None:
        swap(each[1])

    def last_is_first(each: Array) -> None:
        each[1] = each[0]

    def last_is_zero(each: Array) -> None:
        each[1] = 0

    def layer_twice(each: Array) -> None:
        flat = each.reshape(layers, -1)
        flat[layers // 2] = flat[layers // 2 - 1]

    def shifted(each: Array) -> None:
        cut = each.reshape(layers, rows // layers, row)
        cut[:] = np.roll(cut, 1, axis=1)

    def end_is_zero(each: Array) -> None:
        each[-len(each) // 16 :] = 0

    row = len(payload) // rows
    wrong("keys and values exchanged", swap)
    wrong("tokens shifted by one", shifted)
    wrong("a 16th of zeros", end_is_zero)
    one_row("a row's keys and values exchanged", last_swapped)
    one_row("a row twice", last_is_first)
    one_row("a row of zeros", last_is_zero)
    if layers > 1:
        wrong("a layer twice", layer_twice)
        for name, one in (("first", 0), ("last", layers - 2)):
            order = np.arange(layers)
            order[[one, one + 1]] = one + 1, one
            found[f"{name} layers exchanged"] = payload.reshape(layers, -1)[order].reshape(-1)
    return found


def flipped(payload: Array, width: int, bit: int, place: int) -> Array:
    """A copy of a payload with one bit of an element flipped. Bit 0 is the lowest."""
    wrong = payload.copy()
    wrong[place * width + bit // 8] ^= 1 << (bit % 8)
    return wrong
