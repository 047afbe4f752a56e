"""What an object of the pool holds, from the text that asks for it."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.layout import objects
from penstock.layout.geometry import Geometry, parse_geometry


def test_texts() -> None:
    assert parse_geometry("rank", 8, 2) == Geometry(None, None, None)
    assert parse_geometry("portable", 8, 2) == Geometry(2, 1, "HNC")
    assert parse_geometry("portable", 61, 1) == Geometry(1, 1, "HNC")
    assert parse_geometry("portable", 64, 16) == Geometry(2, 2, "HNC")
    assert parse_geometry("8x4", 64, 16) == Geometry(8, 4, "HNC")


@pytest.mark.parametrize("text", ["", "ranks", "2", "2x", "0x1", "-1x1", "2X2", "2x2x2"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="pool geometry"):
        parse_geometry(text, 8, 2)


@pytest.mark.parametrize("text", ["3x1", "2x3", "16x1"])
def test_what_does_not_divide_the_model_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="8 layers and 2 KV heads cannot be cut"):
        parse_geometry(text, 8, 2)


def test_portable_objects_are_those_of_every_topology() -> None:
    geometry = parse_geometry("portable", 8, 4)

    def cut(*shares: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
        sizes = {"layers_per_object": geometry.layers, "heads_per_object": geometry.heads}
        return sorted(part for share in shares for part in objects(share, **sizes))

    single = cut((0, 8, 0, 4))
    assert single == cut((0, 6, 0, 4), (6, 8, 0, 4))
    assert single == cut((0, 4, 0, 4), (4, 8, 0, 4))
    assert single == cut((0, 8, 0, 2), (0, 8, 2, 4))
    assert single == cut(
        *((layer, layer + 4, head, head + 1) for layer in (0, 4) for head in range(4))
    )
