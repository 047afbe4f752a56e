"""The connector's counters and histograms."""

from __future__ import annotations

COUNTERS = {
    "lookups": "Requests looked up in the pool.",
    "lookup_blocks": "Blocks asked for in look-ups.",
    "lookup_hit_blocks": "Blocks that look-ups found.",
    "lookup_failures": "Look-ups that ended by a deadline or an error.",
    "lookup_limit_raises": "Times that the limit of look-ups has grown, as the pool is far away.",
    "lookups_not_awaited": "Requests computed before their look-up was answered: a load was not "
    "expected to pay for the wait.",
    "loads": "Loads started, once for each rank.",
    "loaded_tokens": "Tokens whose KV was loaded and verified.",
    "loaded_bytes": "Bytes of KV loaded and verified, over all ranks.",
    "kept_bytes": "Bytes of KV loaded from host memory, over all ranks.",
    "declined_tokens": "Tokens that were recomputed since loading them seemed slower.",
    "prefetches": "Waiting requests whose blocks were fetched into host memory.",
    "prefetched_bytes": "Bytes of KV fetched into host memory ahead of a load, over all ranks.",
    "probes": "Fetches that only measured the pool.",
    "load_failed_blocks": "Blocks that a load did not get; they were recomputed.",
    "load_late_blocks": "Those of loads that broke off, or that the pool failed; no value was "
    "missing or wrong.",
    "rejected_objects": "Values from the pool that failed verification.",
    "foreign_objects": "Values encrypted with a key that this engine does not have; not loaded.",
    "handovers": "Requests whose prompt another engine computes, as a proxy or the role says.",
    "handovers_given_up": "Such requests that did not wait until all of their blocks had come.",
    "promises": "Answers that told another engine which blocks are on their way to the pool.",
    "promises_refused": "Promises that did not fit the request or this engine.",
    "keep_hints": "Requests that asked to keep their blocks in the pool.",
    "prefetch_hints": "Requests that told of a prompt which comes next.",
    "let_go_hints": "Requests that let go of their blocks.",
    "hints_refused": "Hints that were not followed; the log tells why.",
    "touched_blocks": "Touches of kept blocks that the pool still had.",
    "keep_refused_blocks": "Blocks that were not kept: others had the room.",
    "let_go_blocks": "Blocks removed from the pool because they were let go.",
    "keeper_failures": "Touches and removals for hints that the pool did not answer.",
    "stored_bytes": "Bytes of KV stored, over all ranks.",
    "stored_value_bytes": "Bytes that what was stored takes in the pool, over all ranks: less with "
    "compression.",
    "stored_blocks": "Blocks that every rank has put into the pool or found there.",
    "stores_dropped": "Objects not stored because room or the pool was missing.",
    "stores_failed": "Objects whose store failed.",
    "witnessed_blocks": "Blocks that this engine computed and compared with what the pool has of "
    "them, over all ranks.",
    "witness_tokens": "Tokens that were recomputed on purpose, to compare their blocks.",
    "weight_changes": "Times that the weights were seen to change while the engine ran.",
    "kept_weight_changes": "Those over which KV of earlier weights was kept on purpose.",
    "dropped_namespaces": "Namespaces of earlier weights that were removed from the pool on "
    "purpose.",
    "witness_disagreements": "Blocks of which the pool had other KV than this engine computed, "
    "over all ranks. One of two engines computes wrong KV: look at the log, and at "
    "`penstock doctor`.",
    "unpinned_bytes": "Bytes of host memory that could not be pinned for the GPU: their copies are "
    "slower.",
}
"""Counter → documentation; each appears as ``vllm:penstock_<counter>_total``."""

TENANT_COUNTERS = {
    "prefill_saved_seconds": "Seconds of prefill that loads made unnecessary, by what this "
    "engine's own prefills take.",
    "load_wait_seconds": "Seconds that requests waited for look-ups and loads before they were "
    "computed.",
}
"""Counter → documentation, see :data:`COUNTERS`. Each has a label ``tenant``: the request's
``penstock.tenant``."""

PLACE_COUNTERS = {
    "panics": "Faults of Penstock that a thread contained. Each cost what the thread was doing. "
    "The log has one line for each kind.",
}
"""Counter → documentation, see :data:`COUNTERS`. Each has a label ``place``: the thread."""

COUNTER_LABELS = dict.fromkeys(TENANT_COUNTERS, "tenant") | dict.fromkeys(PLACE_COUNTERS, "place")
"""Counter → its own label."""

HISTOGRAMS = {
    "lookup_seconds": "Time from a look-up's start to its answer.",
    "load_seconds": "Time from a load's start to its end on all ranks. Label `tier`: `pool` if any "
    "of it came from there, else `host`.",
    "store_delay_seconds": "Time from the step that fills blocks until all ranks have stored them.",
    "load_to_expected_ratio": "Time of a load over what the load policy had expected.",
}
"""Histogram → documentation; each appears as ``vllm:penstock_<histogram>``."""

HISTOGRAM_LABELS = {"load_seconds": ("tier", ("pool", "host"))}
"""Histogram → its own label, and the values that this can have."""

BUCKETS = {
    "seconds": (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
    "ratio": (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.33, 2.0, 4.0, 10.0),
}
"""Upper bounds of a histogram's buckets, by the last word of its name."""

MOST_TENANTS = 100
"""The most tenants with their own series in one engine. All further ones count as
:data:`OTHERS`."""

OTHERS = "others"

_MOST_OBSERVATIONS = 10_000

Counts = dict[str, "float | list[float]"]
"""Name → increment, or the values of a histogram. If there is a label, the name is followed by a
slash and the label."""


class Counters:
    """Increments and observations since they were last taken."""

    def __init__(self) -> None:
        self._counts: Counts = {}
        self._tenants: set[str] = set()

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to a counter."""
        self._add(name, amount)

    def count_for(self, tenant: str, name: str, amount: float) -> None:
        """Adds to a tenant's counter."""
        if tenant not in self._tenants:
            if len(self._tenants) < MOST_TENANTS:
                self._tenants.add(tenant)
            else:
                tenant = OTHERS
        self._add(f"{name}/{tenant}", amount)

    def count_at(self, place: str, name: str, amount: int) -> None:
        """Adds to a place's counter."""
        self._add(f"{name}/{place}", amount)

    def _add(self, key: str, amount: float) -> None:
        if amount:
            before = self._counts.get(key, 0)
            assert not isinstance(before, list)
            self._counts[key] = before + amount

    def observe(self, name: str, value: float, label: str | None = None) -> None:
        """Adds a value to a histogram. Drops the value if too many were added since `take`."""
        values = self._counts.setdefault(name if label is None else f"{name}/{label}", [])
        assert isinstance(values, list)
        if len(values) < _MOST_OBSERVATIONS:
            values.append(value)

    def take(self) -> Counts | None:
        """Returns everything since the last call, and starts anew; None if there is nothing."""
        if not self._counts:
            return None
        taken, self._counts = self._counts, {}
        return taken
