"""Makes options of the command line from fields of settings, and settings from what was given.

A default stands in the field alone: an option that is not given is None.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

from penstock.cli import words
from penstock.option import Option

_READERS: Mapping[str, Callable[[str], Any]] = {
    "K": words.count_argument,
    "N": words.count_argument,
    "PRICE": words.price_argument,
    "SECONDS": words.seconds_argument,
    "SHARE": words.share_argument,
    "SIZE": words.size_argument,
    "X": float,
}
"""How values are read, by what stands for them in help. All others are text."""

_T = TypeVar("_T")


def add(parser: argparse.ArgumentParser, settings: type[Any], *names: str) -> None:
    """Adds an option for each field of `settings` that is one, or only for those with `names`."""
    for field, option in _options(settings):
        if not names or field.name in names:
            # None stands for text.
            reader: Any = _READERS.get(option.metavar)
            parser.add_argument(
                f"--{_name(field, option)}",
                metavar=option.metavar or None,
                type=reader,
                choices=option.choices,
                help=_help(field, option),
            )


def given(settings: type[Any], args: argparse.Namespace) -> dict[str, Any]:
    """What the command line gives for fields of `settings`, by their names."""
    found = {
        field.name: getattr(args, _name(field, option).replace("-", "_"))
        for field, option in _options(settings)
    }
    return {name: value for name, value in found.items() if value is not None}


def read(settings: type[_T], args: argparse.Namespace) -> _T:
    """The settings that the command line gives, with their defaults for the others."""
    make: Callable[..., _T] = settings
    return make(**given(settings, args))


def names(settings: type[Any]) -> dict[str, str]:
    """The option of each field of `settings` that is one, by the field's name."""
    return {field.name: f"--{_name(field, option)}" for field, option in _options(settings)}


def _options(settings: type[Any]) -> Iterator[tuple[Field[Any], Option]]:
    for field in fields(settings):
        option = Option.of(field.metadata)
        if option is not None:
            yield field, option


def _name(field: Field[Any], option: Option) -> str:
    return option.name or field.name.replace("_", "-")


def _help(field: Field[Any], option: Option) -> str:
    default = field.default
    if "(default: " in option.help or default is MISSING or not default:
        return option.help
    told = words.size(default).replace(" ", "") if option.metavar == "SIZE" else default
    return f"{option.help} (default: {told})"
