"""What a measurement ran on: recorded with every result, so that a figure can be judged."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = (
    "penstock",
    "vllm",
    "torch",
    "redis",
    "hiredis",
    "lmcache",
    "mooncake-transfer-engine-non-cuda",
    "numpy",
)

CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
"""The host's default for TCP sockets; it decides loopback figures more than any client does."""


def describe() -> dict[str, Any]:
    """The machine, the versions and the command, as plain JSON."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command(),
        "machine": {
            "cpu": _from_proc("/proc/cpuinfo", "model name"),
            "cores": os.cpu_count(),
            "memory": _from_proc("/proc/meminfo", "MemTotal"),
            "kernel": platform.release(),
            "tcp_congestion_control": CONGESTION_CONTROL.read_text().strip(),
            "load_at_start": os.getloadavg()[0],
        },
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
            "redis-server": _server_version("redis-server"),
            "valkey-server": _server_version("valkey-server"),
            "commit": _commit(),
        },
    }


def available_bytes() -> int:
    """Memory that programs can still have without swapping."""
    return int(_from_proc("/proc/meminfo", "MemAvailable").split()[0]) << 10


def filesystem(folder: Path) -> str:
    """The type of the file system that a folder lies on."""
    said = subprocess.run(
        ["stat", "--file-system", "--format=%T", str(folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    return said.stdout.strip()


def command() -> str:
    """The command that runs this again, from the project's folder."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", spec.name] if spec is not None else [Path(sys.argv[0]).name]
    return shlex.join([".venv-bench/bin/python", *program, *sys.argv[1:]])


def _from_proc(path: str, field: str) -> str:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return "unknown"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _server_version(binary: str) -> str | None:
    if shutil.which(binary) is None:
        return None
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    return next((word[2:] for word in said.stdout.split() if word.startswith("v=")), None)


def _commit() -> str | None:
    """The commit, marked when the tree differs from it; None outside a checkout."""
    root = Path(__file__).parent
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno", "--", ":/crates", ":/python"],
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        return None
    if head.returncode != 0:
        return None
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")
