"""Stores that other distributions bring, by entry points of the group ``penstock.stores``.

An entry point's name is the scheme of the store's URLs. Its value names either a class like
:class:`penstock.pool.PythonStore` (``module:Class``), or a module that is a library made by
``penstock-store-plugin`` (``package.module``, without a colon).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

__all__ = ["GROUP", "RegisteredStore", "registered_stores"]

GROUP = "penstock.stores"

_HOST = (
    "import sys; sys.path[:] = sys.argv[2:]; from penstock.pool.host import main; main(sys.argv[1])"
)
"""Run with the class and with this process's path: the program finds what this process finds."""

_BUILT_IN = {"memory", "file", "shm", "s3", "gs", "az", "unix", "redis+unix", "valkey+unix"} | {
    server + topology
    for server in ("redis", "rediss", "valkey", "valkeys")
    for topology in ("", "+sentinel", "+cluster")
}


_UNWANTED: tuple[str, list[str]] = ("nowhere", ["it was not looked for"])


@dataclass(frozen=True)
class RegisteredStore:
    """A store that a distribution brings."""

    scheme: str
    distribution: str
    """Name and version of the distribution that brings it; of several, if they conflict."""
    value: str
    """What its entry point says."""
    kind: Literal["library", "program"]
    """Whether it runs in the process that uses it, or in a program beside it."""
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
    return RegisteredStore(
        scheme, distributions, value, "program" if ":" in value else "library", problem
    )


def places(wanted: Collection[str]) -> list[tuple[str, str, str, list[str]]]:
    """For the native module: scheme, origin, kind and place of each registered store. A place is a
    library's path, a program with its arguments, or (kind ``nowhere``) the reason why there is
    none. Only stores of the `wanted` schemes are looked for: to look for a library runs code of the
    package that it is in."""
    return [
        (one.scheme, one.distribution, *(_place(one) if one.scheme in wanted else _UNWANTED))
        for one in registered_stores()
    ]


def _place(store: RegisteredStore) -> tuple[str, list[str]]:
    if store.problem:
        return "nowhere", [store.problem]
    if store.kind == "program":
        return "program", [sys.executable, "-c", _HOST, store.value, *_search_path()]
    try:
        found = importlib.util.find_spec(store.value)
    except ImportError as error:
        return "nowhere", [f"the library {store.value} is not there: {error}"]
    except Exception as error:
        # The package that it is in was imported, and is not ours.
        reason = f"{type(error).__name__}: {error}"
        return "nowhere", [f"the package of the library {store.value} fails on import: {reason}"]
    if found is None or not found.has_location or not found.origin:
        return "nowhere", [f"the library {store.value} is not there"]
    return "library", [found.origin]


def _search_path() -> Iterable[str]:
    # An empty entry is the folder that this process is in, which the program starts in too.
    return (entry or "." for entry in sys.path)
