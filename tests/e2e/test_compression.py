"""Engines that compress values: loads are vLLM's own hits, bit for bit, and the pool has fewer
bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lab.engines.node import Node
from tests.e2e.conftest import BLOCK, KV_BYTES_PER_BLOCK, tokens
from tests.e2e.test_corruption import HEADER, flip, objects

pytestmark = pytest.mark.e2e

LOSSLESS = {"penstock.compression": "lossless", "penstock.host_tier": "false"}
PROMPTS = [tokens(3 * BLOCK + 11 * number, seed=810 + number) for number in range(1, 4)]


def test_loads_are_exact_from_fewer_bytes(
    llama: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    folder = tmp_path / "pool"
    options = {"pool": f"file://{folder}?size=1GiB", "dtype": "bfloat16"}
    with start(llama, settings=LOSSLESS, **options) as first:
        for prompt in PROMPTS:
            first.ask(prompt)
        own = [first.ask(prompt) for prompt in PROMPTS]
        first.wait_for("stored_blocks", 3 * len(PROMPTS))
        value_bytes = first.counters()["stored_value_bytes"]
    values = objects(folder)
    assert len(values) == 3 * len(PROMPTS)
    # The test model's KV in float32 has twice the bytes.
    plain = len(values) * (HEADER + KV_BYTES_PER_BLOCK // 2)
    assert sum(path.stat().st_size for path in values) == value_bytes < 0.85 * plain

    with start(llama, settings=LOSSLESS, **options) as second:
        loaded = [second.ask(prompt) for prompt in PROMPTS]
        assert [answer.text for answer in loaded] == [answer.text for answer in own]
        assert second.counters()["loaded_tokens"] == 3 * len(PROMPTS) * BLOCK
        assert second.counters().get("rejected_objects", 0) == 0
        # Damaged, they are computed.
        for path in values:
            flip(path, path.stat().st_size // 2)
        second.forget()
        computed = [second.ask(prompt) for prompt in PROMPTS]
        assert [answer.tokens for answer in computed] == [answer.tokens for answer in own]
        assert second.counters()["rejected_objects"] >= len(PROMPTS)
        assert second.counters()["loaded_tokens"] == 3 * len(PROMPTS) * BLOCK

    # Without compression, an engine sees none of them, and removes none.
    with start(llama, pool=options["pool"], dtype="bfloat16") as other:
        before = set(objects(folder))
        assert other.ask(PROMPTS[0]).cached == 0
        other.wait_for("stored_blocks", 3)
        assert set(objects(folder)) > before
