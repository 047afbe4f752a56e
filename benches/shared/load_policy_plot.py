"""A picture of the sweep of networks: the time of hits, as a multiple of recomputing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 860, 190, 40, 64, 34
_LOW, _TICKS = 0.05, (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#333}.soft{fill:#667}.grid{stroke:#e3e7ec}"
    ".even{stroke:#8a94a3;stroke-dasharray:4 3}.always{fill:#d1702f}.auto{fill:#1f77b4}"
    ".to99{stroke:#1f77b4;stroke-width:2}"
)


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """The picture, as SVG. It has a row for each network, and a logarithmic axis.

    A row shows `always` and `auto`, both against never loading. A line leads from the median of
    `auto` to its 99th percentile.
    """
    most = max(max(row["always"]["p50"], row["auto"]["p99"]) / row["never"]["p50"] for row in rows)
    high = max(2.0, most * 1.2)
    floor = _TOP + _ROW * len(rows)

    def x(ratio: float) -> float:
        part = math.log(max(ratio, _LOW) / _LOW) / math.log(high / _LOW)
        return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)

    marks = [
        f'<path class="{"even" if tick == 1 else "grid"}" d="M{x(tick):.1f} {_TOP - 8}V{floor}"/>'
        f'<text class="soft" x="{x(tick):.1f}" y="{floor + 18}" text-anchor="middle">'
        f"{tick:g}</text>"
        for tick in _TICKS
        if _LOW <= tick <= high
    ]
    for number, row in enumerate(rows):
        y, never = _TOP + _ROW * (number + 0.5), row["never"]
        always = row["always"]["p50"] / never["p50"]
        auto, to99 = (row["auto"][p] / never[p] for p in ("p50", "p99"))
        marks.append(
            f'<text x="{_LEFT - 14}" y="{y + 4}" text-anchor="end">{escape(row["network"])}</text>'
            f'<circle class="always" cx="{x(always):.1f}" cy="{y}" r="7">'
            f"<title>always: {always:.2f}</title></circle>"
            f'<path class="to99" d="M{x(auto):.1f} {y}H{x(max(auto, to99)):.1f}"/>'
            f'<circle class="auto" cx="{x(auto):.1f}" cy="{y}" r="4">'
            f"<title>auto: {auto:.2f}, p99 {to99:.2f}</title></circle>"
        )
    legend = (
        f'<circle class="always" cx="{_LEFT}" cy="24" r="7"/>'
        f'<text x="{_LEFT + 14}" y="28">always loading</text>'
        f'<path class="to99" d="M{_LEFT + 160} 24h24"/>'
        f'<circle class="auto" cx="{_LEFT + 160}" cy="24" r="4"/>'
        f'<text x="{_LEFT + 192}" y="28">--load-policy auto, and its 99th percentile</text>'
        f'<text class="soft" x="{_WIDTH - _RIGHT}" y="{floor + 38}" text-anchor="end">'
        "time to first token of a hit, recomputing = 1</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {floor + 50}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f"{legend}{''.join(marks)}</svg>\n"
    )
