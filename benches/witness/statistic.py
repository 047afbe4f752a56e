"""How far two payloads of one block lie from each other, in windows of some elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

WINDOW = 256
"""Elements of a window."""
OTHER_WINDOWS = (64, 128, 1024)
"""For comparison."""
FAR = 0.9
"""A window at this relative distance has other content, and not the same with noise."""
WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of an element."""
ULPS = {"bf16": 2**-7, "fp16": 2**-10, "fp32": 2**-23, "fp8_e4m3": 2**-3, "fp8_e5m2": 2**-2}
"""The distance of 1 from the next number."""
NORMALS = {
    "bf16": 2.0**-126,
    "fp16": 2.0**-14,
    "fp32": 2.0**-126,
    "fp8_e4m3": 2.0**-6,
    "fp8_e5m2": 2.0**-14,
}
"""The smallest number that has all bits of the mantissa. What is far below is rounded to zero."""

_E4M3_BIAS = 7
_TINY = 1e-300


def _e4m3() -> Array:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - _E4M3_BIAS)
    found = np.where(exponent == 0, mantissa / 8 * 2.0 ** (1 - _E4M3_BIAS), normal)
    found[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes & 0x80, -found, found)


_VALUES_OF_E4M3 = _e4m3()


def values(payload: Array, element: str) -> Array:
    """The numbers of a payload, as float64: squares of float32 could overflow."""
    match element:
        case "bf16":
            wide = (payload.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case "fp16":
            wide = payload.view(np.float16)
        case "fp32":
            wide = payload.view(np.float32)
        case "fp8_e5m2":
            wide = (payload.astype(np.uint16) << 8).view(np.float16)
        case _:
            wide = _VALUES_OF_E4M3[payload]
    return wide.astype(np.float64)


@dataclass(frozen=True)
class Distance:
    """What is known of a pair of payloads. Relative distances are of the difference to the root
    mean square of both: 0 if equal, 1.41 if one has nothing to do with the other, at most 2."""

    is_finite: bool
    """Whether both have NaN and infinity at the same places, or none."""
    is_zero: bool
    """Whether a window is all zeros on one side alone, and the other is too long to be rounded to
    that."""
    differing: int
    """Elements that differ."""
    elements: int
    """All elements."""
    ulps: float
    """The largest difference of an element, in distances between neighbouring numbers. An element
    that is shorter than the payload's root mean square counts as that long: short ones are sums of
    long ones, and have their noise."""
    peaks: float
    """How many times longer the longest element of a layer is than that of the other side."""
    whole: float
    """Relative distance of the payloads."""
    largest: dict[int, float]
    """The largest relative distance of a window, by the window's size."""
    far: float
    """Share of windows that are far from each other."""
    goes_on: bool
    """Whether several layers differ: all from one on."""
    layers: tuple[float, ...]
    """For each layer, the relative distance that a quarter of its windows exceed."""

    @property
    def layer(self) -> float:
        """The largest of all layers."""
        return max(self.layers)

    def jump(self, floor: float) -> float:
        """How many times farther a layer is than all before it, from the third on. `floor` is the
        least that counts."""
        before = [max(floor, *self.layers[:end]) for end in range(2, len(self.layers))]
        return max(
            (one / most for one, most in zip(self.layers[2:], before, strict=True)), default=0
        )


def distance(one: Array, other: Array, element: str, layers: int) -> Distance | None:
    """Compares two payloads of the same length, layer by layer. None if they are equal."""
    if np.array_equal(one, other):
        return None
    with np.errstate(all="ignore"):
        a, b = values(one, element), values(other, element)
        bad_a, bad_b = ~np.isfinite(a), ~np.isfinite(b)
        is_finite = bool((bad_a == bad_b).all())
        a[bad_a | bad_b] = b[bad_a | bad_b] = 0
        squares_a, squares_b = a * a, b * b
        size = 0.5 * (squares_a + squares_b)
        diff = np.abs(a - b)
        square = diff * diff
        most_a, most_b = (np.abs(each).reshape(layers, -1).max(axis=1) for each in (a, b))
        peaks = np.maximum(most_a, most_b) / np.maximum(np.minimum(most_a, most_b), _TINY)
        by_window = relative(square, size, WINDOW)
        sums_a, sums_b = sums(squares_a, WINDOW), sums(squares_b, WINDOW)
        is_long = sums(np.maximum(squares_a, squares_b) >= NORMALS[element] ** 2, WINDOW) > 0
        differs = (one.reshape(len(a), -1) != other.reshape(len(a), -1)).any(axis=1)
        others = differs.reshape(layers, -1).any(axis=1).astype(int)
        longer = np.maximum(np.abs(a[differs]), np.abs(b[differs]))
        usual = max(float(np.sqrt(size.mean())), _TINY)
        unit = ULPS[element] * 2 ** np.floor(np.log2(np.maximum(longer, usual)))
        return Distance(
            is_finite,
            bool((((sums_a == 0) != (sums_b == 0)) & is_long).any()),
            int(differs.sum()),
            len(a),
            float((diff[differs] / unit).max()),
            float(np.where(most_a == most_b, 1.0, peaks).max()),
            float(np.sqrt(square.sum() / max(size.sum(), _TINY))),
            {WINDOW: float(by_window.max())}
            | {each: float(relative(square, size, each).max()) for each in OTHER_WINDOWS},
            float((by_window > FAR).mean()),
            bool((np.diff(others) >= 0).all() and others.sum() > 1),
            tuple(
                float(np.quantile(relative(own, its_size, WINDOW), 0.75))
                for own, its_size in zip(
                    square.reshape(layers, -1), size.reshape(layers, -1), strict=True
                )
            ),
        )


def sums(each: Array, window: int) -> Array:
    """Sums over windows. What is left over at the end is filled up with zeros."""
    if over := len(each) % window:
        each = np.concatenate([each, np.zeros(window - over)])
    found: Array = each.reshape(-1, window).sum(axis=1)
    return found


def relative(square: Array, size: Array, window: int) -> Array:
    """The relative distance of each window."""
    found: Array = np.sqrt(sums(square, window) / np.maximum(sums(size, window), _TINY))
    return found
