"""The picture of a simulation."""

from __future__ import annotations

import math
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.words import size
from penstock.sim import POLICIES
from penstock.sim.plot import Line, Panel, draw
from tests.pictures import faults, words

ratios = st.floats(0, 1, allow_nan=False)


def lines_up_to(limit: float) -> st.SearchStrategy[list[Line]]:
    points = st.lists(st.tuples(st.floats(1, limit), ratios), min_size=1, max_size=80)
    return st.lists(points.map(sorted), min_size=1, max_size=6)


def polylines(picture: str) -> list[ElementTree.Element]:
    return [each for each in ElementTree.fromstring(picture).iter() if "polyline" in each.tag]


@given(lines_up_to(1e5), lines_up_to(1e13))
def test_no_label_crosses_another(times: list[Line], capacities: list[Line]) -> None:
    names = [*POLICIES, "Belady"]
    picture = draw(
        [
            Panel("hits over time", "minutes", dict(zip(names, times, strict=False))),
            Panel("hits", "capacity", dict(zip(names, capacities, strict=False)), size),
        ]
    )
    assert faults(picture) == []


def money_up_to(limit: float) -> st.SearchStrategy[list[Line]]:
    points = st.tuples(st.floats(1, 1e15), st.floats(-limit, limit, allow_nan=False))
    lines = st.lists(points, min_size=1, max_size=9).map(sorted)
    return st.lists(lines, min_size=1, max_size=3)


@given(money_up_to(5000), money_up_to(9.9e6), st.lists(ratios, min_size=1, max_size=9))
def test_money_and_times_fit_beside_their_axis(
    little: list[Line], much: list[Line], seconds: list[float]
) -> None:
    names = ["net", "GPU time saved", "costs"]
    title = "A pool of 1023.9 TiB saves 99.9% of prefill, but costs 123,456,789,012 a month more"
    times = {"TTFT p99": [(float(place + 1), each) for place, each in enumerate(seconds)]}
    picture = draw(
        [
            Panel(title, "pool, money", dict(zip(names, little, strict=False)), size, 1.0, ""),
            Panel(title, "pool, money", dict(zip(names, much, strict=False)), size, 1e-3, "k"),
            Panel("first tokens", "nodes", times, "{:,.0f}".format, 1000.0, " ms"),
        ]
    )
    assert faults(picture) == []


def test_what_is_lost_lies_below_the_line_of_zero() -> None:
    line = [(1.0, 20_000.0), (2.0, -40_000.0)]
    picture = draw([Panel("net", "pool", {"net": line}, size, 1e-3, "k")])
    assert {"20k", "0", "-20k", "-40k"} <= set(words(picture))
    marks = list(ElementTree.fromstring(picture).iter())
    (zero,) = (each for each in marks if each.get("class") == "line zero")
    height = float(zero.attrib["d"].split()[1].split("H")[0])
    (drawn,) = polylines(picture)
    gained, lost = (float(point.split(",")[1]) for point in drawn.attrib["points"].split())
    assert gained < height < lost
    assert lost - height == pytest.approx(2 * (height - gained), abs=0.2)


def test_time_is_linear_and_has_round_numbers() -> None:
    """Sixty windows of ten minutes: their middles span a factor of 119."""
    line = [((number + 0.5) / 6, 0.5) for number in range(60)]
    picture = draw([Panel("hits over time", "minutes", {"both": line})])
    (drawn,) = polylines(picture)
    across = [float(point.split(",")[0]) for point in drawn.attrib["points"].split()]
    steps = [b - a for a, b in pairwise(across)]
    assert max(steps) - min(steps) < 0.2
    assert {"0", "2", "4", "6", "8"} <= set(words(picture))


def test_capacities_are_marked_at_powers_of_two() -> None:
    line = [(share * 19.9e9, 0.5) for share in (0.01, 0.1, 1)]
    label = "{:.0f}".format
    picture = draw([Panel("hits", "capacity", {"lru": line}, label)])
    marked = [float(text) for text in words(picture) if text.isdigit()]
    assert len(marked) > 3
    assert all(math.log2(value).is_integer() for value in marked)


def test_every_line_has_a_colour_of_its_own() -> None:
    lines = {name: [(1.0, 0.1 * n), (2.0, 0.1 * n)] for n, name in enumerate([*POLICIES, "Belady"])}
    drawn = polylines(draw([Panel("hits", "nodes", lines)]))
    assert len({line.attrib["stroke"] for line in drawn}) == len(lines)


@pytest.mark.parametrize("count", [2, 3])
def test_lines_on_one_another_all_show(count: int) -> None:
    line = [(1.0, 0.5), (2.0, 0.6), (4.0, 0.7)]
    lines: dict[str, Line] = {str(number): line for number in range(count)}
    lines["apart"] = [(x, y / 2) for x, y in line]
    drawn = polylines(draw([Panel("hits", "nodes", lines)]))
    dashes = [each.get("stroke-dasharray") for each in drawn]
    assert dashes[0] is dashes[-1] is None
    over = drawn[1:count]
    assert all(each.get("stroke-dasharray") == f"7 {7 * (count - 1)}" for each in over)
    assert len({each.get("stroke-dashoffset") for each in over}) == count - 1
