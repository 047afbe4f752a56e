"""A simulation as one SVG picture: hits over capacity, over nodes and over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Line = Sequence[tuple[float, float]]

_WIDTH, _LEFT, _RIGHT, _TOP, _TALL, _GAP = 960, 84, 170, 44, 220, 86
_COLOURS = ("#1f77b4", "#d1702f", "#4b9b57", "#8a5fb0", "#8a94a3")
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#333}.soft{fill:#667}.value{font-weight:600}"
    ".line{stroke:#d5d9e0;fill:none}.data{fill:none;stroke-width:2}"
)


def draw(panels: Sequence[tuple[str, str, Mapping[str, Line]]]) -> str:
    """Panels under one another, each with a title, what its x axis is, and lines of hit ratios.

    An x axis whose values span more than a factor of 20, all over zero, is logarithmic.
    """
    height = len(panels) * (_TOP + _TALL + _GAP)
    marks = [_panel(number * (_TOP + _TALL + _GAP), *panel) for number, panel in enumerate(panels)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(marks)}</svg>\n"
    )


def _panel(top: float, title: str, axis: str, lines: Mapping[str, Line]) -> str:
    values = [x for line in lines.values() for x, _ in line]
    low, high = min(values), max(values)
    is_log = low > 0 and high / low > 20
    most = max((y for line in lines.values() for _, y in line), default=0.0)
    ceiling = min(1.0, math.ceil(max(most, 0.01) * 10) / 10)
    wide, floor = _WIDTH - _LEFT - _RIGHT, top + _TOP + _TALL

    def across(x: float) -> float:
        if high == low:
            return _LEFT + wide / 2
        part = math.log(x / low) / math.log(high / low) if is_log else (x - low) / (high - low)
        return _LEFT + part * wide

    def up(y: float) -> float:
        return floor - y / ceiling * _TALL

    marks = [f'<text class="value" x="{_LEFT}" y="{top + 24}">{escape(title)}</text>']
    for step in range(6):
        y = ceiling * step / 5
        marks.append(
            f'<path class="line" d="M{_LEFT} {up(y):.1f}H{_LEFT + wide}"/>'
            f'<text class="soft" x="{_LEFT - 8}" y="{up(y) + 4:.1f}" text-anchor="end">'
            f"{y:.0%}</text>"
        )
    ticks = sorted(set(values))
    for x in ticks if len(ticks) <= 9 else (low, high):
        marks.append(
            f'<text class="soft" x="{across(x):.1f}" y="{floor + 18}" text-anchor="middle">'
            f"{x:.4g}</text>"
        )
    marks.append(
        f'<text class="soft" x="{_LEFT + wide}" y="{floor + 38}" text-anchor="end">'
        f"{escape(axis)}</text>"
    )
    for number, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line)
        marks.append(f'<polyline class="data" stroke="{colour}" points="{points}"/>')
        marks.extend(
            f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3.5" fill="{colour}">'
            f"<title>{escape(name)}: {y:.1%}</title></circle>"
            for x, y in line
        )
        y = top + _TOP + 14 + 22 * number
        marks.append(
            f'<rect x="{_LEFT + wide + 16}" y="{y - 10}" width="12" height="12" fill="{colour}"/>'
            f'<text x="{_LEFT + wide + 34}" y="{y}">{escape(name)}</text>'
        )
    return "".join(marks)
