"""What `benches.gpu_copy` says of its aims. It needs no device."""

from __future__ import annotations

from typing import Any

from benches.gpu_copy import aims, met


def row(layout: str, pieces: int, speed: float, to_contiguous: float, to_pieces: float) -> Any:
    """Figures of one layout, the same in both directions."""
    found: dict[str, Any] = {"layout": layout, "pieces": pieces}
    for way in ("gather", "scatter"):
        found[f"{way}_gb_s"] = speed
        found[f"{way}_to_contiguous"] = to_contiguous
        found[f"{way}_to_pieces"] = to_pieces
    return found


def test_aims_depend_on_the_pieces_of_a_block() -> None:
    found = aims(
        [
            row("LBHNC", 32, 40.0, 0.85, 4.5),
            row("LHBNC", 256, 30.0, 0.6, 9.0),
            row("BLHNC", 1, 48.0, 0.96, 1.0),
        ],
        layers=32,
    )
    gathers = {aim.what: aim for aim in found if aim.what.startswith("gather")}
    assert len(found) == 2 * len(gathers) == 6
    assert gathers["gather, BLHNC, to contiguous"].least == 0.95
    assert gathers["gather, BLHNC, to contiguous"].is_met
    assert not gathers["gather, LBHNC, to contiguous"].is_met
    gain = gathers["gather, BLHNC, to a copy for each piece of LBHNC"]
    assert (round(gain.seen, 2), gain.is_met) == (5.4, True)
    assert [line[-1] for line in met(list(gathers.values()))] == ["**no**", "yes", "yes"]
