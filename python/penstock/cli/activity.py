"""What running engines say of themselves: samples of their metrics, and rates between two."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from penstock.errors import ConfigError
from penstock.exposition import totals

_MOST_BYTES = 64 << 20
"""The most bytes of one answer: more is no page of metrics."""


@dataclass(frozen=True)
class Sample:
    """An engine's metrics at one time, summed over their labels; histograms as sum and count."""

    seconds: float
    """When the metrics were read, of the monotonic clock."""
    values: Mapping[str, float]


@dataclass(frozen=True)
class Activity:
    """What an engine does, between two samples. Rates are None before the second one."""

    running: float
    """Requests that are being computed."""
    waiting: float
    """Requests that wait for their turn."""
    kv_usage: float | None
    """Share of vLLM's KV cache that is in use."""
    hit_share: float | None
    """Tokens that came from the pool or from host memory, to those that vLLM's own cache lacked."""
    lookups: float | None
    """Look-ups, a second."""
    lookup_seconds: float | None
    """Seconds of a look-up, on average."""
    load_seconds: float | None
    """Seconds of a load, on average."""
    pool_bytes: float | None
    """Bytes loaded or fetched ahead from the pool, a second."""
    host_bytes: float | None
    """Bytes loaded from host memory, a second."""
    stored_bytes: float | None
    """Bytes stored, a second."""
    saved_seconds: float
    """Seconds of prefill that loads saved, less those waited, since the engine started."""
    saved_rate: float | None
    """Seconds of prefill that loads saved, less those waited, a second."""
    failures: float
    """Look-ups, loaded blocks and stored objects that failed or were dropped, and values that were
    not whole, since the engine started."""
    panics: float = 0.0
    """Faults of Penstock that its threads contained, since the engine started."""
    lookup_limit_raises: float = 0.0
    """How often the limit of look-ups has grown since the engine started: its pool is far away."""


_FAILURES = (
    "lookup_failures_total",
    "load_failed_blocks_total",
    "rejected_objects_total",
    "stores_dropped_total",
    "stores_failed_total",
)


def address(text: str) -> str:
    """The URL of an engine's metrics, of ``host:port`` or a URL.

    >>> address("10.0.0.7:8000")
    'http://10.0.0.7:8000/metrics'
    >>> address("https://vllm.example/metrics")
    'https://vllm.example/metrics'

    Raises:
        ConfigError: it is neither, or it has credentials, which are not sent to engines.
    """
    url = text if "://" in text else f"http://{text}"
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    if "@" in host:
        # The text is not repeated: it holds a password.
        raise ConfigError("an engine's URL has no user and no password: metrics need none")
    try:
        is_engine = scheme in ("http", "https") and bool(host) and urlsplit(url).port != 0
    except ValueError:
        is_engine = False
    if not is_engine:
        raise ConfigError(f"{text!r} is no engine: give host:port, or the URL of its metrics")
    return f"{scheme}://{host}/{path}" if slash and path else f"{scheme}://{host}/metrics"


def read(url: str, timeout: float) -> Sample:
    """Reads an engine's metrics.

    Raises:
        OSError: it does not answer, or with no metrics.
    """
    text = page(url, timeout)
    try:
        return Sample(time.monotonic(), totals(text))
    except ValueError as error:
        raise OSError(f"no metrics: {error}") from error


def page(url: str, timeout: float) -> str:
    """The page of an engine's metrics.

    Raises:
        OSError: it does not answer, or with no text.
    """
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            text: str = answer.read(_MOST_BYTES).decode()
    except urllib.error.HTTPError as error:
        raise OSError(f"HTTP {error.code}") from None
    except (ValueError, http.client.HTTPException) as error:
        raise OSError(f"no metrics: {error}") from error
    return text


def read_all(urls: Sequence[str], timeout: float) -> dict[str, Sample | OSError]:
    """Reads all engines at once; of one that does not answer, why."""

    def one(url: str) -> Sample | OSError:
        try:
            return read(url, timeout)
        except OSError as error:
            return error

    with ThreadPoolExecutor(max_workers=min(64, max(1, len(urls)))) as threads:
        return dict(zip(urls, threads.map(one, urls), strict=True))


def activity(before: Sample | None, now: Sample) -> Activity:
    """What an engine did since the sample before; an engine that has started anew since counts from
    its start."""

    def value(name: str, sample: Sample = now) -> float:
        return sample.values.get(f"vllm:{name}", 0.0)

    def grown(*names: str) -> float | None:
        if before is None:
            return None
        grown = 0.0
        for name in names:
            then, since = value(name, before), value(name)
            grown += since - then if since >= then else since
        return grown

    def rate(*names: str) -> float | None:
        total = grown(*names)
        elapsed = now.seconds - before.seconds if before is not None else 0.0
        return None if total is None or elapsed <= 0 else total / elapsed

    def each(name: str) -> float | None:
        total, count = grown(f"{name}_sum"), grown(f"{name}_count")
        return total / count if total is not None and count else None

    asked = grown("external_prefix_cache_queries_total")
    hits = grown("external_prefix_cache_hits_total")
    saved, waited = "penstock_prefill_saved_seconds_total", "penstock_load_wait_seconds_total"
    saved_rate, wait_rate = rate(saved), rate(waited)
    return Activity(
        running=value("num_requests_running"),
        waiting=value("num_requests_waiting"),
        kv_usage=value("kv_cache_usage_perc"),
        hit_share=hits / asked if hits is not None and asked else None,
        lookups=rate("penstock_lookups_total"),
        lookup_seconds=each("penstock_lookup_seconds"),
        lookup_limit_raises=value("penstock_lookup_limit_raises_total"),
        load_seconds=each("penstock_load_seconds"),
        pool_bytes=rate("penstock_loaded_bytes_total", "penstock_prefetched_bytes_total"),
        host_bytes=rate("penstock_kept_bytes_total"),
        stored_bytes=rate("penstock_stored_bytes_total"),
        saved_seconds=value(saved) - value(waited),
        saved_rate=None if saved_rate is None or wait_rate is None else saved_rate - wait_rate,
        failures=sum(value(f"penstock_{name}") for name in _FAILURES),
        panics=value("penstock_panics_total"),
    )


def total(of: Sequence[Activity]) -> Activity:
    """What several engines do together. Shares and averages are left out: they do not add up."""

    def added(name: str) -> float:
        return sum(getattr(each, name) or 0.0 for each in of)

    names = ("kv_usage", "hit_share", "lookup_seconds", "load_seconds")
    alone: dict[str, Any] = dict.fromkeys(names)
    together = {field.name: added(field.name) for field in fields(Activity)}
    return Activity(**(together | alone))


def watch(
    urls: Sequence[str], interval: float, count: int | None
) -> Iterator[dict[str, Activity | OSError]]:
    """What all engines do: at once, then every `interval` seconds; `count` times, or for ever."""
    before: dict[str, Sample] = {}
    number = 0
    while count is None or number < count:
        if number:
            time.sleep(interval)
        number += 1
        seen: dict[str, Activity | OSError] = {}
        for url, sample in read_all(urls, max(interval, 1.0)).items():
            if isinstance(sample, OSError):
                seen[url] = sample
                continue
            seen[url] = activity(before.get(url), sample)
            before[url] = sample
        yield seen
