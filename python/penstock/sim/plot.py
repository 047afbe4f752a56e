"""A simulation as one SVG picture: hits, times or money over pool sizes, nodes or time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from penstock.axis import decimal_label, decimal_step, octaves

Line = Sequence[tuple[float, float]]

_WIDTH, _LEFT, _RIGHT, _TOP, _TALL, _GAP = 960, 84, 170, 44, 220, 70
_COLOURS = ("#1f77b4", "#d1702f", "#4b9b57", "#8a5fb0", "#8a94a3", "#222", "#b8432f")
_DASH = 7
_MANY = 20
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#333}.soft{fill:#667}.value{font-weight:600}"
    ".line{stroke:#d5d9e0;fill:none}.zero{stroke:#667}.data{fill:none;stroke-width:2}"
)


@dataclass(frozen=True)
class Panel:
    """Lines of values over one axis.

    With `label` the axis is logarithmic, and `label` writes the values at its powers of two.
    `factor` and `unit` say how values are written: a hit ratio of 0.5 as 50%.
    """

    title: str
    axis: str
    lines: Mapping[str, Line]
    label: Callable[[float], str] | None = None
    factor: float = 100.0
    unit: str = "%"


def draw(panels: Sequence[Panel]) -> str:
    """The picture, with one panel below the other. If lines lie on one another, all but the first
    are dashed."""
    height = len(panels) * (_TOP + _TALL + _GAP)
    marks = [_panel(number * (_TOP + _TALL + _GAP), panel) for number, panel in enumerate(panels)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(marks)}</svg>\n"
    )


def _panel(top: float, panel: Panel) -> str:
    axis = _Across(panel)
    values = [y * panel.factor for line in panel.lines.values() for _, y in line]
    high, low = max([0.0, *values]), min([0.0, *values])
    step = decimal_step(max(high - low, 1.0))
    lowest = math.floor(low / step + 1e-9)
    highest = max(math.ceil(high / step - 1e-9), lowest + 1)
    floor = top + _TOP + _TALL

    def up(y: float) -> float:
        return floor - (y * panel.factor / step - lowest) / (highest - lowest) * _TALL

    marks = [f'<text class="value" x="{_LEFT}" y="{top + 24}">{escape(panel.title)}</text>']
    for line in range(lowest, highest + 1):
        y = up(line * step / panel.factor)
        kind = "line zero" if line == 0 > lowest else "line"
        # Nothing is nothing, in thousands or in millions.
        unit = "" if line == 0 and panel.unit.isalpha() else escape(panel.unit)
        marks.append(
            f'<path class="{kind}" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
            f'<text class="soft" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
            f"{decimal_label(line * step, step)}{unit}</text>"
        )
    for value, label in axis.ticks:
        marks.append(
            f'<text class="soft" x="{axis.at(value):.1f}" y="{floor + 20}" text-anchor="middle">'
            f"{escape(label)}</text>"
        )
    marks.append(
        f'<text class="soft" x="{_WIDTH - _RIGHT}" y="{floor + 40}" text-anchor="end">'
        f"{escape(panel.axis)}</text>"
    )
    places = {name: [(axis.at(x), up(y)) for x, y in line] for name, line in panel.lines.items()}
    dashes = _dashes(places)
    for number, (name, data) in enumerate(panel.lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places[name])
        drawn = f'class="data" stroke="{colour}"{dashes[name]}'
        marks.append(f'<polyline {drawn} points="{points}"/>')
        marks.extend(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3.5 if len(data) <= _MANY else 2}" '
            f'fill="{colour}"><title>{escape(name)}: {value * panel.factor:,.4g}'
            f"{escape(panel.unit)}</title></circle>"
            for (x, y), (_, value) in zip(places[name], data, strict=True)
        )
        left, y = _WIDTH - _RIGHT + 14, top + _TOP + 10 + 22 * number
        marks.append(
            f'<path {drawn} d="M{left} {y}h28"/>'
            f'<text x="{left + 36}" y="{y + 4}">{escape(name)}</text>'
        )
    return "".join(marks)


def _dashes(places: Mapping[str, Line]) -> dict[str, str]:
    """SVG attributes of the lines, by name.

    A line that runs within two pixels of an earlier one, at most of its points, is drawn with gaps.
    The gaps are such that all lines in the same place show."""
    over: dict[str, list[str]] = {}
    for name, line in places.items():
        under = next((base for base in over if _is_on(line, places[base])), None)
        if under is None:
            over[name] = []
        else:
            over[under].append(name)
    found = dict.fromkeys(over, "")
    for names in over.values():
        for number, name in enumerate(names):
            gaps = f"{_DASH} {_DASH * len(names)}"
            found[name] = f' stroke-dasharray="{gaps}" stroke-dashoffset="{-_DASH * (number + 1)}"'
    return found


def _is_on(line: Line, other: Line) -> bool:
    near = sum(abs(a - b) < 2 for (_, a), (_, b) in zip(line, other, strict=False))
    return 2 * near > len(line)


class _Across:
    """The axis along the bottom."""

    def __init__(self, panel: Panel) -> None:
        values = [x for line in panel.lines.values() for x, _ in line]
        low, high = min(values), max(values)
        self._is_log = panel.label is not None
        if panel.label is not None:
            self.ticks = [(value, panel.label(value)) for value in octaves(low, high)]
        else:
            low, step = 0.0, decimal_step(high or 1.0, most=8)
            ticks = [step * tick for tick in range(math.floor(high / step + 1e-9) + 1)]
            self.ticks = [(value, decimal_label(value, step)) for value in ticks]
        self._low, self._high = low, high

    def at(self, value: float) -> float:
        low, high = self._low, self._high
        wide = _WIDTH - _LEFT - _RIGHT
        if high == low:
            return _LEFT + wide / 2
        if self._is_log:
            return _LEFT + math.log(value / low) / math.log(high / low) * wide
        return _LEFT + (value - low) / (high - low) * wide
