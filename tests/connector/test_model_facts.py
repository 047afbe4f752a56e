"""What ranks tell of their models becomes the same facts, however a model is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import ConfigError
from penstock.vllm.messages import ModelShare
from penstock.vllm.model_facts import Rank, shared_facts

WHOLE = ModelShare(
    "files:abc",
    {f"model.layers.{layer}.rotary.cache": "cache" for layer in range(4)}
    | {f"model.layers.{layer}.attn.k_scale": f"scale {layer}" for layer in range(4)},
    {},
)


def part(first: int, end: int, share: ModelShare = WHOLE) -> ModelShare:
    """The share of a pipeline rank with some of the layers."""
    layers = {f".{layer}." for layer in range(first, end)}
    own = {n: d for n, d in share.buffers.items() if any(layer in n for layer in layers)}
    return replace(share, buffers=own)


def facts(shares: dict[Rank, ModelShare]) -> dict[str, object]:
    return shared_facts(shares)


def test_the_facts_do_not_depend_on_how_files_of_weights_are_cut() -> None:
    whole = facts({(0, 0): WHOLE})
    assert facts({(0, 0): WHOLE, (0, 1): WHOLE}) == whole
    assert facts({(0, 0): part(0, 3), (1, 0): part(3, 4)}) == whole
    assert facts({(p, t): part(2 * p, 2 * p + 2) for p in (0, 1) for t in (0, 1)}) == whole


def test_people_see_one_line_for_the_same_buffer_of_all_layers() -> None:
    found = facts({(0, 0): WHOLE})["buffers"]
    assert isinstance(found, dict)
    assert set(found) == {"model.layers.*.rotary.cache", "model.layers.*.attn.k_scale"}


@pytest.mark.parametrize("name", list(WHOLE.buffers))
def test_each_buffer_of_each_layer_counts(name: str) -> None:
    other = replace(WHOLE, buffers={**WHOLE.buffers, name: "other"})
    assert facts({(0, 0): other}) != facts({(0, 0): WHOLE})
    cut = {(0, 0): WHOLE, (0, 1): other}
    assert facts(cut) not in (facts({(0, 0): WHOLE}), facts({(0, 0): other}))
    swapped = {(0, 0): other, (0, 1): WHOLE}
    assert facts(cut) != facts(swapped)


def test_of_weights_in_memory_each_ranks_part_counts() -> None:
    ranks = [replace(WHOLE, weights=f"tensors:{name}") for name in "ab"]
    found = [
        facts({(0, 0): ranks[first], (0, 1): ranks[second]})["weights"]
        for first, second in ((0, 1), (1, 0), (0, 0))
    ]
    assert len({*found, facts({(0, 0): ranks[0]})["weights"], "tensors:a"}) == 5


def test_ranks_that_read_other_files_are_refused() -> None:
    other = replace(WHOLE, weights="files:def")
    with pytest.raises(ConfigError, match=r"\(0, 0\) has the weights files:abc, rank \(0, 1\)"):
        facts({(0, 0): WHOLE, (0, 1): other})


def test_code_counts_and_must_be_the_same_on_all_ranks() -> None:
    one, other = (replace(WHOLE, code={"modeling": digest}) for digest in "ab")
    found = [facts({(0, 0): share}) for share in (WHOLE, one, other)]
    assert found[0] != found[1] != found[2]
    with pytest.raises(ConfigError, match=r"rank \(0, 1\) has another modeling"):
        facts({(0, 0): one, (0, 1): other})


def test_who_tells_nothing_adds_nothing() -> None:
    assert shared_facts({(0, 0): None, (0, 1): None}) == {}
