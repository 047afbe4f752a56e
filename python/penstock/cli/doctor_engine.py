"""`penstock doctor --engine`: what a running engine's metrics tell of faults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.cli import activity
from penstock.cli.findings import Finding
from penstock.exposition import by_label, totals

_PREFIX = "vllm:penstock_"

_COUNTED = {
    "rejected_objects": (
        "verification",
        "values from the pool failed verification, and were not loaded",
        "penstock pool verify URL finds what is damaged",
    ),
    "stores_failed": (
        "stores",
        "objects were not stored: the pool failed",
        "penstock doctor URL examines the pool",
    ),
    "stores_dropped": (
        "stores",
        "objects were not stored: room or the pool was missing",
        "more penstock.host_bytes, or a faster pool",
    ),
    "lookup_failures": (
        "look-ups",
        "look-ups ended by a deadline or an error",
        "penstock doctor URL measures the round trip",
    ),
    "unpinned_bytes": (
        "copies",
        "bytes of host memory could not be pinned, so copies are slower",
        "raise the limit of locked memory (ulimit -l), or lower penstock.host_bytes",
    ),
}
"""Counter → what is checked, what it means, what to do."""


def examine(url: str, timeout: float) -> Iterator[Finding]:
    """Findings about a running engine, by its metrics' URL. One that does not answer, or has no
    Penstock, is a finding too."""
    try:
        page = activity.page(url, timeout)
        values, panics = totals(page), by_label(page, f"{_PREFIX}panics_total", "place")
    except (OSError, ValueError) as error:
        yield Finding("connection", "fail", str(error), "is it up, and are these its metrics?")
        return
    if not any(name.startswith(_PREFIX) for name in values):
        yield Finding(
            "connector", "fail", "it has no metrics of Penstock", "is Penstock configured?"
        )
        return
    yield from _panics(panics)
    for counter, (check, meaning, advice) in _COUNTED.items():
        if count := values.get(f"{_PREFIX}{counter}_total", 0.0):
            yield Finding(check, "note", f"{count:,.0f} {meaning}", advice)


def _panics(panics: Mapping[str, float]) -> Iterator[Finding]:
    seen = {place: count for place, count in panics.items() if count}
    if not seen:
        yield Finding("panics", "ok", "no thread of Penstock has panicked")
        return
    places = ", ".join(f"{place} ({count:,.0f})" for place, count in sorted(seen.items()))
    yield Finding(
        "panics",
        "warn",
        f"threads of Penstock have panicked: {places}. The fault is Penstock's, not the pool's",
        "the engine's log has a line with each: please report it",
    )
