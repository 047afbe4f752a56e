"""Random changes to what computes KV: no engine answers with another one's.

Each number draws a change. ``PENSTOCK_TEST_ATTACKS=200`` tries so many.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.engines.node import Node, StartError
from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.stored import all_stored

pytestmark = pytest.mark.e2e

COUNT = int(os.environ.get("PENSTOCK_TEST_ATTACKS", "5"))
PROMPT = tokens(4 * BLOCK + 5, seed=5)

Options = dict[str, Any]
Change = Callable[[random.Random, Path], Options]
"""Changes a model's folder, or returns an engine's options."""


def an_element_of_a_weight(draws: random.Random, model: Path) -> Options:
    from safetensors.torch import load_file, save_file

    file = next(model.glob("*.safetensors"))
    weights = load_file(file)
    flat = weights[draws.choice(sorted(weights))].view(-1)
    place = draws.randrange(flat.numel())
    flat[place] = draws.choice([-flat[place] - 1, flat[place] + 1e-3, 100.0])
    save_file(weights, file, metadata={"format": "pt"})
    return {}


def a_bit_of_the_file(draws: random.Random, model: Path) -> Options:
    file = next(model.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    # Of the elements: what comes before tells where they are. No element becomes infinite.
    start = 8 + int.from_bytes(data[:8], "little")
    place = start + 4 * draws.randrange((len(data) - start) // 4)
    data[place + draws.randrange(3)] ^= 1 << draws.randrange(7)
    file.write_bytes(data)
    return {}


def two_rows_of_a_weight(draws: random.Random, model: Path) -> Options:
    from safetensors.torch import load_file, save_file

    file = next(model.glob("*.safetensors"))
    weights = load_file(file)
    name = draws.choice(sorted(name for name, each in weights.items() if each.dim() == 2))
    rows = weights[name]
    one, other = draws.sample(range(rows.shape[0]), 2)
    rows[[one, other]] = rows[[other, one]]
    save_file(weights, file, metadata={"format": "pt"})
    return {}


def a_field_of_the_configuration(draws: random.Random, model: Path) -> Options:
    path = model / "config.json"
    config = json.loads(path.read_text())
    config |= draws.choice(
        [
            {"rms_norm_eps": draws.choice([1e-3, 1e-2])},
            {"hidden_act": draws.choice(["gelu", "relu", "gelu_pytorch_tanh"])},
            {"num_hidden_layers": config["num_hidden_layers"] - draws.randrange(1, 4)},
            {"rope_parameters": {"rope_type": "default", "rope_theta": draws.choice([7.0, 5e5])}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            {"a_new_field": draws.random()},
        ]
    )
    path.write_text(json.dumps(config))
    return {}


def an_option(draws: random.Random, model: Path) -> Options:
    theta = {"rope_type": "default", "rope_theta": draws.choice([9.0, 3e5])}
    return draws.choice(
        [
            {"dtype": draws.choice(["bfloat16", "float16"])},
            {"hf_overrides": {"rope_parameters": theta}},
            {"hf_overrides": {"rms_norm_eps": 1e-2}},
            {"block_size": draws.choice([32, 64])},
            {"load_format": "dummy"},
            {"prefix_caching_hash_algo": "sha256_cbor"},
            {"additional_config": {"a_plugin": draws.random()}},
        ]
    )


COUNTS: tuple[Change, ...] = (
    an_element_of_a_weight,
    a_bit_of_the_file,
    two_rows_of_a_weight,
    a_field_of_the_configuration,
    an_option,
)
"""After any of these, nothing is found."""


def an_option_that_may_differ(draws: random.Random, model: Path) -> Options:
    return draws.choice(
        [
            {"max_model_len": draws.choice([1024, 2048])},
            {"max_num_seqs": draws.randrange(1, 9)},
            {"seed": draws.randrange(100)},
            {"load_format": "safetensors"},
            {"enable_lora": True},
            {"enable_prompt_embeds": True},
            {"served_model_name": "other"},
            {"kv_cache_memory_bytes": draws.choice([64, 128]) << 20},
        ]
    )


def another_name_of_the_file(draws: random.Random, model: Path) -> Options:
    next(model.glob("*.safetensors")).rename(model / "weights-of-it.safetensors")
    return {}


DO_NOT_COUNT: tuple[Change, ...] = (an_option_that_may_differ, another_name_of_the_file)
"""After any of these, all is found."""


@pytest.fixture(scope="module")
def attacked(
    llama: Path, start: Callable[..., Node], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A pool with the prompt's blocks."""
    folder = tmp_path_factory.mktemp("attacked") / "pool"
    with start(llama, pool=f"file://{folder}?size=8GiB") as node:
        node.ask(PROMPT)
        all_stored(node, 4)
    return folder


@pytest.mark.parametrize("number", range(COUNT))
def test_no_wrong_token(
    number: int,
    attacked: Path,
    llama: Path,
    start: Callable[..., Node],
    tmp_path: Path,
) -> None:
    # A pool of its own: another number may draw the same change.
    shutil.copytree(attacked, tmp_path / "pool")
    pool = f"file://{tmp_path}/pool?size=8GiB"
    draws = random.Random(number)
    counts = draws.random() < 0.75
    change = draws.choice(COUNTS if counts else DO_NOT_COUNT)
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    options = change(draws, model)
    try:
        with start(model, pool=pool, **options) as node:
            answer = node.ask(PROMPT)
            assert node.counters()["lookups"] >= 1
    except StartError:
        # What vLLM alone refuses too is no model.
        with pytest.raises(StartError):
            start(model, **options)
        return
    assert (answer.cached > 0) == (not counts), change.__name__
    with start(model, **options) as alone:
        right = [alone.ask(PROMPT).tokens for _ in range(2)]
        assert answer.tokens in right, change.__name__
    # Nobody has put anything else there under the names of the unchanged one.
    before, after = objects(attacked), objects(tmp_path / "pool")
    namespaces = {name.partition("/")[0] for name in before}
    assert {n: v for n, v in after.items() if n.partition("/")[0] in namespaces} == before


def objects(pool: Path) -> dict[str, bytes]:
    """Namespace and name → value, of blocks. What describes namespaces has one layer."""
    return {
        str(path.relative_to(pool)): path.read_bytes()
        for path in pool.glob("*/*/*.l*")
        if ".l0-1." not in path.name
    }
