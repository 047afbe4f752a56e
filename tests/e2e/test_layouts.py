"""Whatever the layout of writer and reader: same tokens, same logprobs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.engines.forks import penstock
from lab.engines.node import Node, StartError
from lab.models import attention
from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.stored import all_stored

pytestmark = pytest.mark.e2e

MODELS: dict[str, Callable[[Path], Path]] = {
    "mha": lambda folder: attention.llama(folder, kv_heads=4),
    "gqa": attention.llama,
    "hybrid": attention.gemma2,
}
PROMPTS = [tokens(length, seed=length) for length in (5 * BLOCK + 3, 4 * BLOCK, 7 * BLOCK + 1)]


@pytest.mark.parametrize(
    ("any_pool", "writer", "reader"),
    [("file", "LBHNC", "BLHNC"), ("valkey-unix", "BLHNC", "LBHNC")],
    indirect=["any_pool"],
    ids=["file", "valkey"],
)
@pytest.mark.parametrize("model", MODELS)
def test_layouts_share(
    model: str, writer: str, reader: str, any_pool: str, start: Callable[..., Node], tmp_path: Path
) -> None:
    folder = MODELS[model](tmp_path / "model")
    with start(folder, pool=any_pool, settings={"penstock.kv_layout": writer}) as first:
        cold = [first.ask(prompt) for prompt in PROMPTS]
        own_hits = [first.ask(prompt) for prompt in PROMPTS]
        assert first.counters().get("loaded_tokens", 0) == 0
        groups = 2 if model == "hybrid" else 1
        all_stored(first, groups * (5 + 4 + 7))
        assert f"KV layout {writer}" in first.log.read_text()
    with start(folder, pool=any_pool, settings={"penstock.kv_layout": reader}) as second:
        answers = [second.ask(prompt) for prompt in PROMPTS]
        assert [a.cached for a in answers] == [a.cached for a in own_hits]
        assert [a.cached for a in answers] == [5 * BLOCK, 3 * BLOCK, 7 * BLOCK]
        assert [a.text for a in answers] == [a.text for a in own_hits]
        assert [a.tokens for a in answers] == [a.tokens for a in cold]
        assert second.counters()["loaded_tokens"] == 15 * BLOCK
        assert second.counters().get("load_failed_blocks", 0) == 0
        assert f"KV layout {reader}" in second.log.read_text()


def test_a_layout_that_cannot_be_had_is_refused(
    llama: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    with pytest.raises(StartError, match=r"KV layout BLNHC cannot be had: .* LBHNC, BLHNC only"):
        start(
            llama,
            pool=f"file://{tmp_path}/pool?size=64MiB",
            settings={"penstock.kv_layout": "BLNHC"},
        )


def test_doctor_explains_the_layout_beforehand(llama: Path, tmp_path: Path) -> None:
    said = penstock("doctor", "--model", str(llama), "--json", folder=tmp_path)
    assert said.returncode == 0, said.stderr
    decision = json.loads(said.stdout)
    assert decision["layout"] == "BLHNC"
    assert "full_attention pages allow it" in decision["reason"]
    assert "CPU_ATTN addresses it" in decision["reason"]
    model = attention.deepseek_v2(tmp_path / "model")
    latent = penstock("doctor", "--model", str(model), folder=tmp_path)
    assert "KV layout LBNHC: no cross-layer layout: vLLM's CPU kernels for MLA" in latent.stdout
    refused = penstock("doctor", "--model", str(llama), "--kv-layout", "BLNHC", folder=tmp_path)
    assert refused.returncode == 2
    assert "KV layout BLNHC cannot be had" in refused.stderr


def test_without_penstock_nothing_changes(plain: Node) -> None:
    log = plain.log.read_text()
    assert "Using LBHNC KV cache layout" in log
    assert "Penstock" not in log
