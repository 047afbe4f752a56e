"""Weights that change past all that vLLM offers, or by files that are not what they were."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.engines.node import Node
from lab.engines.trainer import LIVE
from lab.models import attention
from lab.waiting import eventually
from tests.e2e.test_weight_versions import TWO_RANKS, Truth, Weights, asked, prompt

pytestmark = pytest.mark.e2e

Start = Callable[..., Node]


@pytest.fixture(scope="module")
def old(llama: Path) -> Weights:
    return Weights(llama)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(attention.llama(tmp_path_factory.mktemp("new"), seed=1))


@pytest.fixture(scope="module")
def third(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(attention.llama(tmp_path_factory.mktemp("third"), seed=2))


@pytest.fixture(scope="module")
def truth(llama: Path, start: Start) -> Truth:
    return Truth(start(llama, **LIVE))


def test_a_write_past_vllm_is_seen_with_a_reset(tmp_path: Path, llama: Path, start: Start) -> None:
    flag = tmp_path / "flag"
    pool = f"file://{tmp_path}/pool?size=1GiB"
    with start(llama, pool=pool, **LIVE) as node:
        before = asked(node, 1)
        node.call("negate_when", name="model.embed_tokens.weight", flag=str(flag))
        flag.touch()
        eventually(flag.with_suffix(".done").exists)
        assert node.reset(pool=True)
        cached, right = asked(node, 1)
        assert cached == 0
        assert right != before[1], "the tensor matters"


def test_files_that_are_overwritten_after_a_reload(
    tmp_path: Path,
    llama: Path,
    old: Weights,
    new: Weights,
    third: Weights,
    truth: Truth,
    start: Start,
) -> None:
    """A trainer saves each checkpoint to the same folder."""
    latest = tmp_path / "latest"
    shutil.copytree(new.model, latest)
    pool = f"file://{tmp_path}/pool?size=1GiB"
    with start(llama, pool=pool, **LIVE) as one, start(llama, pool=pool, **LIVE) as other:
        one.call("reload_weights", weights_path=str(latest))
        # The next checkpoint comes before the next request.
        shutil.copytree(third.model, latest, dirs_exist_ok=True)
        assert asked(one, 1) == (0, truth(new, 1))
        third.put(other)
        assert asked(other, 1) == (0, truth(third, 1))


def test_files_that_have_not_all_weights(
    tmp_path: Path, llama: Path, old: Weights, new: Weights, start: Start, truth: Truth
) -> None:
    from safetensors.torch import load_file, save_file

    part = tmp_path / "part"
    shutil.copytree(llama, part)
    (path,) = part.glob("*.safetensors")
    tensors = load_file(path)
    save_file({k: v for k, v in tensors.items() if ".1.mlp" in k}, path, metadata={"format": "pt"})
    pool = f"file://{tmp_path}/pool?size=1GiB"
    with start(llama, pool=pool, **LIVE) as one, start(new.model, pool=pool, **LIVE) as other:
        with start(new.model, **LIVE) as alone:
            alone.call("reload_weights", weights_path=str(part))
            alone.forget()
            right = alone.ask(prompt(1)).tokens
        for node in (one, other):
            node.call("reload_weights", weights_path=str(part))
        assert asked(one, 1)[0] == 0
        assert asked(other, 1) == (0, right)


@pytest.mark.parametrize("ranks", [{}, TWO_RANKS], ids=["one rank", "two ranks"])
def test_shards_of_weights_that_a_kernel_packs(
    ranks: dict[str, Any], tmp_path: Path, llama: Path, start: Start
) -> None:
    """Engines on a CPU whose weights come from sharded checkpoints start."""
    shards = tmp_path / "shards"
    shutil.copytree(llama, shards)
    for path in shards.glob("*.safetensors"):
        path.unlink()
    with start(llama, **LIVE, **ranks) as node:
        node.call("save_sharded_state", path=str(shards))
    with start(
        shards, pool=f"file://{tmp_path}/pool?size=1GiB", load_format="sharded_state", **ranks
    ) as node:
        assert asked(node, 1)[0] == 0
