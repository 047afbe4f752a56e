"""A picture of the Grafana dashboard: its own queries' answers over a demo, drawn without Grafana.

Usage: python -m scripts.docs.dashboard

It draws docs/pictures/dashboard.svg from scripts/docs/dashboard.json, which `python -m
tests.watched scripts/docs/dashboard.json` records.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from penstock.axis import byte_step, decimal_label, decimal_step, text_width

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy/grafana/penstock.json"
RECORDED = Path(__file__).with_suffix(".json")
PICTURE = ROOT / "docs/pictures/dashboard.svg"

Points = Sequence[Sequence[float]]
"""Pairs: seconds since the start, value."""

_COLUMN, _LINE = 40, 26
"""Pixels of a column and of a line of Grafana's grid."""
_MARGIN, _GAP = 8, 8
_SECONDS = 150
"""The time that is shown. The servers are still loading then: some panels show the last value."""
_LEFT, _TOP = 58, 44
_TEXT = 12
_COLOURS = ("#1f77b4", "#d1702f", "#2a9d5c", "#8c5fbf", "#b8860b", "#5b6673")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:11px;font-weight:600}"
    ".big{font:34px system-ui,sans-serif;fill:#1f77b4}.soft{fill:#667}"
    ".panel{fill:#fff;stroke:#d5dae1}.grid{stroke:#e8ebef}.line{fill:none;stroke-width:1.6}"
)


