"""`penstock doctor --sglang`, and a process that has vLLM's plugin too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cli import main
from penstock.errors import ConfigError
from penstock.sglang import PenstockStorage, check, compat
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


def _doctor(capsys: pytest.CaptureFixture[str]) -> tuple[int, Any, str]:
    """The exit status, the document, and what people see."""
    status = main(["doctor", "--sglang", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["can_serve"] == (status == 0)
    assert main(["doctor", "--sglang"]) == status
    return status, said, " ".join(capsys.readouterr().out.split())


def test_a_layout_in_which_pages_are_spoilt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PENSTOCK_POOL", raising=False)
    whole = PenstockStorage.batch_get_v1

    def spoilt(self: Any, keys: Any, indices: Any, extra_info: Any = None) -> Any:
        done = whole(self, keys, indices, extra_info)
        if self.mem_pool_host.layout == "layer_first":
            self.mem_pool_host.kv_buffer.view(torch.uint8).add_(1)
        return done

    monkeypatch.setattr(PenstockStorage, "batch_get_v1", spoilt)
    status, said, shown = _doctor(capsys)
    assert status == 1
    assert said["violations"] == ["layout layer_first: a page came back with other bytes"]
    assert said["layouts"]["page_first"] == "in place"
    assert "✗ layout layer_first" in shown
    assert "✓ layout page_first" in shown


def test_host_pools_that_the_backend_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Any, host: Any) -> None:
        raise ConfigError("the type of the KV is not known")

    monkeypatch.delenv("PENSTOCK_POOL", raising=False)
    monkeypatch.setattr(PenstockStorage, "register_mem_pool_host", refuse)
    status, said, _ = _doctor(capsys)
    assert status == 1
    assert len(said["violations"]) == len(LAYOUTS)
    assert all("the type of the KV is not known" in each for each in said["violations"])


@pytest.mark.parametrize("form", ["stored", "loaded"])
def test_pages_that_do_not_move(
    form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PENSTOCK_POOL", raising=False)
    name = {"stored": "batch_set_v1", "loaded": "batch_get_v1"}[form]
    monkeypatch.setattr(PenstockStorage, name, lambda self, keys, *_: [False] * len(keys))
    status, said, _ = _doctor(capsys)
    assert status == 1
    expected = {"stored": "a page was not stored", "loaded": "a page did not come back"}[form]
    assert said["layouts"] == dict.fromkeys(LAYOUTS, expected)


@pytest.mark.parametrize("lacks", [LAYOUTS, LAYOUTS[1:]], ids=["all", "all but one"])
def test_layouts_that_sglang_does_not_have(
    lacks: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That is no fault; but if there is none at all, nothing was tried."""
    make = check._host_pool

    def some(layout: str) -> Any:
        if layout in lacks:
            raise ValueError(f"Unsupported layout: {layout}")
        return make(layout)

    monkeypatch.delenv("PENSTOCK_POOL", raising=False)
    monkeypatch.setattr(check, "_host_pool", some)
    status, said, shown = _doctor(capsys)
    assert said["layouts"]["page_head"].startswith("not tried: Unsupported")
    assert "- layout page_head" in shown
    if lacks == LAYOUTS:
        assert status == 1
        assert "no layout of host memory could be tried" in said["violations"][0]
    else:
        assert status == 0
        assert said["violations"] == []


def test_vllms_plugin_does_no_harm(tmp_path: Path) -> None:
    """SGLang does not load it. If somebody does, SGLang goes on as before."""
    plugin.register()
    key = prompt(4 * PAGE)
    with Engine(f"file://{tmp_path}/pool?size=64MiB") as engine:
        pages, _ = engine.back_up(key, hashes(key))
        assert engine.prefetch(key) == pages
