"""What stands for a model's files in the namespace: every byte of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from penstock._native import FileDigests, digest
from penstock.errors import ConfigError, IoError
from penstock.identity import WeightFiles, files_beside_weights, weights_digest
from penstock.vllm.compat.weights import _current, _loading, weight_files

PIECE = 4 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "penstock/digests"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(bytes(1000))
    (folder / "b.safetensors").write_bytes(bytes(range(256)))
    return folder


def test_it_stays_what_it_was(model: Path) -> None:
    # Pools name their objects by it: another one would leave all that they hold unfound.
    expected = "2e2a975cc9e8a85738244b0c4d767a9c03d9bc9ecc74c71012f2352b7a8d6939"
    assert weights_digest(model) == expected


def test_each_byte_and_file_counts(model: Path) -> None:
    found = {weights_digest(model)}
    for place in (0, 499, 999):
        content = bytearray(1000)
        content[place] = 1
        (model / "a.safetensors").write_bytes(content)
        found.add(weights_digest(model))
    (model / "a.safetensors").rename(model / "aa.safetensors")
    assert weights_digest(model) in found
    (model / "aa.safetensors").rename(model / "c.safetensors")
    found.add(weights_digest(model))
    (model / "c.safetensors").unlink()
    found.add(weights_digest(model))
    assert len(found) == 6
    (model / "pytorch_model.bin").write_bytes(b"not looked at beside safetensors")
    assert weights_digest(model) in found


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    assert weights_digest(tmp_path) is None


@settings(max_examples=20, deadline=None)
@given(st.integers(-2, 2), st.integers(0, 2), st.data())
def test_a_tensor_has_the_digest_of_a_file_with_its_bytes(
    tmp_path_factory: pytest.TempPathFactory, extra: int, pieces: int, data: st.DataObject
) -> None:
    content = bytearray(max(0, pieces * PIECE + extra))
    path = tmp_path_factory.mktemp("file") / "weights"
    path.write_bytes(content)
    (found,) = FileDigests([path], threads=2).wait() or []
    assert digest(content, threads=3) == found
    if content:
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1
        assert digest(content) != found


def test_what_did_not_change_is_not_read_again(model: Path, cache: Path) -> None:
    first = WeightFiles(model.iterdir())
    found = first.digest()
    assert first.progress == (1256, 1256, 1256)
    # The files are new: another change could still have the same time.
    assert not list(cache.glob("[!.]*[!k]"))
    assert WeightFiles(model.iterdir()).digest() == found


def test_a_file_that_is_not_there_is_named(model: Path) -> None:
    with pytest.raises(IoError, match="gone"):
        WeightFiles([model / "gone"]).digest()
    with pytest.raises(IoError, match="not a regular file"):
        WeightFiles([model]).digest()


def test_a_file_that_changes_meanwhile_is_refused(model: Path) -> None:
    large = model / "large"
    with large.open("wb") as file:
        # Reading so much takes minutes.
        file.truncate(1 << 40)
        digests = FileDigests([large], threads=1)
        while digests.progress[2] == 0:
            assert digests.wait(0.01) is None
        file.truncate(1 << 23)
    with pytest.raises(ConfigError, match="changed while it was read"):
        digests.wait()


class TestFilesBesideWeights:
    """Files that a model may read, told from all others by a list."""

    @pytest.fixture
    def folder(self, model: Path) -> Path:
        for name in ("preprocessor_config.json", "tokenizer.json", "config.json", "README.md"):
            (model / name).write_text(name)
        return model

    def test_a_file_that_nobody_knows_counts(self, folder: Path) -> None:
        more = {
            *("code/processing.py", "new.json", "mask_embedding.pt"),
            *("tower/config.json", "tower/model.safetensors"),
        }
        for name in (*more, "original/model.pth", "model.gguf", ".cache/tower/config.json"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")
        known = {"preprocessor_config.json", "tokenizer.json"}
        assert set(files_beside_weights(folder)) == known | more

    @pytest.mark.parametrize("name", ["preprocessor_config.json", "tokenizer.json"])
    def test_its_content_counts(self, name: str, folder: Path) -> None:
        before = files_beside_weights(folder)
        (folder / name).write_text("changed")
        after = files_beside_weights(folder)
        assert {each for each in before if before[each] != after[each]} == {name}


class TestFilesOfAModel:
    """Which files hold a model's weights, as vLLM's loaders read them."""

    @pytest.mark.parametrize(
        ("loader", "load_format", "files", "are_told"),
        [
            (DefaultModelLoader, "auto", ["a.safetensors", "a.safetensors"], True),
            # The model has read on its own.
            (DefaultModelLoader, "auto", [], False),
            # What is read may be a copy of what the files were.
            (DefaultModelLoader, "npcache", ["a.bin"], False),
            (object, "auto", ["a.safetensors"], False),
        ],
    )
    def test_files_stand_for_weights_if_all_came_from_them(
        self, loader: type, load_format: str, files: list[str], are_told: bool
    ) -> None:
        model = torch.nn.Linear(1, 1)
        with _loading(model, loader, load_format):
            _current[-1].files += files
        assert weight_files(model) == (sorted(set(files)) if are_told else None)

    def test_of_a_model_that_nobody_saw_loaded_no_file_is_known(self) -> None:
        assert weight_files(torch.nn.Linear(1, 1)) is None
