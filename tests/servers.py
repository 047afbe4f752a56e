"""Valkey and Redis servers of tests: a test that needs one which is not installed is skipped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from lab.servers import NotInstalled, PoolServer


class Server(PoolServer):
    """Such a server, or a skipped test; a failed one if neither of both is installed."""

    def __init__(self, kind: str, folder: Path, *options: str, cluster: bool = False) -> None:
        try:
            super().__init__(kind, folder, *options, cluster=cluster)
        except NotInstalled as error:
            if not any(shutil.which(f"{other}-server") for other in ("redis", "valkey")):
                pytest.fail(f"{error}, nor is the other; one of them is needed")
            pytest.skip(str(error))
