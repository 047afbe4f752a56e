"""`penstock doctor --engine` over real HTTP servers of metrics."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter, start_http_server

from lab.processes import free_port
from penstock.cli.main import main
from penstock.exposition import by_label


class Metrics:
    """A server of the counters that an engine has."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.panics = Counter(
            "vllm:penstock_panics", "x", ["engine", "place"], registry=self.registry
        )
        self.dropped = Counter(
            "vllm:penstock_stores_dropped", "x", ["engine"], registry=self.registry
        )
        self.panics.labels("0", "")
        self.dropped.labels("0")
        self.port = free_port()
        self._server, self._thread = start_http_server(self.port, "127.0.0.1", self.registry)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    served = Metrics()
    yield served
    served.close()


def test_an_engine_without_faults(metrics: Metrics, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--engine", f"127.0.0.1:{metrics.port}"]) == 0
    assert "no thread of Penstock has panicked" in capsys.readouterr().out


def test_panics_are_told_by_place(metrics: Metrics, capsys: pytest.CaptureFixture[str]) -> None:
    """Several engines of a server add up."""
    for engine in "01":
        metrics.panics.labels(engine, "penstock-copy").inc(3)
    metrics.panics.labels("0", "penstock-dns").inc()
    metrics.dropped.labels("0").inc(12)
    assert main(["doctor", "--json", "--engine", f"127.0.0.1:{metrics.port}"]) == 0
    (engine,) = json.loads(capsys.readouterr().out)["engines"]
    panics, stores = engine["findings"]
    assert (panics["check"], panics["level"]) == ("panics", "warn")
    assert "penstock-copy (6), penstock-dns (1)" in panics["message"]
    assert (stores["check"], stores["level"]) == ("stores", "note")


def test_an_engine_that_does_not_answer_and_one_without_penstock(
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = start_http_server(0, "127.0.0.1", CollectorRegistry())
    port = other[0].server_port
    try:
        engines = ["--engine", f"127.0.0.1:{free_port()}", "--engine", f"127.0.0.1:{port}"]
        assert main(["doctor", "--json", *engines]) == 1
    finally:
        other[0].shutdown()
        other[0].server_close()
        other[1].join()
    gone, alien = json.loads(capsys.readouterr().out)["engines"]
    assert [finding["check"] for finding in gone["findings"]] == ["connection"]
    assert [finding["check"] for finding in alien["findings"]] == ["connector"]


def test_sums_for_each_value_of_a_label() -> None:
    page = 'a_total{x="1",y="p"} 2\na_total{x="2",y="p"} 3\na_total{x="2",y="q"} 4\nb_total 5\n'
    assert by_label(page, "a_total", "y") == {"p": 5, "q": 4}
    assert by_label(page, "b_total", "y") == {}