@dataclass(frozen=True)
class _Box:
    """A panel's place in the picture."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height


def draw(dashboard: Mapping[str, Any], recorded: Mapping[str, Any]) -> str:
    """The picture, as SVG: each panel at its place, with the recorded answers. Panels that came
    after the recording are left out."""
    panels = [each for each in dashboard["panels"] if each.get("title") in recorded["panels"]]
    lines = max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in panels)
    width, height = 24 * _COLUMN + 2 * _MARGIN, lines * _LINE + 2 * _MARGIN
    seconds = min(_SECONDS, recorded["seconds"])
    marks = "".join(
        _panel(each, _until(seconds, recorded["panels"][each["title"]]), seconds) for each in panels
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#f3f5f7"/>{marks}</svg>\n'
    )


def _until(seconds: float, series: Mapping[str, Points]) -> dict[str, Points]:
    """The points up to a time; without the series that have none."""
    kept = {
        name: [point for point in points if point[0] <= seconds] for name, points in series.items()
    }
    return {name: points for name, points in kept.items() if points}


def _panel(panel: Mapping[str, Any], series: Mapping[str, Points], seconds: float) -> str:
    place = panel["gridPos"]
    box = _Box(
        _MARGIN + place["x"] * _COLUMN + _GAP / 2,
        _MARGIN + place["y"] * _LINE + _GAP / 2,
        place["w"] * _COLUMN - _GAP,
        place["h"] * _LINE - _GAP,
    )
    unit = panel["fieldConfig"]["defaults"].get("unit", "short")
    is_stat = panel["type"] == "stat"
    inside = _stat(series, unit, box) if is_stat else _chart(series, unit, seconds, box)
    return (
        f'<rect class="panel" x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" '
        f'height="{box.height:g}" rx="3"/>'
        f'<text class="title" x="{box.x + 12:g}" y="{box.y + 20:g}">{escape(panel["title"])}</text>'
        f"{inside}"
    )


def _stat(series: Mapping[str, Points], unit: str, box: _Box) -> str:
    last = next((points[-1][1] for points in series.values() if points), None)
    shown = "no data" if last is None else _shown(last, unit)
    return (
        f'<text class="big" x="{box.x + box.width / 2:g}" y="{box.y + box.height / 2 + 24:g}" '
        f'text-anchor="middle">{escape(shown)}</text>'
    )


def _shown(value: float, unit: str) -> str:
    return f"{value:.1%}" if unit == "percentunit" else f"{value:,.2f}"


def _chart(series: Mapping[str, Points], unit: str, seconds: float, box: _Box) -> str:
    legend, legend_height = _legend(list(series), box)
    left, right = box.x + _LEFT, box.right - 22
    ceiling, floor = box.y + _TOP, box.bottom - 26 - legend_height
    top = max((value for points in series.values() for _, value in points), default=0.0)
    low = min((value for points in series.values() for _, value in points), default=0.0)
    name, factor, step = _scale(max(top, -low), unit)
    first = math.floor(min(0.0, low) * factor / step + 0.05)
    last = max(first + 1, math.ceil(top * factor / step - 1e-9))

    def across(moment: float) -> float:
        return left + moment / seconds * (right - left)

    def up(value: float) -> float:
        return floor - (value * factor / step - first) / (last - first) * (floor - ceiling)

    marks = [
        f'<text class="soft" x="{left - 6:g}" y="{ceiling - 9:g}" text-anchor="end">{name}</text>'
    ]
    for line in range(first, last + 1):
        y = up(line * step / factor)
        marks.append(
            f'<path class="grid" d="M{left:g} {y:.1f}H{right:g}"/>'
            f'<text class="soft" x="{left - 6:g}" y="{y + 4:.1f}" text-anchor="end">'
            f"{decimal_label(line * step, step)}</text>"
        )
    every = int(decimal_step(seconds, 4 if box.width < 400 else 8))
    for moment in range(0, int(seconds) + 1, max(1, every)):
        marks.append(
            f'<text class="soft" x="{across(moment):.1f}" y="{floor + 17:g}" '
            f'text-anchor="middle">{moment} s</text>'
        )
    for number, points in enumerate(series.values()):
        if drawn := _path([(moment, across(moment), up(value)) for moment, value in points]):
            colour = _COLOURS[number % len(_COLOURS)]
            marks.append(f'<path class="line" stroke="{colour}" d="{drawn}"/>')
    return "".join(marks) + legend


def _scale(most: float, unit: str) -> tuple[str, float, float]:
    """The unit's name on the axis, what a value is multiplied with for it, and the step there."""
    if unit == "Bps":
        step = byte_step(int(max(most, 1.0)), 4)
        power = min(3, int(math.log2(step)) // 10)
        return (
            f"{('B', 'KiB', 'MiB', 'GiB')[power]}/s",
            1 / (1 << 10 * power),
            step / (1 << 10 * power),
        )
    if unit == "s" and 0 < most < 1:
        return "ms", 1e3, decimal_step(most * 1e3, 4)
    return {"s": "s", "percentunit": ""}.get(unit, ""), 1.0, decimal_step(most or 1.0, 4)


def _path(points: Sequence[tuple[float, float, float]]) -> str:
    """A line through the points; it is broken where seconds are left out."""
    drawn = ""
    before = -math.inf
    for moment, x, y in points:
        drawn += f"{'L' if moment - before < 2 else 'M'}{x:.1f} {y:.1f}"
        before = moment
    return drawn


def _legend(names: Sequence[str], box: _Box) -> tuple[str, float]:
    """Names with their colours, in lines at the panel's bottom; and the lines' height."""
    lines: list[list[tuple[float, str, int]]] = [[]]
    x = box.x + 12
    for number, name in enumerate(names):
        room = 18 + text_width(name, _TEXT) + 14
        if x + room > box.right and lines[-1]:
            lines.append([])
            x = box.x + 12
        lines[-1].append((x, name, number))
        x += room
    marks = []
    for place, line in enumerate(reversed(lines)):
        y = box.bottom - 10 - 18 * place
        for x, name, number in line:
            colour = _COLOURS[number % len(_COLOURS)]
            marks.append(
                f'<path d="M{x:.1f} {y - 4:g}h12" stroke="{colour}" stroke-width="3"/>'
                f'<text x="{x + 18:.1f}" y="{y:g}">{escape(name)}</text>'
            )
    return "".join(marks), 18.0 * len(lines)


def main() -> None:
    """Draws the picture anew."""
    recorded = json.loads(RECORDED.read_text())
    PICTURE.write_text(draw(json.loads(DASHBOARD.read_text()), recorded))


if __name__ == "__main__":
    main()
