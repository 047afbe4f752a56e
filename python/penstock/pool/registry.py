"""Stores that other distributions bring, by entry points of the group ``penstock.stores``.

An entry point's name is the scheme of the store's URLs. Its value names a class like
:class:`penstock.pool.PythonStore`, as ``module:Class``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import metadata

from penstock._native import built_in_schemes

__all__ = ["GROUP", "RegisteredStore", "registered_stores"]

GROUP = "penstock.stores"

_HOST = (
    "import sys; sys.path[:] = sys.argv[2:]; from penstock.pool.host import main; main(sys.argv[1])"
)
"""Run with the class and with this process's path: the program finds what this process finds."""

_BUILT_IN = frozenset(built_in_schemes())


@dataclass(frozen=True)
class RegisteredStore:
    """A store that a distribution brings."""

    scheme: str
    distribution: str
    """Name and version of the distribution that brings it; of several, if they conflict."""
    value: str
    """What its entry point says."""
    problem: str = ""
    """Why the store cannot be used; empty if it can."""


def registered_stores() -> list[RegisteredStore]:
    """All stores that installed distributions bring, by scheme. Nothing of them is imported."""
    brought: dict[str, set[tuple[str, str]]] = {}
    for point in metadata.entry_points(group=GROUP):
        name, version = _distribution(point)
        brought.setdefault(point.name, set()).add((f"{name} {version}".strip(), point.value))
    return [_one(scheme, sorted(by)) for scheme, by in sorted(brought.items())]


def is_registered(url: str) -> bool:
    """Whether the scheme of a URL is one that is not built in."""
    return url.partition("://")[0] not in _BUILT_IN


def _distribution(point: metadata.EntryPoint) -> tuple[str, str]:
    found = point.dist
    return ("unknown", "") if found is None else (found.name, found.version)


def _one(scheme: str, brought: list[tuple[str, str]]) -> RegisteredStore:
    distributions = ", ".join(dict.fromkeys(name for name, _ in brought))
    value = brought[0][1]
    problem = ""
    if scheme in _BUILT_IN:
        problem = f"{scheme}:// is built into Penstock, and nobody else can bring it"
    elif len(brought) > 1:
        problem = (
            f"several distributions bring {scheme}:// ({distributions}): uninstall all but one"
        )
    elif ":" not in value:
        problem = f"the entry point of {scheme}:// names no class, as module:Class: {value!r}"
    return RegisteredStore(scheme, distributions, value, problem)


def programs() -> list[tuple[str, str, list[str], str]]:
    """For the native module: each registered store's scheme, origin, the command of its program,
    and why there is no command, if there is none."""
    return [
        (one.scheme, one.distribution, [] if one.problem else _command(one.value), one.problem)
        for one in registered_stores()
    ]


def _command(value: str) -> list[str]:
    # An empty entry of the path is the folder that this process is in, which the program starts in
    # too.
    path = (entry or "." for entry in sys.path)
    return [sys.executable, "-c", _HOST, value, *path]
