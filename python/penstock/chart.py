"""Charts as inline SVG. Colours come from the page's style: every mark names a class of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH = 960
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 30


@dataclass(frozen=True)
class Bar:
    """A bar from zero to `value`, with a line on to `upper`."""

    kind: str
    value: float
    upper: float
    label: str


@dataclass(frozen=True)
class Dot:
    """A value beside the one that it is compared with."""

    kind: str
    value: float
    other: float
    title: str


@dataclass(frozen=True)
class Column:
    """Parts that lie on one another, by their kind, the lowest first."""

    parts: Mapping[str, float]
    title: str


def grouped_bars(groups: Sequence[tuple[str, Sequence[Bar]]], unit: str) -> str:
    """Lying bars, a group under each heading."""
    bar, gap, heading = 20, 5, 24
    left = 130
    scale = _Scale(max(each.upper for _, group in groups for each in group), left)
    marks: list[str] = []
    y = 4.0
    for name, group in groups:
        y += heading
        marks.append(f'<text class="value" x="{left}" y="{y - 8:.0f}">{escape(name)}</text>')
        for each in group:
            end, upper, middle = scale.x(each.value), scale.x(each.upper), y + bar / 2
            marks.append(
                f'<text x="{left - 10}" y="{middle + 4:.0f}" text-anchor="end">'
                f"{escape(each.label)}</text>"
                f'<path class="stem" d="M{end:.1f} {middle:.0f}H{upper:.1f}"/>'
                f'<rect class="{each.kind}" x="{left}" y="{y:.0f}" '
                f'width="{max(end - left, 1.5):.1f}" height="{bar}" rx="2"/>'
                f'<text class="value" x="{upper + 8:.1f}" y="{middle + 4:.0f}">'
                f"{each.value:,.0f} {unit}</text>"
            )
            y += bar + gap
        y += 8
    return _svg(y, "".join(marks))


def dots(values: Sequence[Dot], unit: str) -> str:
    """A dot for each value, joined by a stem to a grey one for what it is compared with."""
    height = 280
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
    """A column for each, its parts on one another."""
    height = 240
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


class _Scale:
    """Maps values to places along a lying bar, with room for a number behind the longest."""

    def __init__(self, largest: float, left: float) -> None:
        self._left = left
        self._factor = (_WIDTH - left - 110) / max(largest, 1.0)

    def x(self, value: float) -> float:
        return self._left + value * self._factor


class _Axis:
    """An upright axis from zero, with round numbers at its lines."""

    def __init__(self, largest: float, height: float, unit: str) -> None:
        largest = max(largest, 1.0)
        rough = largest / 4
        power = 10.0 ** math.floor(math.log10(rough))
        self._step = next(
            s * power for s in (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if s * power >= rough
        )
        self._lines = math.ceil(largest / self._step)
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
                f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:,.0f}</text>'
            )
        marks.append(f'<text x="{_LEFT + 4}" y="{_TOP + 14}">{escape(self._unit)}</text>')
        return "".join(marks)


def _svg(height: float, marks: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img">{marks}</svg>'
