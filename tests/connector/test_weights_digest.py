"""What stands for a model's weights in the namespace."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.identity import SAMPLE_BYTES, weights_digest

FLOATS = 3 * SAMPLE_BYTES
BYTES = 4 * FLOATS


def write(folder: Path, data: bytes, shape: tuple[int, ...] = (FLOATS,), **metadata: str) -> None:
    half = len(data) // 2
    header = {
        "__metadata__": metadata,
        "b": {"dtype": "F32", "shape": shape, "data_offsets": [half, len(data)]},
        "a": {"dtype": "F16", "shape": [half // 2], "data_offsets": [0, half]},
    }
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_it_stays_what_it_was(tmp_path: Path) -> None:
    # Pools name their objects by it: another one would leave all that they hold unfound.
    write(tmp_path, bytes(range(256)) * (2 * BYTES // 256))
    expected = "3b16c7528ea9daa141fb705e20464d0b4ca4dec25b469882a28554366e0f6135"
    assert weights_digest(tmp_path) == expected


def test_weights_shapes_and_names_of_files_tell_models_apart(tmp_path: Path) -> None:
    data = bytes(2 * BYTES)
    write(tmp_path, data)
    found = {weights_digest(tmp_path)}
    for place in (0, BYTES // 2 + 1, BYTES - 1, BYTES, 2 * BYTES - 1):
        write(tmp_path, data[:place] + b"x" + data[place + 1 :])
        found.add(weights_digest(tmp_path))
    write(tmp_path, data, (3, SAMPLE_BYTES))
    found.add(weights_digest(tmp_path))
    assert len(found) == 7
    write(tmp_path, data)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not looked at beside safetensors")
    assert weights_digest(tmp_path) in found


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    assert weights_digest(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, struct.pack("<Q", 99) + b"{}"])
def test_a_damaged_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors: not a safetensors file"):
        weights_digest(tmp_path)
