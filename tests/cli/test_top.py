"""`penstock top` over real HTTP servers of metrics, in a real terminal."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from rich.console import Console

from lab.processes import free_port
from penstock.cli.activity import Activity, Sample, activity, address, total, watch
from penstock.cli.main import main
from penstock.cli.top import page
from penstock.errors import ConfigError
from tests.terminal import shown_in_terminal


class FakeTraffic:
    """The metrics of an engine under a load that the test makes up, served over HTTP."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        labels = ["engine"]

        def counter(name: str, *more: str) -> Counter:
            return Counter(f"vllm:{name}", "x", [*labels, *more], registry=registry)

        self.running = Gauge("vllm:num_requests_running", "x", labels, registry=registry)
        self.lookups = counter("penstock_lookups")
        self.loaded = counter("penstock_loaded_bytes")
        self.prefetched = counter("penstock_prefetched_bytes")
        self.failed = counter("penstock_lookup_failures")
        self.raised = counter("penstock_lookup_limit_raises")
        self.saved = counter("penstock_prefill_saved_seconds", "tenant")
        self.waited = counter("penstock_load_wait_seconds", "tenant")
        self.queries = counter("external_prefix_cache_queries")
        self.hits = counter("external_prefix_cache_hits")
        self.loads = Histogram(
            "vllm:penstock_load_seconds", "x", [*labels, "tier"], registry=registry
        )
        self.port = free_port()
        self._server, self._thread = start_http_server(self.port, "127.0.0.1", registry)

    def serve_requests(self) -> None:
        """Some requests of two tenants, on two engine cores."""
        for engine in "01":
            self.running.labels(engine).set(3)
            self.lookups.labels(engine).inc(5)
            self.loaded.labels(engine).inc(1 << 29)
            self.prefetched.labels(engine).inc(1 << 29)
            self.queries.labels(engine).inc(1000)
            self.hits.labels(engine).inc(750)
            self.saved.labels(engine, "red").inc(20)
            self.waited.labels(engine, "red").inc(2)
            self.loads.labels(engine, "pool").observe(0.25)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def engine() -> Iterator[FakeTraffic]:
    made = FakeTraffic()
    yield made
    made.close()


def test_what_an_engine_does_is_told_by_two_samples(engine: FakeTraffic) -> None:
    url = address(f"127.0.0.1:{engine.port}")
    readings = watch([url], 0.2, 3)
    first = next(readings)[url]
    assert isinstance(first, Activity)
    assert first.lookups is first.hit_share is first.load_seconds is None
    engine.serve_requests()
    busy = next(readings)[url]
    assert isinstance(busy, Activity)
    assert busy.running == 6
    assert busy.hit_share == pytest.approx(0.75)
    assert busy.load_seconds == pytest.approx(0.25)
    assert busy.saved_seconds == pytest.approx(36)
    assert busy.pool_bytes is not None
    assert busy.saved_rate is not None
    assert busy.pool_bytes / (2 << 30) == pytest.approx(busy.saved_rate / 36)
    idle = next(readings)[url]
    assert isinstance(idle, Activity)
    assert (idle.lookups, idle.hit_share, idle.saved_seconds) == (0, None, busy.saved_seconds)


def test_an_engine_that_started_anew_counts_from_its_start() -> None:
    before = Sample(0.0, {"vllm:penstock_lookups_total": 1000.0})
    now = Sample(2.0, {"vllm:penstock_lookups_total": 10.0})
    assert activity(before, now).lookups == 5


def test_one_that_is_gone_hides_no_other(engine: FakeTraffic) -> None:
    here, gone = address(f"127.0.0.1:{engine.port}"), address(f"127.0.0.1:{free_port()}")
    [seen] = watch([here, gone], 0.2, 1)
    assert isinstance(seen[here], Activity)
    assert isinstance(seen[gone], OSError)


@pytest.mark.parametrize("text", ["ftp://host/metrics", "http://", ""])
def test_what_is_no_engine_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no engine"):
        address(text)


