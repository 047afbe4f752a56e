"""Fields of settings that are options of the command line.

A field says once what its option looks like and means. `penstock.cli.options` makes the option.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

_KEY = "penstock.option"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Option:
    """What the command line shows of a field."""

    metavar: str
    """What stands for a value. It tells how one is read, as `SIZE` or `SECONDS` does. Empty: the
    choices stand there."""
    help: str
    """The text of `--help`. The field's default is added to it, unless it tells the default."""
    name: str = ""
    """The option, without dashes before it. Empty: it is called as the field is."""
    choices: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.metavar and not self.choices:
            raise TypeError(f"an option with neither metavar nor choices: {self.help}")

    @classmethod
    def of(cls, metadata: Mapping[Any, Any]) -> Option | None:
        """The option of a field with this metadata; None if it has none."""
        found = metadata.get(_KEY)
        if not isinstance(found, Option | None):
            raise TypeError(f"{_KEY} of a field's metadata is no Option, but {found!r}")
        return found


def shown(
    metavar: str, help: str, *, name: str = "", choices: tuple[str, ...] | None = None
) -> dict[str, Option]:
    """Metadata of a field that is an option."""
    return {_KEY: Option(metavar, help, name, choices)}


def option(
    default: _T,
    metavar: str,
    help: str,
    *,
    name: str = "",
    choices: tuple[str, ...] | None = None,
) -> _T:
    """A field with a default that is an option."""
    made: _T = field(default=default, metadata=shown(metavar, help, name=name, choices=choices))
    return made
