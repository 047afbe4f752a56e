"""Prometheus' text format: the metrics of a server, added up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping


def totals(text: str) -> Mapping[str, float]:
    """Each sample's sum over its labels, by the sample's name; buckets of histograms are left out.

    Raises:
        ValueError: it is not in that format.
    """
    # vLLM brings it; what needs no metrics does without.
    from prometheus_client.parser import text_string_to_metric_families

    sums: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                sums[sample.name] += sample.value
    return sums
