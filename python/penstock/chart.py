"""Charts as inline SVG. Every mark names a class of the page's style, which gives its colour."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from penstock.axis import decimal_label, decimal_step, text_width

_WIDTH = 960
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 16, 34, 10
_TEXT = 12
"""Size of the page's text in a chart."""


@dataclass(frozen=True)
class Bar:
    """A bar from zero to `value`, with a line from there to `upper`."""

    kind: str
    value: float
    upper: float
    label: str


@dataclass(frozen=True)
class Dot:
    """A value, and the value that it is compared with (`other`)."""

    kind: str
    value: float
    other: float
    title: str


@dataclass(frozen=True)
class Column:
    """A column of stacked parts, by their kind, the lowest first."""

    parts: Mapping[str, float]
    title: str


def grouped_bars(groups: Sequence[tuple[str, Sequence[Bar]]], unit: str) -> str:
    """Horizontal bars, with a group under each heading. After each bar stand its `value` and its
    `upper`."""
    bar, gap, heading = 20, 5, 24
    bars = [each for _, group in groups for each in group]
    left = 20 + max(text_width(each.label, _TEXT) for each in bars)
    behind = 16 + max(
        text_width(_value(each, unit), _TEXT, bold=True) + 8 + text_width(_upper(each), _TEXT)
        for each in bars
    )
    factor = (_WIDTH - left - behind) / max(1.0, *(each.upper for each in bars))
    marks: list[str] = []
    y = 4.0
    for name, group in groups:
        y += heading
        marks.append(f'<text class="value" x="{left:.1f}" y="{y - 8:.0f}">{escape(name)}</text>')
        for each in group:
            end, upper = left + each.value * factor, left + each.upper * factor
            middle, value = y + bar / 2, _value(each, unit)
            after = upper + 16 + text_width(value, _TEXT, bold=True)
            marks.append(
                f'<text x="{left - 10:.1f}" y="{middle + 4:.0f}" text-anchor="end">'
                f"{escape(each.label)}</text>"
                f'<path class="stem" d="M{end:.1f} {middle:.0f}H{upper:.1f}"/>'
                f'<rect class="{each.kind}" x="{left:.1f}" y="{y:.0f}" '
                f'width="{max(end - left, 1.5):.1f}" height="{bar}" rx="2"/>'
                f'<text class="value" x="{upper + 8:.1f}" y="{middle + 4:.0f}">'
                f"{escape(value)}</text>"
                f'<text x="{after:.1f}" y="{middle + 4:.0f}">{_upper(each)}</text>'
            )
            y += bar + gap
        y += 8
    return _svg(y, "".join(marks))


def _value(bar: Bar, unit: str) -> str:
    return f"{bar.value:,.0f} {unit}"


def _upper(bar: Bar) -> str:
    return f"to {bar.upper:,.0f}"


def dots(values: Sequence[Dot], unit: str) -> str:
    """A dot for each value, joined by a stem to a grey dot for the value it is compared with."""
    height = 260
    axis = _Axis(max(max(each.value, each.other) for each in values), height, unit)
    step = (_WIDTH - _LEFT - _RIGHT) / len(values)
    radius = min(5.5, max(2.5, step / 3))
    marks = [axis.svg()]
    for number, each in enumerate(values):
        x = _LEFT + step * (number + 0.5)
        here, there = axis.y(each.value), axis.y(each.other)
        marks.append(
            f"<g><title>{escape(each.title)}</title>"
            f'<path class="stem" d="M{x:.1f} {here:.1f}V{there:.1f}"/>'
            f'<circle class="plain" cx="{x:.1f}" cy="{there:.1f}" r="{radius:.1f}"/>'
            f'<circle class="{each.kind}" cx="{x:.1f}" cy="{here:.1f}" r="{radius:.1f}"/></g>'
        )
    return _svg(height, "".join(marks))


def stacked_columns(columns: Sequence[Column], unit: str) -> str:
    """A column of stacked parts for each of `columns`."""
    height = 220
    axis = _Axis(max(sum(each.parts.values()) for each in columns), height, unit)
    step = (_WIDTH - _LEFT - _RIGHT) / len(columns)
    marks = [axis.svg()]
    for number, each in enumerate(columns):
        x = _LEFT + step * (number + 0.14)
        below = 0.0
        marks.append(f"<g><title>{escape(each.title)}</title>")
        for kind, part in each.parts.items():
            top, bottom = axis.y(below + part), axis.y(below)
            if part:
                marks.append(
                    f'<rect class="{kind}" x="{x:.1f}" y="{top:.1f}" '
                    f'width="{step * 0.72:.1f}" height="{bottom - top:.1f}"/>'
                )
            below += part
        marks.append("</g>")
    return _svg(height, "".join(marks))


def scatter(
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    unit: str,
    across: str,
) -> str:
    """Points (x, y), by their kind. Both axes begin at zero; `across` names the lower one."""
    height, foot = 320, 46
    points = [point for _, some in series for point in some]
    axis = _Axis(max(y for _, y in points), height - foot, unit)
    end = max(1.0, *(x for x, _ in points))
    step = decimal_step(end)
    steps = math.ceil(end / step - 1e-9)
    right = max(_RIGHT, 2 + text_width(decimal_label(steps * step, step), _TEXT) / 2)
    factor = (_WIDTH - _LEFT - right) / (steps * step)
    marks = [
        axis.svg(),
        f'<text x="{_WIDTH - _RIGHT}" y="{height - 8}" text-anchor="end">{escape(across)}</text>',
    ]
    for number in range(steps + 1):
        marks.append(
            f'<text x="{_LEFT + number * step * factor:.1f}" y="{height - foot + 14}" '
            f'text-anchor="middle">{decimal_label(number * step, step)}</text>'
        )
    for kind, some in series:
        # A line of no length with round ends is a dot. One path is much less text than circles.
        places = "".join(f"M{_LEFT + x * factor:.1f} {axis.y(y):.1f}h0" for x, y in some)
        marks.append(f'<path class="cloud {kind}" d="{places}"/>')
    return _svg(height, "".join(marks))


class _Axis:
    """A vertical axis from zero, with round numbers at its lines and the unit above them."""

    def __init__(self, largest: float, height: float, unit: str) -> None:
        self._step = decimal_step(max(largest, 1.0))
        self._lines = max(1, math.ceil(largest / self._step - 1e-9))
        self._floor = height - _BOTTOM
        self._factor = (self._floor - _TOP) / (self._lines * self._step)
        self._unit = unit

    def y(self, value: float) -> float:
        return self._floor - value * self._factor

    def svg(self) -> str:
        marks = []
        for line in range(self._lines + 1):
            value = line * self._step
            y = self.y(value)
            marks.append(
                f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
                f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
                f"{decimal_label(value, self._step)}</text>"
            )
        marks.append(
            f'<text x="{_LEFT - 8}" y="{_TOP - 18}" text-anchor="end">{escape(self._unit)}</text>'
        )
        return "".join(marks)


def _svg(height: float, marks: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img">{marks}</svg>'
