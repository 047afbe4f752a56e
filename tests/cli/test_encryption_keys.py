"""Keys on the command line: a file is named, what is wrong with it is said at once."""

from __future__ import annotations

import base64
import json
import shlex
from pathlib import Path

import pytest

import penstock
from penstock.cli import main

KEY = base64.b64encode(bytes(range(32))).decode()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"2026-11:{KEY}\n")
    path.chmod(0o600)
    return path


def test_serve_names_the_file_and_shows_no_key(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    command = ["serve", "m", "--pool", "valkey://cache.example", "--dry-run"]
    assert main([*command, "--encryption-key-file", "keys"]) == 0
    shown = capsys.readouterr().out
    words = shlex.split(shown)
    extra = json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    assert extra["penstock.encryption_key_file"] == str(file)
    assert KEY not in shown


def test_serve_refuses_keys_before_a_model_is_loaded(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["serve", "m", "--pool", "valkey://cache.example", "--dry-run"]
    file.chmod(0o644)
    assert main([*command, "--encryption-key-file", str(file)]) == 2
    assert "chmod 600" in capsys.readouterr().err
    assert main([*command, "--set", f"encryption_key_file={file}"]) == 2
    assert "--encryption-key-file" in capsys.readouterr().err
    monkeypatch.setenv("PENSTOCK_ENCRYPTION_KEYS", KEY)
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "PENSTOCK_ENCRYPTION_KEYS" in said
    assert KEY[:8] not in said


def test_doctor_measures_with_encrypted_values(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/pool?size=64MiB"
    assert main(["doctor", url, "--encryption-key-file", str(file), "--json"]) == 0
    said = capsys.readouterr().out
    report = json.loads(said)
    [keys] = [finding for finding in report["findings"] if finding["check"] == "keys"]
    assert keys["message"].startswith("encrypts with 2026-11 (")
    assert report["get_mib_s"] > 0
    assert KEY not in said


def test_pool_commands_need_no_keys(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/pool?size=64MiB"
    with penstock.open(url, namespace="docs", encryption_key_file=file) as pool:
        pool.put("key", b"its KV")
    assert main(["pool", "ls", url, "--json"]) == 0
    assert '"docs"' in capsys.readouterr().out
    assert main(["pool", "purge", url, "--yes"]) == 0
    with penstock.open(url, namespace="docs", encryption_key_file=file) as pool:
        assert "key" not in pool
