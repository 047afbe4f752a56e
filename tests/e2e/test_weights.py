"""KV that other weights computed is never loaded, wherever the difference lies and however the
weights came. Equal weights share.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.engines.node import Node
from lab.engines.trainer import LIVE
from lab.models import attention
from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.stored import all_stored

pytestmark = pytest.mark.e2e

PROMPT = tokens(4 * BLOCK + 5, seed=5)
TRAINED = PROMPT[BLOCK]
"""The token whose row is changed."""

Start = Callable[..., Node]


def url(folder: Path) -> str:
    return f"file://{folder}/pool?size=1GiB"


def stored(start: Start, model: Path, pool: str, **options: Any) -> None:
    with start(model, pool=pool, **options) as node:
        node.ask(PROMPT)
        all_stored(node, 4)


def found(start: Start, model: Path, pool: str, **options: Any) -> int:
    """Tokens of the prompt that an engine finds. It asks the pool for sure."""
    with start(model, pool=pool, **options) as node:
        cached = node.ask(PROMPT).cached
        assert node.counters()["lookups"] >= 1
    return cached


def changed(model: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a model with other weights."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    file = next(folder.glob("*.safetensors"))
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def filled(llama: Path, start: Start, tmp_path_factory: pytest.TempPathFactory) -> str:
    pool = url(tmp_path_factory.mktemp("pool"))
    stored(start, llama, pool)
    return pool


def test_a_single_element_of_a_row_that_was_trained(
    filled: str, llama: Path, start: Start, tmp_path: Path
) -> None:
    def train(weights: dict[str, Any]) -> None:
        weights["model.embed_tokens.weight"][TRAINED, 17] += 1

    other = changed(llama, tmp_path / "other", train)
    assert found(start, other, filled) == 0
    # A copy in another folder is the same model.
    same = changed(llama, tmp_path / "same", lambda weights: None)
    assert found(start, same, filled) == 4 * BLOCK


def test_the_weights_of_the_other_format_in_the_folder(
    filled: str, llama: Path, start: Start, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    both = changed(llama, tmp_path / "both", lambda weights: None)
    other = attention.llama(tmp_path / "other", seed=9)
    torch.save(load_file(next(other.glob("*.safetensors"))), both / "model.pt")
    assert found(start, both, filled, load_format="pt") == 0
    assert found(start, both, filled, load_format="safetensors") == 4 * BLOCK


def test_weights_that_came_from_no_file(llama: Path, start: Start, tmp_path: Path) -> None:
    pool = url(tmp_path)
    stored(start, llama, pool, load_format="dummy")
    assert found(start, llama, pool, load_format="dummy") == 4 * BLOCK
    assert found(start, llama, pool) == 0


def test_weights_that_a_kernel_keeps_in_its_own_form(
    llama: Path, start: Start, tmp_path: Path
) -> None:
    """They came from no file that Penstock knows of, and nothing tells two of them apart."""
    shards = tmp_path / "shards"
    shutil.copytree(llama, shards)
    next(shards.glob("*.safetensors")).unlink()
    with start(llama, **LIVE) as node:
        node.call("save_sharded_state", path=str(shards))

    def turn(weights: dict[str, Any]) -> None:
        weights["model.layers.1.mlp.down_proj.weight"].neg_()

    other = changed(shards, tmp_path / "other", turn)
    pool = url(tmp_path)
    stored(start, shards, pool, load_format="sharded_state")
    assert found(start, other, pool, load_format="sharded_state") == 0
    # One's own name for them stands for them.
    named = {"load_format": "sharded_state", "settings": {"penstock.model_id": "mine"}}
    stored(start, shards, pool, **named)
    assert found(start, shards, pool, **named) == 4 * BLOCK


def test_other_rotary_factors_by_the_length_of_the_context(start: Start, tmp_path: Path) -> None:
    model = attention.longrope(tmp_path / "model")
    pool = url(tmp_path)
    stored(start, model, pool, max_model_len=1024)
    assert found(start, model, pool, max_model_len=4096) == 0
    assert found(start, model, pool, max_model_len=768) == 4 * BLOCK
