"""A tokenizer comes from where the operator said, or from the cache of a model hub."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from penstock.lookup import Refused
from penstock.lookup.tokenizing import Tokenizers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer, and with code that a library would run if it were told to."""
    folder = tmp_path / "model"
    folder.mkdir()
    vocabulary = {"hello": 7, "[UNK]": 0}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    write_class(folder, "PreTrainedTokenizerFast")
    return folder


def write_class(folder: Path, name: str) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))


def test_the_operators_folder_is_opened(folder: Path) -> None:
    pytest.importorskip("tokenizers")
    for named in ("asked", "described"):
        assert Tokenizers({named: str(folder)}).tokens("asked", "described", "hello") == [7]


def test_a_path_that_a_pool_names_is_not_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    opened: list[str] = []
    is_watching = [True]

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if is_watching[0] and event == "open" and str(folder) in str(arguments[0]):
            opened.append(str(arguments[0]))

    sys.addaudithook(watch)
    paths = (
        str(folder),
        "model",
        "./model",
        "../x/../model",
        "~/model",
        "/etc/passwd",
        "a/b/c",
        "",
    )
    try:
        for described in (*paths, "a\0b", "x" * 5000, "nobody:/model", "\\\\host\\share"):
            with pytest.raises(Refused, match="not opened because a pool names it"):
                Tokenizers({}).tokens("asked", described, "hello")
    finally:
        # A hook stays as long as the process.
        is_watching[0] = False
    assert opened == []


def test_a_name_that_no_cache_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(Refused, match="--tokenizer MODEL=FOLDER"):
        Tokenizers({}).tokens("asked", "nobody/has-this-model", "hello")


def test_no_code_beside_a_tokenizer_is_run_and_nobody_is_asked(folder: Path) -> None:
    pytest.importorskip("transformers")
    ran = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    described = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    with pytest.raises(Refused, match="cannot be loaded"):
        Tokenizers({"asked": str(folder)}).tokens("asked", "described", "hello")
    assert not ran.exists()
