"""A real Prometheus, which scrapes servers and answers queries."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.loopback import LoopbackServer
from lab.processes import free_port
from lab.waiting import LIMIT


class Prometheus(LoopbackServer):
    """Prometheus, which scrapes servers every second. Use as a context manager.

    `targets` gives each server's name, which becomes the label `instance`, and its host:port.
    """

    def __init__(
        self, folder: Path, targets: Mapping[str, str], rules: Sequence[Path] = ()
    ) -> None:
        self._config = folder / "prometheus.yml"
        servers = [
            {"targets": [address], "labels": {"instance": name}}
            for name, address in targets.items()
        ]
        # JSON is YAML.
        self._config.write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                    "rule_files": [str(path) for path in rules],
                    "scrape_configs": [{"job_name": "vllm", "static_configs": servers}],
                }
            )
        )
        origin = "scripts/install-servers.sh installs it"
        super().__init__("prometheus", origin, folder, "prometheus.log")

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
        answer = self._get(f"api/v1/{kind}?{urllib.parse.urlencode(what)}")
        return json.loads(answer)["data"]["result"]

    def _get(self, path: str) -> bytes:
        url = f"http://127.0.0.1:{self._port}/{path}"
        with urllib.request.urlopen(url, timeout=LIMIT) as answer:
            said: bytes = answer.read()
            return said

    def _choose_ports(self) -> None:
        self._port = free_port()

    def _arguments(self) -> list[str]:
        return [
            f"--config.file={self._config}",
            f"--storage.tsdb.path={self._folder}/prometheus",
            f"--web.listen-address=127.0.0.1:{self._port}",
        ]

    def _serves(self) -> bool:
        return bool(self._get("-/ready"))
