"""The dashboard's queries and the alerts, in a real Prometheus that scrapes the connector."""

from __future__ import annotations

import functools
import json
import math
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from penstock.demo.processes import free_port
from penstock.vllm.counters import COUNTERS, HISTOGRAM_LABELS, HISTOGRAMS, Counters
from penstock.vllm.stats import PenstockPromMetrics

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy/grafana/penstock.json").read_text())
ALERTS = ROOT / "deploy/prometheus/penstock-alerts.yml"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("promtool") is None,
        reason="prometheus is not installed (scripts/install-servers.sh installs it)",
    ),
]


class Engine:
    """The connector's own metrics, and vLLM's that the dashboard shows, under steady traffic."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
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
        self.port = free_port()
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), _page_of(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def work(self) -> None:
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

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _page_of(registry: CollectorRegistry) -> type[BaseHTTPRequestHandler]:
    """Answers as vLLM does, whatever format is asked for: as plain text, with colons in names."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.end_headers()
            self.wfile.write(generate_latest(registry))

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    return Page


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that has scraped an engine at work for a while."""
    folder = tmp_path_factory.mktemp("prometheus")
    engine, port = Engine(), free_port()
    scrape = {"job_name": "vllm", "static_configs": [{"targets": [f"127.0.0.1:{engine.port}"]}]}
    config = folder / "prometheus.yml"
    # JSON is YAML.
    config.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(ALERTS)],
                "scrape_configs": [scrape],
            }
        )
    )
    stopped = threading.Event()

    def work() -> None:
        while not stopped.wait(0.1):
            engine.work()

    thread = threading.Thread(target=work)
    thread.start()
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_for_samples(address)
            yield address
        finally:
            server.kill()
            stopped.set()
            thread.join()
            engine.close()


def _wait_for_samples(address: str) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            found = query(address, "count_over_time(vllm:penstock_loads_total[1m]) >= 4")
            if found:
                return
        except OSError:
            pass
        assert time.monotonic() < end, "Prometheus has scraped nothing"
        time.sleep(0.2)


def query(address: str, expression: str) -> list[dict[str, Any]]:
    """What an instant query gives."""
    url = f"{address}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(url, timeout=10) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def targets() -> list[tuple[str, str]]:
    """The title of each panel with each of its queries, as Grafana would send them."""
    return [
        (panel["title"], target["expr"].replace("$__rate_interval", "30s").replace("$model", ".*"))
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    ]


@pytest.mark.parametrize(
    ("title", "expression"), targets(), ids=lambda text: str(text)[:60].replace("/", " ")
)
def test_every_query_of_the_dashboard_returns_data(
    prometheus: str, title: str, expression: str
) -> None:
    found = query(prometheus, expression)
    assert found, (title, expression)
    assert all(math.isfinite(float(each["value"][1])) for each in found), (title, found)


def test_the_figure_that_pays_for_the_pool_is_right(prometheus: str) -> None:
    [(_, net)] = [each for each in targets() if each[0] == "Prefill seconds saved, net"]
    [tenants] = [each[1] for each in targets() if each[0] == "Net seconds saved, by tenant"]
    [all_of_it] = query(prometheus, net)
    by_tenant = {
        each["metric"].get("tenant", ""): float(each["value"][1])
        for each in query(prometheus, tenants)
    }
    # Ten steps a second, or fewer on a busy machine; of each 2.7 s net of a second's 3.
    assert by_tenant["red"] == pytest.approx(2 * by_tenant[""], rel=0.2)
    assert float(all_of_it["value"][1]) == pytest.approx(sum(by_tenant.values()), rel=0.2)


def test_the_dashboard_hides_no_metric() -> None:
    """All that is measured is on it, but for what another panel's figure is made of."""
    shown = " ".join(expression for _, expression in targets())
    missing = {name for name in (*COUNTERS, *HISTOGRAMS) if f"penstock_{name}" not in shown}
    assert missing == {
        "lookups",
        "lookups_not_awaited",
        "loads",
        "prefetches",
        "probes",
        "stored_blocks",
        "unpinned_bytes",
    }


def test_the_model_can_be_chosen(prometheus: str) -> None:
    [choice] = [each for each in DASHBOARD["templating"]["list"] if each["name"] == "model"]
    asked = choice["query"]["query"].removeprefix("label_values(").removesuffix(", model_name)")
    assert {each["metric"]["model_name"] for each in query(prometheus, asked)} == {"m"}


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
            "PenstockHasNoKey",
            "40m",
            [series("foreign_objects_total", "0+0x60")],
            [series("foreign_objects_total", "0+5x60")],
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
