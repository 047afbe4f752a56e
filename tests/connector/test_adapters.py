"""What tells one content of a LoRA adapter from another, and when blocks are not shared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.vllm.adapters import Adapter, LoadedAdapters, NamedAdapters, content_digest

DTYPE = "lora_dtype=bfloat16"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, b"first")
    return tmp_path


def write(folder: Path, weights: bytes, config: bytes = b'{"r": 8}') -> None:
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)


def test_the_digest_follows_content_and_options_only(folder: Path, tmp_path: Path) -> None:
    digest = content_digest(folder, DTYPE)
    assert len(digest) == 64
    os.utime(folder / "adapter_model.safetensors", (0, 0))
    (folder / "optimizer.pt").write_bytes(b"of no matter to what is computed")
    copy = tmp_path / "copy"
    copy.mkdir()
    write(copy, b"first")
    assert content_digest(folder, DTYPE) == content_digest(copy, DTYPE) == digest
    assert content_digest(folder, "lora_dtype=float32") != digest
    write(folder, b"other")
    assert content_digest(folder, DTYPE) != digest
    write(folder, b"first", config=b'{"r": 8, "lora_alpha": 32}')
    assert content_digest(folder, DTYPE) != digest


def test_nothing_to_read_is_not_a_content(tmp_path: Path) -> None:
    assert content_digest(tmp_path, DTYPE) == content_digest(tmp_path / "none", DTYPE) == ""
    adapter = NamedAdapters().name(1, str(tmp_path), DTYPE)
    assert not NamedAdapters().shares(adapter)


def test_a_number_keeps_its_content_until_it_is_loaded_again(folder: Path) -> None:
    """The worker computes with what it has loaded, whatever the files hold meanwhile."""
    named = NamedAdapters()
    first = named.name(1, str(folder), DTYPE)
    write(folder, b"retrained")
    assert named.name(1, str(folder), DTYPE) == first
    # Under a number of its own it is another adapter, and the first stays what it is.
    second = named.name(2, str(folder), DTYPE)
    assert second.digest != first.digest
    assert named.shares(first)
    assert named.shares(second)
    # A number that is taken stands for the folder that it was taken for.
    assert not named.shares(named.name(1, "/elsewhere", DTYPE))


def test_content_replaced_in_place_is_retired(folder: Path) -> None:
    named = NamedAdapters()
    named.on_loaded(1, str(folder), DTYPE)
    first = named.name(1, str(folder), DTYPE)
    named.on_loaded(1, str(folder), DTYPE)
    assert named.shares(first)
    write(folder, b"retrained")
    named.on_loaded(1, str(folder), DTYPE)
    second = named.name(1, str(folder), DTYPE)
    assert second.digest != first.digest
    assert named.shares(second)
    assert not named.shares(first)
    # Back to the first: the engine's own cache may hold blocks under its name that the second made.
    write(folder, b"first")
    named.on_loaded(1, str(folder), DTYPE)
    assert named.name(1, str(folder), DTYPE).digest == first.digest
    assert not named.shares(named.name(1, str(folder), DTYPE))


def adapter(folder: Path, number: int = 1) -> Adapter:
    return Adapter(number, str(folder), DTYPE, content_digest(folder, DTYPE))


def test_a_worker_compares_with_what_it_has_loaded(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded, first = LoadedAdapters(), adapter(folder)
    loaded.on_loaded(1, first.digest)
    assert loaded.agrees(first)
    write(folder, b"retrained")
    second = adapter(folder)
    assert loaded.agrees(first)
    assert not loaded.agrees(second)
    assert not loaded.agrees(second)
    assert caplog.text.count("files have changed") == 1
    # Pushed out and read again, with what the files hold now: neither name is right for all blocks.
    loaded.on_loaded(1, second.digest)
    assert not loaded.agrees(first)
    assert not loaded.agrees(second)


def test_before_the_model_reads_it_a_worker_reads_the_files(folder: Path) -> None:
    loaded, first = LoadedAdapters(), adapter(folder)
    assert loaded.agrees(first)
    write(folder, b"retrained")
    assert not loaded.agrees(first)
    assert loaded.agrees(adapter(folder, number=2))
