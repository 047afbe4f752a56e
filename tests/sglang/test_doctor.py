"""`penstock doctor --sglang`, and a process that has vLLM's plugin too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.sglang import compat
from penstock.vllm import plugin
from tests.sglang.engines import LAYOUTS, PAGE, Engine, prompt
from tests.sglang.test_threads import hashes


def test_what_can_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{tmp_path}/pool?size=64MiB"
    assert main(["doctor", "--sglang", "--json", url]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["can_serve"]
    assert said["is_tested"]
    assert said["layouts"] == dict.fromkeys(LAYOUTS, "in place")
    assert said["pool"]["get_mib_s"] > 0
    assert main(["doctor", "--sglang", url]) == 0
    shown = capsys.readouterr().out
    assert f"SGLang {compat.version()}, tested with Penstock" in shown
    assert "This pool can serve." in shown


def test_what_cannot(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from sglang.srt.mem_cache import utils

    monkeypatch.delenv("PENSTOCK_POOL", raising=False)
    monkeypatch.delattr(utils, "storage_namespace_seed")
    assert main(["doctor", "--sglang", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["layouts"] == {}
    assert "would share pages" in said["violations"][0]
    assert "pool" not in said


def test_vllms_plugin_does_no_harm(tmp_path: Path) -> None:
    """SGLang does not load it. If somebody does, SGLang goes on as before."""
    plugin.register()
    key = prompt(4 * PAGE)
    with Engine(f"file://{tmp_path}/pool?size=64MiB") as engine:
        pages, _ = engine.back_up(key, hashes(key))
        assert engine.prefetch(key) == pages
