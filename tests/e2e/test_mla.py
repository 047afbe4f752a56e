"""Multi-head latent attention: one latent a token, stored once whoever holds it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import models
from tests.e2e.conftest import tokens
from tests.e2e.node import Node

pytestmark = pytest.mark.e2e

BLOCK = 16
"""vLLM's default block size for MLA on CPU."""

BLOCK_BYTES = 2 * (512 + 64) * 4 * BLOCK
"""Layers, latent and rotary part, bytes of float32, tokens."""

PREFIX = tokens(20 * BLOCK, seed=1)
OTHER = tokens(15 * BLOCK + 4, seed=2)

# vLLM's CPU kernels for MLA compute a prompt at once or a token at a time, nothing between: a load
# has to leave a single token, which is computed as in decoding. With random weights the two kernels
# often choose other tokens. What a load has to equal, to the last bit, is therefore what the first
# engine said after its own first token: the same decoding over the same cache.


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.deepseek_v2(tmp_path_factory.mktemp("deepseek"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_latents_are_shared(
    ranks: int, deepseek: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    options = {
        "pool": f"file://{tmp_path}/pool?size=1GiB",
        "tensor_parallel_size": ranks,
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))},
    }
    with start(deepseek, **options) as first:
        said = first.ask(PREFIX, max_tokens=9)
        cold = first.ask(OTHER)
        first.wait_for("stored_blocks", 20 + 15)
        assert first.counters()["stored_bytes"] == (20 + 15) * BLOCK_BYTES
    with start(deepseek, **options) as second:
        loaded = second.ask([*PREFIX, said.tokens[0]])
        assert loaded.cached == 20 * BLOCK
        assert loaded.text == (said.tokens[1:], said.logprobs[1:])
        computed = second.ask(OTHER)
        assert (computed.cached, computed.tokens) == (0, cold.tokens)
        assert second.counters()["loaded_tokens"] == 20 * BLOCK
        assert "KV layout L" in second.log.read_text()


def test_a_damaged_latent_is_recomputed(
    deepseek: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    folder = tmp_path / "pool"
    with start(deepseek, pool=f"file://{folder}?size=1GiB") as first:
        cold = first.ask([*PREFIX, 7])
        first.wait_for("stored_blocks", 20)
    values = [p for p in folder.rglob("*") if p.is_file() and p.stat().st_size == BLOCK_BYTES + 64]
    # Of a prompt the beginning counts as used last.
    beginning = max(values, key=lambda path: path.stat().st_mtime_ns)
    content = bytearray(beginning.read_bytes())
    content[5000] ^= 1
    beginning.write_bytes(content)
    with start(deepseek, pool=f"file://{folder}?size=1GiB") as second:
        assert second.ask([*PREFIX, 7]).tokens == cold.tokens
        counters = second.counters()
        assert counters["rejected_objects"] == 1
        assert counters.get("loaded_tokens", 0) == 0
