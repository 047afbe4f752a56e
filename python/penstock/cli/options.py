"""Makes options of the command line from fields of settings, and settings from what was given.

A default stands in the field alone: an option that is not given is None.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from penstock.cli import words
from penstock.option import Option


@dataclass(frozen=True)
class _Kind:
    """The values of an option."""

    type: type
    read: Callable[[str], Any] | None
    """None: as they are."""


_TEXT = _Kind(str, None)

_KINDS: Mapping[str, _Kind] = {
    "K": _Kind(int, words.count_argument),
    "N": _Kind(int, words.count_argument),
    "PRICE": _Kind(float, words.price_argument),
    "SECONDS": _Kind(float, words.seconds_argument),
    "SHARE": _Kind(float, words.share_argument),
    "SIZE": _Kind(int, words.size_argument),
    "X": _Kind(float, float),
}
"""Kinds of values, by what stands for them in help. All others are text."""

_T = TypeVar("_T")


def add(parser: argparse.ArgumentParser, settings: type[Any], *names: str) -> None:
    """Adds an option for each field of `settings` that is one, or only for those with `names`.

    Raises:
        TypeError: a field or a name does not fit. This is a mistake in the program.
    """
    known = [field.name for field, _ in _options(settings)]
    if absent := set(names).difference(known):
        raise TypeError(f"{settings.__qualname__} has no option for {', '.join(sorted(absent))}")
    types = get_type_hints(settings)
    for field, option in _options(settings):
        if not names or field.name in names:
            _check(f"{settings.__qualname__}.{field.name}", types[field.name], field, option)
            # Any, because the stubs of argparse do not know that None is allowed.
            reader: Any = _kind(option).read
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


def _check(place: str, declared: Any, field: Field[Any], option: Option) -> None:
    """Refuses an option whose values are not of the field's declared type."""
    is_union = get_origin(declared) in (Union, UnionType)
    taken = set(get_args(declared) if is_union else [declared]) - {NoneType}
    read = _kind(option).type
    if taken != {read}:
        raise TypeError(
            f"{place} is {declared}, but its option {option.metavar or option.choices} gives "
            f"{read.__name__}"
        )
    if option.choices and field.default is not MISSING and field.default not in option.choices:
        raise TypeError(f"{place} is {field.default!r} by default: none of {option.choices}")


def _kind(option: Option) -> _Kind:
    return _KINDS.get(option.metavar, _TEXT)


def _name(field: Field[Any], option: Option) -> str:
    return option.name or field.name.replace("_", "-")


def _help(field: Field[Any], option: Option) -> str:
    default = field.default
    if "(default: " in option.help or default is MISSING or not default:
        return option.help
    told = words.size(default).replace(" ", "") if option.metavar == "SIZE" else default
    return f"{option.help} (default: {told})"
