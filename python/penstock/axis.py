"""Helpers for the axes of all pictures: round numbers for the labels, and the width of text."""

from __future__ import annotations

import math

_WIDTHS = {
    0.28: "'ijl",
    0.32: " ,.IJ·",
    0.41: "!()-/:;[\\]ft|",
    0.5: '"*_`r',
    0.58: "?FLcksz",
    0.64: "$0123456789EPSTYabdeghnopquvxy{}",
    0.7: "ABCKRVXZ",
    0.79: "&DGHNOQU",
    0.87: "#+<=>M^w~",
}
"""Width in DejaVu Sans of size 1 → the characters of that width. Other characters count as 1."""

_WIDTH = {character: width for width, characters in _WIDTHS.items() for character in characters}
_BOLD = 1.13


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """The width of a line of text in DejaVu Sans, in the unit of `size`.

    The result is a few per cent too wide for words. DejaVu Sans is one of the wide fonts among
    those that browsers commonly take for `sans-serif`.

    >>> round(text_width("63 GiB", 10)), round(text_width("63 GiB", 10, bold=True))
    (34, 38)
    """
    width = sum(_WIDTH.get(character, 1.0) for character in text)
    return width * size * (_BOLD if bold else 1.0)


def decimal_step(width: float, most: int = 5) -> float:
    """The smallest round step with which at most `most` steps cover `width`, a number over zero.

    A round step is 1, 2, 2.5 or 5 times a power of ten.

    >>> decimal_step(3025), decimal_step(47), decimal_step(0.9)
    (1000.0, 10.0, 0.2)
    """
    rough = width / most
    power = 10.0 ** math.floor(math.log10(rough))
    # Rounded, so that a factor times a power of ten is the number that its decimal text means.
    return next(
        float(f"{factor * power:.6g}")
        for factor in (1, 2, 2.5, 5, 10, 20)
        if factor * power >= rough * (1 - 1e-9)
    )


def decimal_label(value: float, step: float) -> str:
    """A multiple of `step`, with as many decimals as `step` has.

    >>> decimal_label(2000, 500), decimal_label(0.5, 0.25), decimal_label(3, 1)
    ('2,000', '0.50', '3')
    """
    written = f"{step:.6g}"
    decimals = len(written.partition(".")[2]) if "e" not in written else 0
    return f"{value:,.{decimals}f}"


def byte_step(nbytes: int, most: int = 5) -> int:
    """The smallest round step with which at most `most` steps cover `nbytes`.

    A round step is 1 or 5 times a power of two, which is a whole or a short number in KiB, MiB or
    GiB.

    >>> byte_step(63 << 30) >> 30, byte_step(24 << 30) >> 30, byte_step(3)
    (16, 5, 1)
    """
    rough = max(1, -(-nbytes // most))
    power = 1 << (rough - 1).bit_length()
    five = 5 * power // 8
    return five if five >= rough and power >= 8 else power


def octaves(low: float, high: float, most: int = 8) -> list[float]:
    """Powers of two from `low` to `high`, at most `most` of them, evenly spread.

    If fewer than two powers lie between `low` and `high`, the result is these two ends.

    >>> octaves(1, 32), octaves(3, 200, most=4), octaves(5, 7)
    ([1.0, 2.0, 4.0, 8.0, 16.0, 32.0], [4.0, 16.0, 64.0], [5, 7])
    """
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    if len(powers) < 2:
        return sorted({low, high})
    return [2.0**power for power in powers[:: -(-len(powers) // most)]]
