"""Which KV layout an engine gets: the one that KV-cache spec, connector and backend agree on.

A cross-layer layout puts all layers' pages of a block side by side, so that a block moves in one
piece. Three parties have to agree on it (vLLM's RFC 27742): the KV-cache spec must have pages that
can lie side by side, the connector must want it, and the attention backend's kernels must be able
to address it. :func:`negotiate` is a pure function: it takes the facts about all three, and returns
the layout and the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import ConfigError

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Every layout that vLLM names."""

CROSS_LAYER = ("BLHNC", "BLNHC")
"""The layouts that keep all layers of a block in one piece, with each layer's page whole in it."""

AUTO = "auto"


@dataclass(frozen=True)
class SpecFacts:
    """The facts about a model's KV-cache specs that decide its layout."""

    kinds: tuple[str, ...]
    """Names of the specs' kinds, each once."""
    page_shapes: int = 1
    """Number of different page shapes (heads, tokens, bytes)."""
    has_layer_views: bool = True
    """Whether every layer's cache is a regular view of blocks, heads, tokens and content."""
    layer_compact_because: str = ""
    """Why this engine needs each layer in one piece; empty if it does not."""


@dataclass(frozen=True)
class Decision:
    """A layout, and the reason for it in words."""

    layout: str
    reason: str


def negotiate(
    spec: SpecFacts, wanted: str, supported: Sequence[str], backends: Sequence[str] = ()
) -> Decision:
    """The layout to use.

    `wanted` is the connector's wish: a layout's name, or :data:`AUTO` for a cross-layer layout
    where one is possible. `supported` are the layouts that all attention backends can address, most
    preferred first. `backends` are the names of these backends.

    Raises:
        ConfigError: `wanted` is no layout, or one that this engine cannot have. The message says
            why, and which layouts are possible.
    """
    if wanted != AUTO and wanted not in LAYOUTS:
        raise ConfigError(f"no KV layout is named {wanted!r}: {AUTO}, or {', '.join(LAYOUTS)}")
    if not supported:
        raise ConfigError("the attention backends agree on no KV layout at all")
    said_by = f"attention backend {', '.join(backends)}" if backends else "attention backend"
    possible = [name for name in supported if _obstacle(spec, name) is None]
    if wanted == AUTO:
        return _automatic(spec, possible, supported, said_by)
    if wanted not in supported:
        raise ConfigError(
            f"KV layout {wanted} cannot be had: the {said_by} addresses "
            f"{', '.join(supported)} only; choose one of these, or {AUTO}"
        )
    if (obstacle := _obstacle(spec, wanted)) is not None:
        rest = f"; choose one of {', '.join(possible)}, or {AUTO}" if possible else ""
        raise ConfigError(f"KV layout {wanted} cannot be had: {obstacle}{rest}")
    return Decision(wanted, f"asked for, and the {said_by} addresses it")


def _automatic(
    spec: SpecFacts, possible: Sequence[str], supported: Sequence[str], said_by: str
) -> Decision:
    # If no layout fits, take the one that vLLM itself would take.
    usual = (possible or supported)[0]
    # Keep the interior that the backend prefers, so that its kernels keep their speed.
    candidates = sorted(
        (name for name in possible if name in CROSS_LAYER),
        key=lambda name: interior(name) != interior(usual),
    )
    if candidates:
        return Decision(
            candidates[0],
            f"all layers of a block lie side by side: {' and '.join(spec.kinds)} pages allow it, "
            f"the connector wants it, the {said_by} addresses it",
        )
    offered = [name for name in CROSS_LAYER if name in supported]
    if offered:
        why = _obstacle(spec, offered[0])
    else:
        why = f"the {said_by} addresses {', '.join(supported)} only"
    return Decision(usual, f"no cross-layer layout: {why}")


def interior(layout: str) -> str:
    """The order of heads and tokens in a page: HNC or NHC."""
    return "".join(axis for axis in layout if axis in "HNC")


def _obstacle(spec: SpecFacts, layout: str) -> str | None:
    """Why the model's pages cannot lie in `layout`; None if they can."""
    is_layer_compact = layout[0] == "L"
    if not is_layer_compact and spec.layer_compact_because:
        return spec.layer_compact_because
    if not is_layer_compact and not spec.has_layer_views:
        return f"{' and '.join(spec.kinds)} state has no regular pages to lay side by side"
    if spec.page_shapes > 1 and set(layout[:2]) != {"L", "B"}:
        return f"the model has pages of {spec.page_shapes} shapes, which only fit whole pages"
    return None
