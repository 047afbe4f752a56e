"""Prometheus' text format: the metrics of a server, added up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping


def totals(text: str) -> Mapping[str, float]:
    """Each sample's sum over its labels, by the sample's name; buckets of histograms are left out.

    Raises:
        ValueError: it is not in that format.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    for name, _, value in _samples(text):
        if not name.endswith("_bucket"):
            sums[name] += value
    return sums


def by_label(text: str, name: str, label: str) -> Mapping[str, float]:
    """A sample's sums for each value of one of its labels.

    Raises:
        ValueError: it is not in that format.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    for each, labels, value in _samples(text):
        if each == name and label in labels:
            sums[labels[label]] += value
    return sums


def _samples(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    # vLLM brings it; what needs no metrics does without.
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value