def test_json_has_a_line_for_each_reading(
    engine: FakeTraffic, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["top", f"127.0.0.1:{engine.port}", "--json", "--count", "2", "--interval", "0.1"]
    pool = f"file://{tmp_path}/pool?size=64MiB"
    assert main([*command, "--pool", pool]) == 0
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(documents) == 2
    [found] = documents[1]["engines"].values()
    assert found["failures"] == 0
    assert int(documents[1]["pool"]["capacity_bytes"]) == 64 << 20


def test_engines_together_add_up_but_for_shares(engine: FakeTraffic) -> None:
    url = address(f"127.0.0.1:{engine.port}")
    readings = watch([url], 0.1, 2)
    next(readings)
    engine.serve_requests()
    one = next(readings)[url]
    assert isinstance(one, Activity)
    both = total([one, one])
    assert (both.running, both.saved_seconds) == (12, 2 * one.saved_seconds)
    assert both.hit_share is both.load_seconds is both.kv_usage is None


def test_readings_are_one_at_least(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["top", "127.0.0.1:1", "--count", "0"])
    assert "must be at least 1" in capsys.readouterr().err


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", f"127.0.0.1:{free_port()}", "--count", "1"]) == 1
    assert "gone" in capsys.readouterr().out


def in_terminal(columns: int, *arguments: str) -> str:
    program = str(Path(sys.executable).with_name("penstock"))
    return shown_in_terminal(columns, [program, "top", *arguments])


@pytest.mark.parametrize("columns", [80, 110, 140])
def test_names_of_busy_engines_are_not_squeezed(
    columns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wide figures leave room for the names."""
    size = float(1023.99 * (1 << 20))
    busy = Activity(10, 10, 1.0, 1.0, 100.0, 0.005991, 0.07965, size, size, size, 9999.9, 9.99, 999)
    Console(width=columns).print(
        page({"http://10.10.10.10:8000/metrics": busy}, None, 2.0, columns)
    )
    assert "10.10.10.10:8000 " in capsys.readouterr().out


@pytest.mark.parametrize("columns", [140, 80, 50])
def test_one_that_is_gone_is_told_at_every_width(engine: FakeTraffic, columns: int) -> None:
    addresses = [f"127.0.0.1:{engine.port}", f"127.0.0.1:{free_port()}"]
    shown = in_terminal(columns, *addresses, "--count", "1")
    assert "gone" in shown
    assert "1 of 2 answer" in shown


def test_a_small_loss_is_not_less_than_zero(
    engine: FakeTraffic, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.waited.labels("0", "red").inc(0)
    url = address(f"127.0.0.1:{engine.port}")
    readings = watch([url], 0.5, 2)
    next(readings)
    engine.waited.labels("0", "red").inc(0.001)
    seen = next(readings)[url]
    assert isinstance(seen, Activity)
    assert seen.saved_rate is not None
    assert -0.005 < seen.saved_rate < 0
    Console(width=140).print(page({url: seen}, None, 2.0, 140))
    assert "-0.00" not in capsys.readouterr().out


@pytest.mark.parametrize(("columns", "has"), [(140, "look-ups/s"), (80, "pool in/s"), (50, "hits")])
def test_a_terminal_shows_as_much_as_it_has_room_for(
    engine: FakeTraffic, columns: int, has: str
) -> None:
    engine.serve_requests()
    address = f"127.0.0.1:{engine.port}"
    shown = in_terminal(columns, address, "--count", "2", "--interval", "0.2")
    assert address in shown.replace("\r\n", "")
    assert has in shown
    assert "36.0 s" in shown
    assert max(len(line) for line in re.split(r"[\r\n]+", shown)) <= columns
    assert ("look-ups/s" in shown) == (columns >= 140)


def test_engines_far_from_their_pool_are_named(
    engine: FakeTraffic, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["top", f"127.0.0.1:{engine.port}", "--count", "1"]
    assert main(command) == 0
    assert "far from their pool" not in capsys.readouterr().out
    engine.raised.labels("0").inc()
    assert main(command) == 0
    assert f"look-ups may take longer: 127.0.0.1:{engine.port}" in capsys.readouterr().out
