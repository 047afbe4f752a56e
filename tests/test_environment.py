"""The head of every result: taken before anything is measured, by every bench, in one place."""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benches.shared import report
from penstock import environment
from penstock.cli.main import main

ROOT = Path(__file__).parents[1]
BENCHES = [
    path for path in sorted((ROOT / "benches").glob("*.py")) if "\ndef main()" in path.read_text()
]


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a module, a page and a result, all committed."""
    for name in ("python/module.py", "docs/page.md", "benches/results/old.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text("\n")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    return tmp_path


def test_gpus_are_named_with_their_driver_and_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By NVIDIA's program, which other machines do not have."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.gpus() == []
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "a device, 580.1, 5, 16"\n')
    program.chmod(0o755)
    assert environment.gpus() == ["a device, 580.1, 5, 16"]
    program.write_text("#!/bin/sh\necho no driver; exit 9\n")
    assert environment.gpus() == []


def test_what_is_not_committed_is_named(checkout: Path) -> None:
    module = checkout / "python/module.py"
    assert environment.source(module)["uncommitted"] == []
    for name in ("docs/page.md", "benches/results/old.json", "benches/results/new.json"):
        (checkout / name).write_text("no figure depends on it\n")
    clean = environment.source(module)
    assert clean["uncommitted"] == []
    assert len(clean["commit"]) >= 7
    module.write_text("changed\n")
    (checkout / "python/new.py").write_text("\n")
    changed = environment.source(module)
    assert changed == {
        "commit": clean["commit"],
        "uncommitted": ["python/module.py", "python/new.py"],
    }


def test_an_environment_in_anothers_checkout_is_no_commit_of_ours(checkout: Path) -> None:
    (checkout / ".git/info/exclude").write_text(".venv\n")
    installed = checkout / ".venv/environment.py"
    installed.parent.mkdir()
    installed.write_text("\n")
    assert environment.source(installed) == {"commit": None, "uncommitted": None}


def test_a_command_is_as_it_is_to_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    python = tmp_path / ".venv/bin/python"
    program = tmp_path / ".venv/bin/penstock"
    typed = environment.command([str(python), "-m", "benches.policies", "a folder"])
    assert typed == ".venv/bin/python -m benches.policies 'a folder'"
    typed = environment.command([str(python), str(program), "bench", "pool", "--json"])
    assert typed == ".venv/bin/penstock bench pool --json"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.chdir(elsewhere)
    assert environment.command(["/python", str(program), "bench", "pool"]) == "penstock bench pool"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:hunter2@host/0", "redis://:***@host/0"),
        ("rediss://me:hunter2@@host?a=b", "rediss://me:***@host?a=b"),
        ("redis://host?sentinel_password=hunter2&a=b", "redis://host?sentinel_password=***&a=b"),
        ("shm://near redis://:hunter2@far", "shm://near redis://:***@far"),
        ("unix:///socket", "unix:///socket"),
    ],
)
def test_a_command_has_no_password(url: str, shown: str) -> None:
    words = environment.command(["python", "penstock", "bench", "pool", url])
    assert shown in words
    assert "hunter2" not in words


class HeadTaken(Exception):
    """Instead of a head."""


@pytest.mark.parametrize("target", ["pool", "lookup"])
def test_the_head_is_taken_before_anything_else(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take() -> dict[str, Any]:
        raise HeadTaken

    monkeypatch.setattr(environment, "describe", take)
    # A pool that cannot be had: whoever asks for it first fails otherwise.
    with pytest.raises(HeadTaken):
        main(["bench", target, f"unix://{tmp_path}/absent.sock", "--json"])


def test_a_target_of_penstock_bench_has_a_head(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1.25, 2.5, 3.75))
    arguments = ["lookup", "memory://?size=1MiB", "--chunks", "10", "--passes", "1"]
    assert main(["bench", *arguments, "--json"]) == 0
    head = json.loads(capsys.readouterr().out)["environment"]
    assert set(head) == {"date", "command", "machine", "versions"}
    assert head["machine"]["cores"] == os.cpu_count()
    assert head["machine"]["load_at_start"] == 1.25
    assert head["versions"]["penstock"] == "0.1.0"
    assert {"commit", "uncommitted"} < set(head["versions"])


def test_a_bench_writes_its_head(tmp_path: Path) -> None:
    words = ["-m", "benches.shm_full", "--sizes", "64KiB", "--pool-mib", "16", "--passes", "1"]
    words += ["--uncommitted", "--json", str(tmp_path / "found.json")]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True)
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found) == ["environment", "pool_mib", "rows"]
    assert found["environment"]["command"].endswith(" ".join(words))


@pytest.mark.parametrize("uncommitted", [None, [], ["python/module.py"]])
def test_what_is_not_of_a_commit_is_kept_only_if_asked_for(
    uncommitted: list[str] | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    head = {"versions": {"commit": "abc", "uncommitted": uncommitted}}
    monkeypatch.setattr(environment, "describe", lambda: head)

    def begin(*words: str) -> argparse.Namespace:
        monkeypatch.setattr(sys, "argv", ["bench", *words])
        return report.begin(argparse.ArgumentParser(), engines="all")

    assert begin().environment == head | {"engines": "all"}
    assert begin("--json", "f", "--uncommitted").environment == head | {"engines": "all"}
    if uncommitted == []:
        begin("--json", "f")
    else:
        with pytest.raises(SystemExit):
            begin("--json", "f")
        assert "not committed" in capsys.readouterr().err


def called(path: Path) -> list[str]:
    """What a bench's `main` calls, in order."""
    tree = ast.parse(path.read_text())
    body = next(
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"
    )
    calls = [node for node in ast.walk(body) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    return [ast.unparse(call.func) for call in calls]


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_every_bench_begins_and_ends_in_the_one_place(path: Path) -> None:
    calls = called(path)
    assert calls.count("report.begin") == 1
    assert "report.finish" in calls
    # Before that, a bench only says which options it has.
    before = set(calls[: calls.index("report.begin")])
    assert before <= {
        "argparse.ArgumentParser",
        "parser.add_argument",
        "report.add_engine_options",
        "connectors.every",
        "','.join",
        "int",
        "text.split",
        "list",
        "range",
        "len",
    }
    # What servers and clients are given is no result.
    text = path.read_text().replace("json.dumps(transfer)", "").replace("json.dumps(line)", "")
    assert "json.dump" not in text


def test_there_are_benches() -> None:
    assert len(BENCHES) >= 11
