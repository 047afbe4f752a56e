"""The workflow files: valid by their schema, and what they run is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.test_facts import ROOT, options

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def read(file: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(file.read_text())
    return loaded


def check(*files: Path) -> subprocess.CompletedProcess[str]:
    """By the schema that the checker brings: nothing is fetched."""
    command = [*(sys.executable, "-m", "check_jsonschema"), *map(str, files)]
    command += ["--builtin-schema", "vendor.github-workflows"]
    return subprocess.run(command, capture_output=True, text=True)


def commands() -> list[str]:
    steps = [
        step
        for file in WORKFLOWS
        for job in read(file)["jobs"].values()
        for step in job.get("steps", [])
    ]
    return [line for step in steps for line in step.get("run", "").splitlines()]


@pytest.mark.long
def test_they_are_valid(tmp_path: Path) -> None:
    assert [file.stem for file in WORKFLOWS] == ["docs", "test", "wheels"]
    said = check(*WORKFLOWS)
    assert said.returncode == 0, said.stdout + said.stderr
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "run-on:"))
    assert check(wrong).returncode == 1


def test_what_they_run_is_there() -> None:
    targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = {line.partition(" ")[2] for line in commands() if line.startswith("make ")}
    assert made == {"docs", "venv", "wheels"}
    assert made <= targets
    assert (ROOT / ".ci/run").exists()
    assert ".ci/run" in commands()
    programs = {word for line in commands() for word in re.findall(r"\bscripts/\S+", line)}
    assert programs >= {"scripts/flaky.sh", "scripts/install-servers.sh"}
    assert all((ROOT / program).exists() for program in programs)
    for line in commands():
        for option in re.findall(r"penstock\"? (--[\w-]+)", line):
            assert option in options()


def test_jobs_wait_for_jobs_that_there_are() -> None:
    for file in WORKFLOWS:
        jobs = read(file)["jobs"]
        for job in jobs.values():
            needed = job.get("needs", [])
            assert ({needed} if isinstance(needed, str) else {*needed}) <= set(jobs)
            assert "timeout-minutes" in job or "environment" in job or "uses" in job


def test_nothing_may_write_unless_it_publishes() -> None:
    for file in WORKFLOWS:
        assert read(file)["permissions"] == {"contents": "read"}
        for name, job in read(file)["jobs"].items():
            assert name == "publish" or "permissions" not in job


def test_nothing_is_published_before_all_has_been_tried() -> None:
    wheels = read(ROOT / ".github/workflows/wheels.yml")["jobs"]
    assert set(wheels["publish"]["needs"]) == {*wheels} - {"make", "publish"}
    assert "refs/tags/v" in wheels["publish"]["if"]
