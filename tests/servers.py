"""Servers of tests: a test that needs one which is not installed is skipped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lab import objects
from lab.loopback import NotInstalled
from lab.servers import PoolServer


class Server(PoolServer):
    """Valkey or Redis, or a skipped test; a failed one if neither of both is installed."""

    def __init__(self, kind: str, folder: Path, *options: str, cluster: bool = False) -> None:
        try:
            super().__init__(kind, folder, *options, cluster=cluster)
        except NotInstalled as error:
            if not any(shutil.which(f"{other}-server") for other in ("redis", "valkey")):
                pytest.fail(f"{error}, nor is the other; one of them is needed")
            pytest.skip(str(error))


class ObjectServer(objects.ObjectServer):
    """An S3 server, or a skipped test."""

    def __init__(self, folder: Path, keys: tuple[str, str] | None = None) -> None:
        try:
            super().__init__(folder, keys)
        except NotInstalled as error:
            pytest.skip(str(error))


class PolicyServer(objects.PolicyServer):
    """An S3 server that holds users to what they may do, or a skipped test."""

    def __init__(self, folder: Path) -> None:
        try:
            super().__init__(folder)
        except NotInstalled as error:
            pytest.skip(str(error))
