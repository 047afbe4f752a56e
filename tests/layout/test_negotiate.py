"""Spec, connector and backend agree on a layout, or the reason says which of them does not."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.layout.negotiate import AUTO, CROSS_LAYER, LAYOUTS, SpecFacts, interior, negotiate

ATTENTION = SpecFacts(("full_attention",))
HYBRID = SpecFacts(("full_attention", "sliding_window"))
TWO_SHAPES = SpecFacts(("full_attention", "sliding_window"), page_shapes=2)
MAMBA = SpecFacts(("full_attention", "mamba"), has_layer_views=False)
COMPACT = SpecFacts(("mla_attention",), layer_compact_because="its kernels flatten a layer")


@pytest.mark.parametrize(
    ("spec", "supported", "layout", "reason"),
    [
        (ATTENTION, ("LBHNC", "BLHNC"), "BLHNC", "side by side"),
        (HYBRID, ("LBHNC", "BLHNC"), "BLHNC", "full_attention and sliding_window pages allow"),
        (TWO_SHAPES, ("LBHNC", "BLHNC"), "BLHNC", "side by side"),
        # The interior that the backend puts first wins.
        (ATTENTION, ("LBNHC", "LBHNC", "BLHNC", "BLNHC"), "BLNHC", "side by side"),
        (ATTENTION, ("LBHNC",), "LBHNC", "attention backend X addresses LBHNC only"),
        (MAMBA, ("LBNHC", "BLNHC"), "LBNHC", "no regular pages"),
        (COMPACT, ("BLHNC", "LBHNC"), "LBHNC", "its kernels flatten a layer"),
        # Nothing better is left than what vLLM would take.
        (COMPACT, ("BLHNC",), "BLHNC", "its kernels flatten a layer"),
    ],
)
def test_automatic(spec: SpecFacts, supported: tuple[str, ...], layout: str, reason: str) -> None:
    decision = negotiate(spec, AUTO, supported, ("X",))
    assert decision.layout == layout
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("spec", "wanted", "message"),
    [
        (ATTENTION, "BLNHC", "X addresses LBHNC, BLHNC, BHLNC only; choose one of these, or auto"),
        (MAMBA, "BLHNC", "no regular pages"),
        (COMPACT, "BLHNC", "flatten a layer; choose one of LBHNC, or auto"),
        (TWO_SHAPES, "BHLNC", "pages of 2 shapes"),
        (ATTENTION, "NHD", "no KV layout is named 'NHD'"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(
    spec: SpecFacts, wanted: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        negotiate(spec, wanted, ("LBHNC", "BLHNC", "BHLNC"), ("X",))


def test_what_is_asked_for_is_given() -> None:
    for wanted in ("LBHNC", "BHLNC"):
        assert negotiate(ATTENTION, wanted, ("LBHNC", "BHLNC")).layout == wanted


def test_nothing_supported() -> None:
    with pytest.raises(ConfigError, match="no KV layout at all"):
        negotiate(ATTENTION, AUTO, ())


@given(
    st.permutations(LAYOUTS).flatmap(
        lambda order: st.integers(1, len(order)).map(lambda n: tuple(order[:n]))
    ),
    st.sampled_from([ATTENTION, HYBRID, TWO_SHAPES, MAMBA, COMPACT]),
)
def test_automatic_never_fails_and_never_leaves_what_is_supported(
    supported: tuple[str, ...], spec: SpecFacts
) -> None:
    decision = negotiate(spec, AUTO, supported)
    assert decision.layout in supported
    assert decision.reason
    if spec is ATTENTION and set(supported) & set(CROSS_LAYER):
        assert decision.layout in CROSS_LAYER


def test_interiors() -> None:
    assert {name for name in LAYOUTS if interior(name) == "NHC"} == {"LBNHC", "BLNHC"}
    assert all(len(name) == 5 for name in itertools.chain(LAYOUTS, CROSS_LAYER))
