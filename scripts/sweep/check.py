"""One architecture: alone, and over a pool. Each engine runs in a process of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.sweep import engine

RIGHT, NO_HITS, WRONG, FAILS = "right", "no hits", "wrong", "fails"
REFUSED, NOT_ALONE, NOT_MADE = "refused", "not alone", "not made"
UNTOLD = "same for all prompts"

LIMIT = 300.0
"""Seconds for one engine."""
_DIED = "the process died, or did not end"


@dataclass(frozen=True)
class Found:
    """What became of an architecture."""

    architecture: str
    outcome: str
    why: str = ""
    cached: int = 0
    """Tokens of the hit."""


def check(architecture: str) -> Found:
    """Runs it, alone and over a pool."""
    with tempfile.TemporaryDirectory(prefix="penstock-sweep-") as made:
        folder = Path(made)
        model, pool = folder / "model", f"file://{folder}/pool?size=1GiB"
        if why := _call(engine.make, folder, architecture, model):
            return Found(architecture, NOT_MADE, why)
        if why := _call(engine.check_class, folder, architecture):
            return Found(architecture, NOT_ALONE, why)
        first = ""
        for way in range(len(engine.WAYS)):
            alone = _call(engine.answers, folder, model, way, None)
            if not isinstance(alone, str):
                break
            first = first or alone
        else:
            return Found(architecture, NOT_ALONE, first)
        _, hit, other = alone
        cached = hit[2]
        if not cached:
            return Found(architecture, NO_HITS)
        if hit[:2] == other[:2]:
            return Found(architecture, UNTOLD)
        stored = _call(engine.answers, folder, model, way, pool)
        loaded = _call(engine.answers, folder, model, way, pool)
    for said in (stored, loaded):
        if isinstance(said, str):
            return Found(architecture, REFUSED if "ConfigError" in said else FAILS, said)
    if loaded[0][2] != cached:
        why = f"{loaded[0][2]} tokens cached, and {cached} without Penstock"
        return Found(architecture, WRONG, why)
    return Found(architecture, RIGHT if loaded[0] == hit else WRONG, "", cached)


def _call(function: Callable[..., Any], folder: Path, *arguments: Any) -> Any:
    """Calls a function in a process of its own. Returns what it does; :data:`_DIED` if it does
    not."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run, args=(function, arguments, folder, result))
    process.start()
    process.join(LIMIT)
    if process.exitcode is None:
        process.kill()
        process.join()
    return json.loads(result.read_text()) if result.exists() else _DIED


def _run(
    function: Callable[..., Any], arguments: tuple[Any, ...], folder: Path, result: Path
) -> None:
    with (folder / "log").open("w") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    returned = json.dumps(function(*arguments))
    partial = result.with_suffix(".part")
    partial.write_text(returned)
    partial.rename(result)
    # Whatever an architecture left behind ends with the process.
    os._exit(0)
