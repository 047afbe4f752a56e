"""What the connector counts."""

from __future__ import annotations

COUNTERS = {
    "lookups": "Requests looked up in the pool.",
    "lookup_blocks": "Blocks asked for in look-ups.",
    "lookup_hit_blocks": "Blocks that look-ups found.",
    "lookup_failures": "Look-ups that ended by a deadline or an error.",
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
    "rejected_objects": "Values from the pool that failed verification.",
    "foreign_objects": "Values encrypted with a key that this engine does not have; not loaded.",
    "stored_bytes": "Bytes of KV stored, over all ranks.",
    "stored_blocks": "Blocks that every rank has put into the pool or found there.",
    "stores_dropped": "Objects not stored because room or the pool was missing.",
    "stores_failed": "Objects whose store failed.",
    "unpinned_bytes": "Bytes of host memory that could not be pinned for the GPU: their copies are "
    "slower.",
}
"""Counter → documentation; each appears as ``vllm:penstock_<counter>_total``."""


class Counters:
    """Increments of :data:`COUNTERS` since they were last taken."""

    def __init__(self) -> None:
        self._increments: dict[str, int] = {}

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to a counter."""
        if amount:
            self._increments[name] = self._increments.get(name, 0) + amount

    def take(self) -> dict[str, int] | None:
        """Hands over the increments and starts anew; None if there are none."""
        if not self._increments:
            return None
        taken, self._increments = self._increments, {}
        return taken
