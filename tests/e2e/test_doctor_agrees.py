"""What `penstock doctor --model` says beforehand is what the engine then finds and does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.engines.node import Node, StartError
from lab.models import attention
from lab.models.hybrids import HYBRIDS
from penstock.vllm.models import describe
from tests.connector.test_models import MADE, configured, model

pytestmark = pytest.mark.e2e

POOL = "memory://?size=64MiB"


# Nemotron-H has the row of Granite.
@pytest.mark.parametrize("name", [name for name in MADE if name != "nemotron_h"])
def test_a_model_is_served_as_said(name: str, start: Callable[..., Node], tmp_path: Path) -> None:
    folder = MADE[name](tmp_path / name)
    said = describe(str(folder), "auto")
    assert said.family is not None
    assert said.layout is not None
    options: dict[str, Any] = HYBRIDS[name].engine if name in HYBRIDS else {}
    if name == "idefics3":
        options = {"skip_tokenizer_init": False}
    if name == "deepseek_v2":
        options = attention.LATENT_ENGINE
    with start(folder, pool=POOL, **options) as node:
        log = node.log.read_text()
    assert re.findall(r"Penstock: layers: (.*)", log) == [said.family.layers]
    assert set(re.findall(r"Penstock: KV layout (\w+): ", log)) == {said.layout.layout}


@pytest.mark.parametrize("name", ["llama4"])
def test_a_model_is_refused_as_said(name: str, start: Callable[..., Node], tmp_path: Path) -> None:
    folder = configured(tmp_path / name, name)
    said = describe(str(folder), "auto")
    assert said.refusal is not None
    # The doctor does not count layers.
    reason = said.refusal.partition(" keep KV ")[2]
    with pytest.raises(StartError, match=re.escape(reason)):
        start(folder, pool=POOL, dtype="bfloat16", load_format="dummy")


def test_vllm_has_no_cpu_kernels_for_mamba_1(start: Callable[..., Node], tmp_path: Path) -> None:
    folder = Path(model(tmp_path / "jamba", "jamba"))
    said = describe(str(folder), "auto")
    assert said.family is not None
    assert said.family.on_cpu == "vLLM has no CPU kernels for it"
    node = start(folder, load_format="dummy", dtype="bfloat16")
    with pytest.raises(RuntimeError, match="EngineDeadError"):
        node.ask([5] * 40)
    assert "mamba_mixer.py" in node.log.read_text()
