"""The environment of a measurement. It is the head of every result, so that figures can be judged.

Only this module describes it: `penstock bench … --json` and everything under `benches/` put
:func:`describe`'s result into their JSON. They call it before they measure anything, because the
result holds the machine's load at that time.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
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
SERVERS = ("redis-server", "valkey-server")

CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
"""The host's default for TCP sockets. It matters more for loopback figures than any client does."""

_NOT_MEASURED = ("docs", "*.md", "benches/results")
"""Parts of a checkout that no figure depends on."""

_PASSWORDS = re.compile(r"(?<=://)([^/?#@\s]*:)\S*(?=@)|([?&][a-z_]*password=)[^&\s]*")


def describe() -> dict[str, Any]:
    """The date, the command, the machine and the versions, as plain JSON."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command(sys.orig_argv),
        "machine": {
            "gpus": gpus(),
            "cpu": _from_proc("/proc/cpuinfo", "model name"),
            "cores": os.cpu_count(),
            "memory": _from_proc("/proc/meminfo", "MemTotal"),
            "kernel": platform.release(),
            "tcp_congestion_control": _first_line(CONGESTION_CONTROL),
            "load_at_start": os.getloadavg()[0],
        },
        "versions": {
            "python": platform.python_version(),
            **{name: _package_version(name) for name in PACKAGES},
            **{name: _server_version(name) for name in SERVERS},
            **source(Path(__file__)),
        },
    }


def gpus() -> list[str]:
    """NVIDIA's devices, each with its driver and the generation and width of its PCIe link."""
    asked = "name,driver_version,pcie.link.gen.max,pcie.link.width.max"
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return said.stdout.splitlines()


def command(argv: list[str]) -> str:
    """The command as a user would type it in this directory, from the interpreter's own arguments
    (`sys.orig_argv`). Leaves out passwords, and the interpreter of an installed program.

    >>> command(["python", "-m", "benches.clients", "--sizes", "64KiB"])
    'python -m benches.clients --sizes 64KiB'
    >>> command(["/usr/bin/python3", "/elsewhere/penstock", "bench", "pool", "--json"])
    '/elsewhere/penstock bench pool --json'
    >>> command(["/usr/bin/python3", "penstock", "bench", "pool", "redis://me:secret@host:6379"])
    "penstock bench pool 'redis://me:***@host:6379'"
    """
    program, *arguments = argv
    if arguments and Path(arguments[0]).name == "penstock":
        program, *arguments = arguments
    return shlex.join([_as_typed(program), *(_without_password(word) for word in arguments)])


def _as_typed(program: str) -> str:
    path = Path(program)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    found = shutil.which(path.name)
    return path.name if found is not None and Path(found) == path else program


def _without_password(word: str) -> str:
    return _PASSWORDS.sub(lambda found: f"{found[1] or found[2]}***", word)


def _from_proc(path: str, field: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return "unknown"
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return "unknown"


def _first_line(path: Path) -> str:
    try:
        return path.read_text().partition("\n")[0]
    except OSError:
        return "unknown"


def _package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _server_version(binary: str) -> str | None:
    if shutil.which(binary) is None:
        return None
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    return next((word[2:] for word in said.stdout.split() if word.startswith("v=")), None)


def source(file: Path) -> dict[str, Any]:
    """The commit of the checkout that `file` belongs to, and the files that differ from it. Both
    are None if Penstock is installed, not checked out."""
    try:
        root = _git(file.parent, "rev-parse", "--show-toplevel")
        # An environment may lie in another project's checkout, so check that the file is in it.
        _git(file.parent, "ls-files", "--error-unmatch", file.name)
        commit = _git(file.parent, "rev-parse", "--short", "HEAD")
        measured = [".", *(f":(exclude){part}" for part in _NOT_MEASURED)]
        changed = _git(Path(root), "status", "--porcelain", "--untracked-files=all", *measured)
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "uncommitted": None}
    return {"commit": commit, "uncommitted": [line.split()[-1] for line in changed.splitlines()]}


def _git(folder: Path, *arguments: str) -> str:
    said = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
    )
    return said.stdout.strip()
