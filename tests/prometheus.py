"""A real Prometheus for tests, and the dashboard's queries for it."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.processes import free_port
from lab.waiting import eventually

ROOT = Path(__file__).parents[1]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/penstock.json").read_text())
ALERTS = ROOT / "deploy/prometheus/penstock-alerts.yml"

needed = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus is not installed (scripts/install-servers.sh installs it)",
)
"""Skips a test where there is none."""


class Prometheus:
    """Scrapes servers every second. Use as a context manager.

    `targets` gives each server's name, which becomes the label `instance`, and its host:port.
    """

    def __init__(
        self, folder: Path, targets: Mapping[str, str], rules: Sequence[Path] = ()
    ) -> None:
        port = free_port()
        self._address = f"http://127.0.0.1:{port}"
        self._log = folder / "prometheus.log"
        config = folder / "prometheus.yml"
        servers = [
            {"targets": [address], "labels": {"instance": name}}
            for name, address in targets.items()
        ]
        # JSON is YAML.
        config.write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(path) for path in rules],
                    "scrape_configs": [{"job_name": "vllm", "static_configs": servers}],
                }
            )
        )
        self._command = [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder}/prometheus",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Prometheus:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What an instant query gives."""
        found: list[dict[str, Any]] = self._ask("query", query=expression)
        return found

    def query_range(
        self, expression: str, begin: float, end: float, step: float
    ) -> list[dict[str, Any]]:
        """What a query gives between two times of the wall clock."""
        found: list[dict[str, Any]] = self._ask(
            "query_range", query=expression, start=str(begin), end=str(end), step=str(step)
        )
        return found

    def _ask(self, kind: str, **what: str) -> Any:
        url = f"{self._address}/api/v1/{kind}?" + urllib.parse.urlencode(what)
        with urllib.request.urlopen(url, timeout=120) as answer:
            return json.load(answer)["data"]["result"]

    def wait_for(self, expression: str) -> None:
        """Waits until a query gives something."""

        def gives() -> bool:
            try:
                return bool(self.query(expression))
            except OSError:
                return False

        eventually(gives, lambda: f"{expression}\n{self._log.read_text()[-2000:]}", pause=0.2)


def as_sent(expression: str, interval: str = "30s") -> str:
    """A query of the dashboard, as Grafana would send it."""
    return expression.replace("$__rate_interval", interval).replace("$model", ".*")


def targets(interval: str = "30s") -> list[tuple[str, str]]:
    """The title of each panel with each of its queries, as Grafana would send them."""
    return [
        (panel["title"], as_sent(target["expr"], interval))
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    ]
