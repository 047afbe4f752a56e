"""Penstock as one of several connectors (vLLM's `MultiConnector`): it shares blocks with engines
whose one connector it is, and sees weights change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.engines.node import Node, connector_settings
from lab.models import attention
from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.stored import all_stored

pytestmark = pytest.mark.e2e

ONE, OTHER = tokens(5 * BLOCK + 9, seed=71), tokens(5 * BLOCK + 9, seed=72)
FOUND = 5 * BLOCK


def several(folder: Path, pool: str, *, first: bool) -> dict[str, Any]:
    """Options of an engine with Penstock and vLLM's example of a connector, in either order."""
    ours = {
        "kv_connector": "PenstockConnector",
        "kv_connector_module_path": "penstock.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": connector_settings(pool, None),
    }
    theirs = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours, theirs] if first else [theirs, ours]},
    }
    # vLLM's example knows one group of blocks, in one layout.
    return {"kv_transfer_config": transfer, "disable_hybrid_kv_cache_manager": True}


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_blocks_are_shared_with_an_engine_that_has_penstock_alone(
    *, first: bool, llama: Path, plain: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    pool = f"file://{tmp_path}/pool?size=1GiB"
    expected = [plain.ask(prompt).tokens for prompt in (ONE, OTHER)]
    with start(llama, pool=pool) as alone:
        assert alone.ask(ONE).tokens == expected[0]
        all_stored(alone, 5)
    with start(llama, **several(tmp_path / "example", pool, first=first)) as one_of_two:
        answer = one_of_two.ask(ONE)
        assert (answer.cached, answer.tokens) == (FOUND, expected[0])
        before = one_of_two.counters()
        assert one_of_two.ask(OTHER).tokens == expected[1]
        all_stored(one_of_two, 5, since=before)
    with start(llama, pool=pool) as alone:
        answer = alone.ask(OTHER)
        assert (answer.cached, answer.tokens) == (FOUND, expected[1])


def test_weights_that_change_are_seen(
    llama: Path, start: Callable[..., Node], tmp_path: Path
) -> None:
    pool = f"file://{tmp_path}/pool?size=1GiB"
    newer = attention.llama(tmp_path / "newer", seed=1)
    options = several(tmp_path / "example", pool, first=True)
    # Only Penstock: vLLM's example does not see weights change.
    options["kv_transfer_config"]["kv_connector_extra_config"]["connectors"].pop()
    with start(newer) as node:
        expected = node.ask(ONE).tokens
    with start(llama, **options) as node:
        node.ask(ONE)
        all_stored(node, 5)
        node.call("reload_weights", weights_path=str(newer))
        assert node.reset(pool=True)
        answer = node.ask(ONE)
        assert (answer.cached, answer.tokens) == (0, expected)
