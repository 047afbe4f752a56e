"""The device path in the real engine, over the stand-in for CUDA's driver.

`scripts/cuda-standin.sh` runs it, and with it tests of sharing, corruption, preemption, aborts,
hand-over, host tier, node memory and compression, which know nothing of the device. What the
stand-in shows, and what it cannot, is in `crates/penstock-cuda-standin/src/lib.rs`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.engines.node import Node
from tests.e2e.conftest import tokens

DEVICES = "PENSTOCK_STANDIN_DEVICES"

pytestmark = pytest.mark.skipif(
    DEVICES not in os.environ,
    reason="no stand-in for CUDA's driver: scripts/cuda-standin.sh has it",
)

PROMPT = tokens(8 * 32 + 5, seed=37)
COPIES = ("cuLaunchKernel", "cuMemcpyBatchAsync", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync")


def driver_calls(node: Node, *names: str) -> int:
    """How often an engine's only worker has made calls of the driver."""
    return sum(node.call("penstock_driver_calls", name=name)[0] for name in names)


@pytest.mark.parametrize(
    ("layout", "copied_by"),
    [
        # Pieces of 64 KiB, one for each layer: the kernel is faster, as this device says.
        pytest.param("LBHNC", "cuLaunchKernel", id="the kernel"),
        pytest.param("LBHNC", "cuMemcpyBatchAsync", id="batches"),
        # A block is one piece.
        pytest.param("BLHNC", "cuMemcpyBatchAsync", id="batches of whole blocks"),
    ],
)
def test_blocks_are_stored_from_a_device_and_loaded_into_another(
    llama: Path, start: Callable[..., Node], tmp_path: Path, layout: str, copied_by: str
) -> None:
    """Neighbouring blocks go in one copy. All are stored, all are loaded, and the answer is that of
    a hit in vLLM's own cache."""
    engines_from = 1 << 18 if copied_by == "cuLaunchKernel" else 1 << 12
    options = {
        "pool": f"file://{tmp_path}/pool?size=1GiB",
        "block_size": 32,
        "settings": {"penstock.kv_layout": layout},
        "env": {"PENSTOCK_STANDIN_COPY_ENGINES_FROM": str(engines_from)},
    }
    first = start(llama, **options)
    first.ask(PROMPT)
    expected = first.ask(PROMPT)
    first.wait_for("stored_blocks", 8)
    counters = first.counters()
    assert (counters["stores_dropped"], counters["stores_failed"], counters["panics"]) == (0, 0, 0)
    assert driver_calls(first, copied_by) > 0
    assert driver_calls(first, "cuEventSynchronize") > 0, "fences were waited for"
    first.kill()

    second = start(llama, **options)
    before = driver_calls(second, *COPIES)
    answer = second.ask(PROMPT)
    assert (answer.cached, answer.text) == (expected.cached, expected.text)
    assert answer.cached == 8 * 32
    assert driver_calls(second, *COPIES) > before
    assert second.counters()["panics"] == 0
    assert second.stop() == 0
