"""A plan as one SVG picture: a column for each rank, of weights, KV and what idles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from penstock.plan.partition import Partition
from penstock.plan.proposal import Plan
from penstock.plan.table import size

_WIDTH, _LEFT, _TOP, _HEIGHT = 960, 84, 58, 240
_FRONTIER_HEIGHT = 240
_COLOURS = {"weights": "#8a94a3", "KV": "#1f77b4", "idle": "#f2c6a0"}
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#333}.soft{fill:#667}.value{font-weight:600}"
    ".line{stroke:#d5d9e0;fill:none}"
)


def draw(plans: Mapping[str, Plan], frontier: Sequence[Partition] = ()) -> str:
    """The picture: plans side by side, and under them the frontier of tokens and balance."""
    marks = [_legend(), _columns(plans)]
    height = _TOP + _HEIGHT + 74
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
    slot = (_WIDTH - _LEFT - 20) / (bars + len(groups))
    highest = max(
        plan.weights[rank] + (outcome.split.given[rank] if outcome else 0)
        for _, plan, outcome in groups
        for rank in range(len(plan.partition))
    )
    floor = _TOP + _HEIGHT
    marks = []
    for line in range(5):
        y = floor - line / 4 * _HEIGHT
        marks.append(
            f'<path class="line" d="M{_LEFT} {y:.0f}H{_WIDTH - 20}"/>'
            f'<text class="soft" x="{_LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">'
            f"{size(int(highest * line / 4)).replace('.000', '')}</text>"
        )
    x = _LEFT + slot / 2
    for name, plan, outcome in groups:
        middle = x + slot * len(plan.partition) / 2
        for rank, layers in enumerate(plan.partition):
            parts = {"weights": plan.weights[rank], "KV": 0, "idle": 0}
            if outcome is not None:
                parts |= {"KV": outcome.split.used[rank], "idle": outcome.split.idle[rank]}
            y = float(floor)
            title = ", ".join(f"{part} {size(nbytes)}" for part, nbytes in parts.items())
            marks.append(f"<g><title>rank {rank}: {title}</title>")
            for part, nbytes in parts.items():
                tall = nbytes / highest * _HEIGHT
                y -= tall
                marks.append(
                    f'<rect x="{x + slot * 0.08:.1f}" y="{y:.1f}" width="{slot * 0.84:.1f}" '
                    f'height="{tall:.1f}" fill="{_COLOURS[part]}"/>'
                )
            marks.append(
                f'<text class="soft" x="{x + slot / 2:.1f}" y="{floor + 17}" '
                f'text-anchor="middle">{layers}</text></g>'
            )
            x += slot
        x += slot
        heading = name if outcome is None else outcome.name if len(plans) == 1 else name
        marks.append(
            f'<text class="value" x="{middle:.1f}" y="{floor + 38}" text-anchor="middle">'
            f"{escape(heading)}</text>"
        )
        if outcome is not None:
            marks.append(
                f'<text x="{middle:.1f}" y="{floor + 56}" text-anchor="middle">'
                f"{outcome.tokens:,} tokens</text>"
            )
    return "".join(marks)


def _frontier(frontier: Sequence[Partition], top: float) -> str:
    """Blocks over the time of the slowest stage, each partition a dot."""
    low, high = min(p.slowest for p in frontier), max(p.slowest for p in frontier)
    least, most = min(p.blocks for p in frontier), max(p.blocks for p in frontier)
    wide, tall = _WIDTH - _LEFT - 180, _FRONTIER_HEIGHT - 90
    marks = [
        f'<text class="value" x="{_LEFT}" y="{top + 12}">blocks against the slowest stage</text>'
    ]
    floor = top + 40 + tall
    marks.append(f'<path class="line" d="M{_LEFT} {top + 30}V{floor + 10}H{_WIDTH - 20}"/>')
    is_short = len(frontier[0].layers) <= 3
    for each in frontier:
        x = _LEFT + 20 + (each.slowest - low) / ((high - low) or 1) * wide
        y = floor - (each.blocks - least) / ((most - least) or 1) * tall
        cut = ",".join(map(str, each.layers))
        marks.append(
            f"<g><title>{cut}: {each.blocks:,} blocks, slowest stage {each.slowest:.3g}</title>"
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{_COLOURS["KV"]}"/>'
            + (f'<text class="soft" x="{x + 9:.1f}" y="{y + 4:.1f}">{cut}</text>' * is_short)
            + "</g>"
        )
    marks.append(
        f'<text class="soft" x="{_WIDTH - 20}" y="{floor + 28}" text-anchor="end">'
        f"slowest stage, {low:.3g} to {high:.3g}</text>"
    )
    return "".join(marks)
