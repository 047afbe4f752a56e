"""Namespaces of a pool on the command line: which a command is for, and how they are shown."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from penstock.cli import words
from penstock.errors import ConfigError
from penstock.pool import NamespaceUsage


def add_namespace(parser: argparse.ArgumentParser) -> None:
    """Adds the option that names one namespace."""
    parser.add_argument(
        "--namespace",
        metavar="NS",
        help="only this one: its digest as `ls` shows it, or the beginning of it",
    )


def add_timeout(parser: argparse.ArgumentParser, timed: str) -> None:
    """Adds the option that bounds the time of `timed`, a step of the work."""
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=words.seconds_argument,
        default=60.0,
        help=f"longest that {timed} may take (default: %(default)s)",
    )


def add_rate(parser: argparse.ArgumentParser) -> None:
    """Adds the option that bounds the bytes moved in a second."""
    parser.add_argument(
        "--rate",
        metavar="SIZE/s",
        type=words.rate_argument,
        help="move at most so many bytes a second, as 100MiB/s (default: no bound)",
    )


def chosen(used: Sequence[NamespaceUsage], beginning: str | None) -> list[NamespaceUsage]:
    """The namespace whose digest begins so; all without a `beginning`.

    Raises:
        ConfigError: none or several begin so.
    """
    if beginning is None:
        return list(used)
    found = [one for one in used if one.digest.hex().startswith(beginning.lower())]
    if not beginning or len(found) != 1:
        count = f"{len(found)} namespaces begin" if found else "no namespace begins"
        raise ConfigError(f"{count} with {beginning!r}; `penstock pool ls` shows them")
    return found


def namespace_as_json(one: NamespaceUsage) -> dict[str, Any]:
    """A namespace in a document."""
    return {
        "namespace": one.digest.hex(),
        "objects": one.objects,
        "bytes": one.nbytes,
        "first_described": one.first_described,
        "last_described": one.last_described,
        "last_use": one.last_use,
        "description": one.description,
    }
