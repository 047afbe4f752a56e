"""The dashboard's queries and the alerts, in a real Prometheus that scrapes the connector."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lab.prometheus import Prometheus
from lab.waiting import eventually
from penstock.vllm.counters import (
    COUNTERS,
    HISTOGRAM_LABELS,
    HISTOGRAMS,
    PLACE_COUNTERS,
    Counters,
)
from penstock.vllm.stats import PenstockPromMetrics
from tests.dashboard import ALERTS, DASHBOARD, prometheus_needed, targets
from tests.web import serving

pytestmark = [pytest.mark.long, prometheus_needed]


class Engine:
    """The connector's own metrics, and vLLM's that the dashboard shows, under steady traffic."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._lock = threading.Lock()
        types: dict[Any, Any] = {
            kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)
        }
        config = SimpleNamespace(kv_transfer_config=None)
        names = ["model_name", "engine"]
        self._metrics = PenstockPromMetrics(config, types, names, {0: ["m", "0"]})
        self._cache = [
            Counter(f"vllm:external_prefix_cache_{name}", "x", names, registry=registry)
            for name in ("queries", "hits")
        ]

    def page(self) -> bytes:
        """The metrics after one more step: each scrape sees whole steps, and something new."""
        with self._lock:
            self._work()
            return generate_latest(self._registry)

    def _work(self) -> None:
        """A step in which everything happens that is counted."""
        counters = Counters()
        for name in COUNTERS:
            counters.count(name, 3)
        for name in HISTOGRAMS:
            _, labels = HISTOGRAM_LABELS.get(name, ("", (None,)))
            for label in labels:
                counters.observe(name, 0.9, label)
        for tenant, saved in (("red", 2.0), ("", 1.0)):
            counters.count_for(tenant, "prefill_saved_seconds", saved)
            counters.count_for(tenant, "load_wait_seconds", saved / 10)
        self._metrics.observe(counters.take() or {})
        for counter in self._cache:
            counter.labels("m", "0").inc(5)


def _page_of(engine: Engine) -> type[BaseHTTPRequestHandler]:
    """Answers as vLLM does, whatever format is asked for: as plain text, with colons in names."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.end_headers()
            self.wfile.write(engine.page())

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    return Page


class Scraped:
    """What a Prometheus knew right after one scrape.

    What comes later does not change it. All series that it has were scraped at the same times.
    """

    LAST = (
        "timestamp(vllm:penstock_loads_total)"
        " and count_over_time(vllm:penstock_loads_total[25s]) >= 4"
    )
    """The time of the last scrape, if a rate over 30 s can be told of it."""

    def __init__(self, server: Prometheus) -> None:
        self._server = server
        found: list[dict[str, Any]] = []

        def is_known() -> bool:
            with contextlib.suppress(OSError):
                found[:] = server.query(self.LAST)
            return found != []

        eventually(is_known)
        self._at = float(found[0]["value"][1])

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series that a query gives."""
        answers: list[list[dict[str, Any]]] = []

        def is_answered() -> bool:
            # A busy machine may take longer than a request has. The answer stays the same.
            with contextlib.suppress(TimeoutError):
                answers.append(self._server.query_range(expression, self._at, self._at, 1))
            return answers != []

        eventually(is_answered)
        return [(each["metric"], float(each["values"][0][1])) for each in answers[0]]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """A Prometheus that has scraped an engine at work a few times."""
    folder = tmp_path_factory.mktemp("prometheus")
    with (
        serving(_page_of(Engine())) as port,
        Prometheus(folder, {"one": f"127.0.0.1:{port}"}, [ALERTS]) as server,
    ):
        yield Scraped(server)


@pytest.mark.parametrize(
    ("title", "expression"), targets(), ids=lambda text: str(text)[:60].replace("/", " ")
)
def test_every_query_of_the_dashboard_returns_data(
    prometheus: Scraped, title: str, expression: str
) -> None:
    found = prometheus.query(expression)
    assert found, (title, expression)
    assert all(math.isfinite(value) for _, value in found), (title, found)


def test_the_figure_that_pays_for_the_pool_is_right(prometheus: Scraped) -> None:
    [(_, net)] = [each for each in targets() if each[0] == "Prefill seconds saved, net"]
    [tenants] = [each[1] for each in targets() if each[0] == "Net seconds saved, by tenant"]
    [(_, all_of_it)] = prometheus.query(net)
    by_tenant = {labels.get("tenant", ""): value for labels, value in prometheus.query(tenants)}
    [(_, saved)] = prometheus.query("sum(rate(vllm:penstock_prefill_saved_seconds_total[30s]))")
    # However far apart the scrapes were: of each step's 3 s, 2 s are red's, and of both a tenth
    # was waited for.
    assert saved > 0
    assert all_of_it == pytest.approx(0.9 * saved)
    assert by_tenant == pytest.approx({"red": 0.6 * saved, "": 0.3 * saved})


