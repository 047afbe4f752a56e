"""What says that a payload is wrong, and not the same KV computed in another way.

The rules and bounds are those of ``penstock-value/src/compare.rs`` for models without experts. Its
bounds for models with experts are looser. fp32 has the bounds of fp16, as devices may multiply in
fewer bits."""

from __future__ import annotations

from benches.witness.statistic import Distance

LAYER = {"bf16": 0.7, "fp16": 0.15, "fp32": 0.15, "fp8_e4m3": 1.2, "fp8_e5m2": 1.2}
"""The most that a quarter of a layer's windows may exceed."""
FIRST_LAYER = {"bf16": 0.015, "fp16": 0.002, "fp32": 0.002, "fp8_e4m3": 0.06, "fp8_e5m2": 0.12}
"""The same for the model's first layer: nothing before it has rounded."""
JUMP = 8.0
"""How many times farther a layer may be than all before it."""
JUMP_FLOOR = {"bf16": 0.02, "fp16": 0.004, "fp32": 0.004, "fp8_e4m3": 0.06, "fp8_e5m2": 0.12}
"""The least distance of layers before that counts."""
PEAKS = 4.0
"""How many times longer the longest element of a layer may be than that of the other side."""
FAR = 0.07
"""The share of windows that may be far from each other: a token may have gone to other experts."""
FEW = 0.01
"""Noise that is in no more than this share of the elements is small in each of them, unless it goes
on through all later layers: one engine may have decoded a token that the other has prefilled."""
MOST_ULPS = 8.0
"""So small: see `Distance.ulps`."""


def wrong(found: Distance, element: str, *, is_first: bool) -> str | None:
    """Why a payload is wrong. None if it may be the same, computed in another way. `is_first` says
    that it begins with the model's first layer."""
    if not found.is_finite:
        return "not finite"
    if found.is_zero:
        return "zeros"
    if found.peaks > PEAKS:
        return "peaks"
    if found.layer > LAYER[element]:
        return "layer"
    if found.far > FAR:
        return "windows"
    if is_first and found.layers[0] > FIRST_LAYER[element]:
        return "first layer"
    if found.jump(JUMP_FLOOR[element]) > JUMP:
        return "jump"
    is_few = found.differing <= FEW * found.elements and not found.goes_on
    if is_few and found.ulps > MOST_ULPS:
        return "few elements"
    return None
