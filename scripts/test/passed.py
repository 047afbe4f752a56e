"""With which inputs a stage last passed: what tells whether it has to run again."""

from __future__ import annotations

import hashlib
import json
import subprocess
import threading
from pathlib import Path

from scripts.test.stages import VENV, Stage

FILE = Path(__file__).with_name("passed.json")
"""The committed record: for each stage that has inputs, their digest when it last passed."""

_lock = threading.Lock()


def digest(stage: Stage, root: Path) -> str:
    """What stands for all that the stage depends on: its command, and the content of every file of
    its inputs that git tracks or would track.

    Raises:
        ValueError: an input names no file.
        subprocess.CalledProcessError: `root` is no checkout.
    """
    # Wherever the environment lies.
    command = ["VENV" if word == VENV else word for word in stage.command]
    found = hashlib.sha256(json.dumps(command).encode())
    for given in sorted(stage.inputs):
        listed = [
            "git",
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
            "--",
            given,
        ]
        names = subprocess.run(listed, cwd=root, check=True, capture_output=True).stdout
        files = sorted({name for name in names.decode().split("\0") if (root / name).is_file()})
        if not files:
            raise ValueError(f"the stage {stage.name!r} depends on {given}, which is not there")
        for name in files:
            content = hashlib.sha256((root / name).read_bytes()).hexdigest()
            found.update(f"{name}\0{content}\n".encode())
    return found.hexdigest()


def recorded() -> dict[str, str]:
    """The digests on record, by the stages' names."""
    known: dict[str, str] = json.loads(FILE.read_text())
    return known


def record(stage: Stage, passed_with: str | None) -> None:
    """Notes the digest with which a stage has passed; `None` if it has failed."""
    with _lock:
        known = recorded()
        if passed_with is None:
            known.pop(stage.name, None)
        else:
            known[stage.name] = passed_with
        FILE.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
