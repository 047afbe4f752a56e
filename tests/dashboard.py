"""The dashboard's queries and the alerts, for a real Prometheus."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/penstock.json").read_text())
ALERTS = ROOT / "deploy/prometheus/penstock-alerts.yml"

prometheus_needed = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus is not installed (scripts/install-servers.sh installs it)",
)
"""Skips a test where there is none."""


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
