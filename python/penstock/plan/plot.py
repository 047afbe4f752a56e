"""A plan as one SVG picture: a column for each rank, with weights, KV and idle memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from penstock.axis import byte_step, decimal_label, decimal_step, text_width
from penstock.plan.partition import Partition
from penstock.plan.proposal import Plan
from penstock.plan.table import size

_WIDTH, _LEFT, _RIGHT, _TOP, _HEIGHT = 960, 84, 20, 58, 240
_FRONTIER_HEIGHT = 300
_TEXT = 13
_COLOURS = {"weights": "#8a94a3", "KV": "#1f77b4", "idle": "#f2c6a0"}
_STYLE = (
    f"text{{font:{_TEXT}px system-ui,sans-serif;fill:#333}}"
    ".soft{fill:#667}.value{font-weight:600}.line{stroke:#d5d9e0;fill:none}"
    ".dot{paint-order:stroke;stroke:#fff;stroke-width:4px}"
)


def draw(plans: Mapping[str, Plan], frontier: Sequence[Partition] = ()) -> str:
    """The picture: plans side by side, and below them the frontier of blocks and balance."""
    marks = [_legend(), _columns(plans)]
    height = _TOP + _HEIGHT + 92
    if len(frontier) > 1:
        marks.append(_frontier(frontier, height))
        height += _FRONTIER_HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(marks)}</svg>\n"
    )


def _legend() -> str:
    marks = []
    for number, (name, colour) in enumerate(_COLOURS.items()):
        x = _LEFT + number * 110
        marks.append(
            f'<rect x="{x}" y="14" width="12" height="12" fill="{colour}"/>'
            f'<text x="{x + 18}" y="25">{name}</text>'
        )
    return "".join(marks)


def _columns(plans: Mapping[str, Plan]) -> str:
    groups = [
        (name, plan, outcome)
        for name, plan in plans.items()
        for outcome in plan.outcomes or (None,)
    ]
    bars = sum(len(plan.partition) for _, plan, _ in groups)
    slot = (_WIDTH - _LEFT - _RIGHT) / (bars + len(groups))
    highest = max(
        plan.weights[rank] + (outcome.split.given[rank] if outcome else 0)
        for _, plan, outcome in groups
        for rank in range(len(plan.partition))
    )
    step = byte_step(highest)
    most = -(-highest // step) * step
    floor = _TOP + _HEIGHT
    marks = _scale(most, step)
    x = _LEFT + slot / 2
    for name, plan, outcome in groups:
        middle = x + slot * len(plan.partition) / 2
        for rank, layers in enumerate(plan.partition):
            label = f"{layers} layers"
            if text_width(label, _TEXT) > slot - 4:
                label = str(layers)
            parts = {"weights": plan.weights[rank], "KV": 0, "idle": 0}
            if outcome is not None:
                parts |= {"KV": outcome.split.used[rank], "idle": outcome.split.idle[rank]}
            y = float(floor)
            title = ", ".join(f"{part} {size(nbytes)}" for part, nbytes in parts.items())
            marks.append(f"<g><title>rank {rank}: {title}</title>")
            for part, nbytes in parts.items():
                tall = nbytes / most * _HEIGHT
                y -= tall
                marks.append(
                    f'<rect x="{x + slot * 0.08:.1f}" y="{y:.1f}" width="{slot * 0.84:.1f}" '
                    f'height="{tall:.1f}" fill="{_COLOURS[part]}"/>'
                )
            marks.append(
                f'<text class="soft" x="{x + slot / 2:.1f}" y="{floor + 17}" '
                f'text-anchor="middle">{label}</text></g>'
            )
            x += slot
        x += slot
        heads = [] if outcome is not None and len(plans) == 1 else [name]
        if outcome is not None and len(plan.outcomes) > len(heads):
            heads.append(outcome.name)
        for line, heading in enumerate(heads):
            marks.append(
                f'<text class="value" x="{middle:.1f}" y="{floor + 38 + 18 * line}" '
                f'text-anchor="middle">{escape(heading)}</text>'
            )
        if outcome is not None:
            marks.append(
                f'<text x="{middle:.1f}" y="{floor + 38 + 18 * len(heads)}" text-anchor="middle">'
                f"{outcome.tokens:,} tokens</text>"
            )
    return "".join(marks)


def _scale(most: int, step: int) -> list[str]:
    """Horizontal lines across the columns, with their values in bytes."""
    marks = []
    for nbytes in range(0, most + step, step):
        y = _TOP + _HEIGHT - nbytes / most * _HEIGHT
        marks.append(
            f'<path class="line" d="M{_LEFT} {y:.0f}H{_WIDTH - _RIGHT}"/>'
            f'<text class="soft" x="{_LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">'
            f"{size(nbytes)}</text>"
        )
    return marks


def _frontier(frontier: Sequence[Partition], top: float) -> str:
    """Blocks over the time of the slowest stage: a dot for each partition, with its name where
    there is room."""
    across = _Span([each.slowest for each in frontier], _LEFT, _WIDTH - _RIGHT)
    floor = top + _FRONTIER_HEIGHT - 56
    up = _Span([float(each.blocks) for each in frontier], floor, top + 48)
    right, axis = _WIDTH - _RIGHT, "slowest stage, in layers of a device of speed 1"
    marks = [
        f'<text class="value" x="{_LEFT}" y="{top + 12}">blocks against the slowest stage</text>',
        f'<text class="soft" x="{_LEFT - 8}" y="{top + 34}" text-anchor="end">blocks</text>',
        f'<text class="soft" x="{right}" y="{floor + 38}" text-anchor="end">{axis}</text>',
    ]
    for value in up.ticks:
        y = up.at(value)
        marks.append(
            f'<path class="line" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
            f'<text class="soft" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
            f"{decimal_label(value, up.step)}</text>"
        )
    for value in across.ticks:
        marks.append(
            f'<text class="soft" x="{across.at(value):.1f}" y="{floor + 20}" '
            f'text-anchor="middle">{decimal_label(value, across.step)}</text>'
        )
    dots = [(across.at(each.slowest), up.at(each.blocks)) for each in frontier]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in dots]
    names = []
    for each, (x, y) in zip(frontier, dots, strict=True):
        cut = ",".join(map(str, each.layers))
        marks.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{_COLOURS["KV"]}"><title>{cut}: '
            f"{each.blocks:,} blocks, slowest stage {each.slowest:.3g}</title></circle>"
        )
        width = text_width(cut, _TEXT)
        # Tries right of the dot, below it, above it to the left, and takes the first free place.
        for left, line in ((x + 9, y + 4), (x + 4, y + 18), (x - 4 - width, y - 9)):
            room = (left, line - 10, left + width, line + 3)
            if left >= _LEFT and room[2] <= _WIDTH and room[3] <= floor + 4:
                if any(_meet(room, other) for other in taken):
                    continue
                taken.append(room)
                names.append(f'<text class="soft dot" x="{left:.1f}" y="{line:.1f}">{cut}</text>')
                break
    return "".join(marks + names)


def _meet(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


class _Span:
    """An axis from the round number below its least value to the one above its greatest."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = min(values), max(values)
        self.step = decimal_step((high - low) or 1.0)
        first, last = math.floor(low / self.step), math.ceil(high / self.step)
        last = max(last, first + 1)
        self.ticks = [self.step * tick for tick in range(first, last + 1)]
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        return self._start + (value - low) / (high - low) * (self._end - self._start)
