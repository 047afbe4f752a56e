"""What ranks tell of themselves at start-up must fit together, or the engine says why it does not.

On vLLM's own configuration of a pipeline; no engine is started.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.vllm.agreement import Agreement
from penstock.vllm.groups import Group
from penstock.vllm.messages import GroupShare, RankShare
from penstock.vllm.model_facts import model_facts
from penstock.vllm.settings import Settings

pytestmark = pytest.mark.e2e

_LAYERS = 8
_HEADS = 2
_GROUP = Group(0, "full_attention", 16, None, "float32", ())


def _share(first: int, end: int, **changes: Any) -> RankShare:
    group = GroupShare(tuple(range(first, end)), (end - first) << 12, 16, "HNC", 64)
    share = RankShare((first, end, 0, _HEADS), 100, (group,), host_blocks=50, slots=50)
    return replace(share, **changes)


@pytest.fixture(scope="module")
def agreement(llama: Path) -> Agreement:
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=str(llama), skip_tokenizer_init=True, dtype="float32", pipeline_parallel_size=2
    ).create_engine_config()
    settings = Settings(pool="memory://")
    return Agreement(settings, model_facts(config), (_GROUP,), lambda: b"")


def test_uneven_stages_agree(agreement: Agreement) -> None:
    agreement.accept({(0, 0): _share(0, 3), (1, 0): _share(3, 4, slots=17)})
    assert agreement.ranks == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"host_blocks": 25}, "rank .0, 0. has host_blocks 50, rank .1, 0. has 25"),
        ({"num_blocks": 99}, "rank .0, 0. has num_blocks 100, rank .1, 0. has 99"),
        ({"layers_per_object": 2}, "has layers_per_object None, rank .1, 0. has 2"),
    ],
)
def test_a_mismatch_names_both_sides(
    agreement: Agreement, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        agreement.accept({(0, 0): _share(0, 3), (1, 0): _share(3, 4, **changes)})


def test_a_rank_that_is_silent_is_missed(agreement: Agreement) -> None:
    with pytest.raises(ConfigError, match="expected one worker for each"):
        agreement.accept({(0, 0): _share(0, 4)})
