"""How far a prompt can be loaded, against trying every length."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.vllm.groups import Group, Groups


@st.composite
def situations(draw: Any) -> tuple[Groups, list[list[bool]], int, int]:
    groups = Groups(
        [
            Group(
                index=i,
                kind="",
                block_size=draw(st.sampled_from([2, 4, 6])),
                window=draw(st.one_of(st.none(), st.integers(1, 20))),
                dtype="",
                layer_names=(),
            )
            for i in range(draw(st.integers(1, 3)))
        ]
    )
    units = draw(st.integers(0, 6))
    limit = units * groups.alignment
    present = [
        draw(st.lists(st.sampled_from([True, True, True, False]), max_size=limit // g.block_size))
        for g in groups
    ]
    return groups, present, draw(st.integers(0, units)) * groups.alignment, limit


def attended(group: Group, end: int) -> range:
    """Tokens before `end` that the layers of a group attend to from there."""
    return range(0 if group.window is None else max(0, end - group.window + 1), end)


@given(situations())
def test_the_longest_run_that_can_be_computed_on_from(
    situation: tuple[Groups, list[list[bool]], int, int],
) -> None:
    groups, present, first, limit = situation

    def is_loadable(end: int) -> bool:
        return all(
            token // group.block_size < len(has) and has[token // group.block_size]
            for group, has in zip(groups, present, strict=True)
            for token in attended(group, end)
            if token >= first
        )

    ends = [end for end in range(first, limit + 1, groups.alignment) if is_loadable(end)]
    assert groups.reach(present, first, limit) == max([first, *ends])


@given(situations())
def test_what_is_needed_is_what_is_attended_to(
    situation: tuple[Groups, list[list[bool]], int, int],
) -> None:
    groups, _, first, end = situation
    expected = [
        (position, block)
        for position, group in enumerate(groups)
        for block in sorted({t // group.block_size for t in attended(group, end) if t >= first})
    ]
    assert list(groups.needed(first, end)) == expected