def test_the_dashboard_hides_no_metric() -> None:
    """All that is measured is on it, but for what another panel's figure is made of."""
    shown = " ".join(expression for _, expression in targets())
    missing = {
        name
        for name in (*COUNTERS, *PLACE_COUNTERS, *HISTOGRAMS)
        if f"penstock_{name}" not in shown
    }
    assert missing == {
        "lookups",
        "lookups_not_awaited",
        "loads",
        "prefetches",
        "probes",
        "stored_blocks",
        "unpinned_bytes",
    }


def test_the_model_can_be_chosen(prometheus: Scraped) -> None:
    [choice] = [each for each in DASHBOARD["templating"]["list"] if each["name"] == "model"]
    asked = choice["query"]["query"].removeprefix("label_values(").removesuffix(", model_name)")
    assert {labels["model_name"] for labels, _ in prometheus.query(asked)} == {"m"}


def series(name: str, values: str) -> dict[str, str]:
    """A series of a test of alerts, a value each minute."""
    labels = 'instance="a",model_name="m",engine="0"'
    return {"series": f"vllm:penstock_{name}{{{labels}}}", "values": values}


@pytest.mark.parametrize(
    ("alert", "after", "quiet", "loud"),
    [
        (
            "PenstockPoolDoesNotAnswer",
            "20m",
            [series("lookups_total", "0+60x40"), series("lookup_failures_total", "0+6x40")],
            [series("lookups_total", "0+60x40"), series("lookup_failures_total", "0+59x40")],
        ),
        (
            "PenstockCostsMoreThanItSaves",
            "2h",
            [
                series("prefill_saved_seconds_total", "0+60x200"),
                series("load_wait_seconds_total", "0+20x200"),
            ],
            [
                series("prefill_saved_seconds_total", "0+6x200"),
                series("load_wait_seconds_total", "0+20x200"),
            ],
        ),
        (
            "PenstockValuesAreNotWhole",
            "20m",
            [series("rejected_objects_total", "0+0x40")],
            [series("rejected_objects_total", "0x15 1x20")],
        ),
        (
            "PenstockWrongKv",
            "20m",
            [series("witness_disagreements_total", "0+0x40")],
            [series("witness_disagreements_total", "0x15 1x20")],
        ),
        (
            "PenstockHasNoKey",
            "40m",
            [series("foreign_objects_total", "0+0x60")],
            [series("foreign_objects_total", "0+5x60")],
        ),
        (
            "PenstockWaitsInVain",
            "40m",
            [series("handovers_total", "0+60x60"), series("handovers_given_up_total", "0+6x60")],
            [series("handovers_total", "0+60x60"), series("handovers_given_up_total", "0+20x60")],
        ),
        (
            "PenstockPanics",
            "20m",
            [series("panics_total", "0+0x40")],
            [series("panics_total", "_x15 1x20")],
        ),
        (
            "PenstockDropsStores",
            "40m",
            [series("stores_dropped_total", "0+5x60"), series("stores_failed_total", "0+0x60")],
            [series("stores_dropped_total", "0+50x60"), series("stores_failed_total", "0+50x60")],
        ),
    ],
)
def test_an_alert_fires_when_it_should_and_only_then(
    tmp_path: Path,
    alert: str,
    after: str,
    quiet: list[dict[str, str]],
    loud: list[dict[str, str]],
) -> None:
    for inputs, fires in ((quiet, False), (loud, True)):
        expression = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
        expected = [{"labels": "{}", "value": int(fires)}]
        test = {
            "interval": "1m",
            "input_series": inputs,
            "promql_expr_test": [{"expr": expression, "eval_time": after, "exp_samples": expected}],
        }
        file = tmp_path / f"{fires}.yml"
        file.write_text(json.dumps({"rule_files": [str(ALERTS)], "tests": [test]}))
        said = subprocess.run(
            ["promtool", "test", "rules", str(file)], capture_output=True, text=True
        )
        assert said.returncode == 0, said.stdout + said.stderr


def test_every_alert_is_tested() -> None:
    names = [
        line.partition("alert: ")[2]
        for line in ALERTS.read_text().splitlines()
        if "alert: " in line
    ]
    marks = test_an_alert_fires_when_it_should_and_only_then.pytestmark
    assert sorted(names) == sorted(case[0] for case in marks[0].args[1])
