"""Figures and the report made of them."""

from __future__ import annotations

import io
import json
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lab.demo.engine import Counters
from lab.demo.figures import Figures, summarise
from lab.demo.program import show
from lab.demo.replay import Comparison, Exchange, Situation
from lab.demo.report import render
from lab.latency import percentile
from penstock import chart
from penstock.completions import Answer
from tests.pictures import faults

FIRST_TOKEN = {
    Situation.COLD: 15.0,
    Situation.OTHER_NODE: 0.1,
    Situation.SAME_NODE: 0.05,
}


def comparison(number: int, situation: Situation, *, equal: bool = True) -> Comparison:
    prompt = tuple(range(1000))
    loaded = 896 if situation is Situation.OTHER_NODE else 0
    cached = 0 if situation is Situation.COLD else 896
    answer = Answer((1, 2, 3), FIRST_TOKEN[situation] + number / 1000, 2.0, cached)
    exchange = Exchange(
        number, 0, number % 2, situation, prompt, answer, Counters(loaded, loaded * 16384, 0)
    )
    return Comparison(exchange, Answer((1, 2, 3) if equal else (1, 2, 4), 16.0, 17.0, 0))


def figures(*, equal: bool = True, loaded: int = 8960) -> Figures:
    comparisons = [comparison(n, situation) for situation in Situation for n in range(10)]
    comparisons[7] = comparison(7, Situation.COLD, equal=equal)
    return summarise(
        "a <workload>",
        ["cut & dried"],
        "valkey://cache.example:6379",
        {"vLLM": "0.32.0"},
        comparisons,
        Counters(loaded, loaded * 16384, 1 << 30),
    )


def test_rows_hold_what_each_situation_met() -> None:
    row = figures().row(Situation.OTHER_NODE)
    assert row is not None
    assert (row.requests, row.prompt_tokens) == (10, 10_000)
    assert (row.loaded_tokens, row.local_tokens) == (8960, 0)
    assert row.penstock.p50 == pytest.approx(0.104)
    assert row.penstock.p99 == pytest.approx(0.109)
    assert row.recomputed.p50 == 16.0


def test_a_run_fails_if_an_output_differs_or_nothing_was_loaded() -> None:
    assert figures().failures == ()
    assert "1 of 30 outputs differ" in figures(equal=False).failures[0]
    assert figures(loaded=0).failures == ("nothing was loaded from the pool",)
    assert len(figures(equal=False, loaded=0).failures) == 2


def test_json_says_the_same() -> None:
    document = json.loads(json.dumps(figures(equal=False).as_json()))
    assert document["outputs_equal"] == 29
    assert document["prompt_tokens"] == 30_000
    assert document["time_to_first_token"]["warm on the other node"]["loaded_tokens"] == 8960


def test_the_report_needs_nothing_else_and_escapes_what_it_shows() -> None:
    page = render(figures())
    assert not re.search(r"(src|href)\s*=|@import|url\(|<script|https?://", page)
    assert "a &lt;workload&gt;" in page
    assert "cut &amp; dried" in page
    assert "30 / 30" in page
    assert "153.8&times; sooner" in page
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) == 3
    for drawing in drawings:
        ElementTree.fromstring(drawing)


def test_a_failed_run_says_so_at_the_top() -> None:
    page = render(figures(equal=False))
    assert "<h1>Penstock demo: failed</h1>" in page
    assert "29 / 30" in page
    assert ">differs<" in page
    assert "sooner" not in page


def chart_style() -> str:
    """The page's rules for charts."""
    return "".join(re.findall(r"svg text[^{]*\{[^}]*\}", render(figures())))


@pytest.mark.parametrize("largest", [0.4, 3.1, 9, 50, 3025, 1e6])
def test_numbers_at_an_axis_are_those_of_their_lines(largest: float) -> None:
    """Lines at 12.5, 25, 37.5 and 50 said 12, 25, 38 and 50."""
    drawing = chart.dots([chart.Dot("pool", largest, 0, "")], "ms")
    root = ElementTree.fromstring(drawing)
    unit, *_ = sorted((float(text.attrib["y"]), text.text) for text in root.iter("text"))
    assert unit[1] == "ms"
    lines = [
        (float(text.attrib["y"]), float((text.text or "").replace(",", "")))
        for text in root.iter("text")
        if text.text != "ms"
    ]
    (floor, zero), (_, step) = lines[:2]
    assert zero == 0
    for number, (y, value) in enumerate(lines):
        assert value == pytest.approx(number * step)
        assert floor - y == pytest.approx(number * (floor - lines[1][0]), abs=0.2)
    assert lines[-1][1] >= largest


values = st.floats(0, 1e7, allow_nan=False)


@given(st.lists(st.tuples(values, values), min_size=1, max_size=200))
def test_charts_stay_inside_their_frame(pairs: list[tuple[float, float]]) -> None:
    drawings = [
        chart.dots([chart.Dot("pool", value, other, "<&>") for value, other in pairs], "ms"),
        chart.stacked_columns(
            [chart.Column({"pool": value, "cold": other}, "<&>") for value, other in pairs], "ms"
        ),
        chart.grouped_bars(
            [("<&>", [chart.Bar("pool", min(pair), max(pair), "&") for pair in pairs])], "ms"
        ),
        chart.scatter([("pool", pairs), ("plain", [])], "ms", "s <&>"),
    ]
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        _, _, width, height = map(float, root.attrib["viewBox"].split())
        assert faults(drawing, chart_style()) == []
        for mark in root.iter():
            for name in ("x", "cx"):
                assert 0 <= float(mark.get(name, 0)) <= width
            for name in ("y", "cy"):
                assert 0 <= float(mark.get(name, 0)) <= height
            assert float(mark.get("height", 0)) >= 0


@given(st.lists(st.floats(0, 10), min_size=1), st.floats(0.01, 1))
def test_percentiles_are_values_that_enough_others_do_not_exceed(
    seconds: list[float], share: float
) -> None:
    found = percentile(seconds, share)
    assert found in seconds
    assert sum(value <= found for value in seconds) >= share * len(seconds) - 1e-9
    assert sum(value < found for value in seconds) < share * len(seconds)


def test_the_table_fits_a_terminal_with_all_its_numbers() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    show(figures(), console)
    lines = console.export_text().splitlines()
    assert all(len(line) <= 80 for line in lines)
    text = " ".join(lines)
    for number in ("15,004 / 15,009", "104 / 109", "54 / 59", "16,000 / 16,000", "10,000", "8,960"):
        assert number in text
    assert "…" not in text
    assert "outputs equal to the run without Penstock: 30 of 30" in text
