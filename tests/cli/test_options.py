"""Options that are made from fields of settings."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

import pytest

from penstock.cli import options
from penstock.cli.main import make_parser
from penstock.lookup.service import Limits
from penstock.lookup.service import Settings as LookupSettings
from penstock.option import option, shown
from penstock.sim import Prices
from penstock.vllm.settings import Settings


@dataclass(frozen=True)
class Room:
    """Settings of a test."""

    owner: str = field(metadata=shown("NAME", "whose it is"))
    area: int = option(2 << 30, "SIZE", "how large it is")
    wait: float = option(0.5, "SECONDS", "how long it waits (default: a while)", name="room-wait")
    colour: str = option("red", "", "how it looks", choices=("red", "blue"))
    limit: int | None = option(None, "N", "how many fit")
    inside: int = 3


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    options.add(made, Room)
    return made


def test_what_is_given_is_read_and_the_rest_is_as_the_fields_say(
    parser: argparse.ArgumentParser,
) -> None:
    given = ["--owner", "", "--area", "1GiB", "--room-wait", "2"]
    assert options.read(Room, parser.parse_args(given)) == Room("", 1 << 30, 2.0)
    assert options.given(Room, parser.parse_args(["--colour", "red"])) == {"colour": "red"}
    assert options.given(Room, parser.parse_args([])) == {}


def test_help_tells_the_default_once(parser: argparse.ArgumentParser) -> None:
    told = {action.dest: action.help for action in parser._actions}
    assert told["owner"] == "whose it is"
    assert told["area"] == "how large it is (default: 2GiB)"
    assert told["room_wait"] == "how long it waits (default: a while)"
    assert told["colour"] == "how it looks (default: red)"
    assert told["limit"] == "how many fit"


@pytest.mark.parametrize("wrong", [["--area", "much"], ["--colour", "green"], ["--inside", "1"]])
def test_what_is_no_value_of_a_field_is_refused(
    wrong: list[str], parser: argparse.ArgumentParser
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(wrong)


def test_only_the_named_ones_are_added() -> None:
    parser = argparse.ArgumentParser()
    options.add(parser, Room, "colour")
    assert [action.dest for action in parser._actions] == ["help", "colour"]


@dataclass(frozen=True)
class CountAsText:
    """Settings whose option would give a number where the field has text."""

    rooms: str = option("3", "N", "how many")


@dataclass(frozen=True)
class TextAsCount:
    """Settings whose option has a metavar that nothing reads, and so would give text."""

    rooms: int = option(3, "ROOMS", "how many")


@dataclass(frozen=True)
class ListAsText:
    """Settings whose option would give one text where the field has several."""

    rooms: list[str] = option(None, "NAMES", "which ones")


@dataclass(frozen=True)
class Flag:
    """Settings with a field that is true or false, which no option gives."""

    is_open: bool | None = option(None, "N", "whether it is open")


@dataclass(frozen=True)
class NoChoice:
    """Settings whose default is none of its choices."""

    colour: str = option("green", "", "how it looks", choices=("red", "blue"))


@dataclass(frozen=True)
class NoOption:
    """Settings whose metadata holds something else where an option is."""

    colour: str = field(default="", metadata=dict.fromkeys(shown("NAME", "its colour"), "red"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (CountAsText, r"CountAsText\.rooms is <class 'str'>, but its option N gives int"),
        (TextAsCount, r"TextAsCount\.rooms is <class 'int'>, but its option ROOMS gives str"),
        (ListAsText, r"ListAsText\.rooms is list\[str\], but its option NAMES gives str"),
        (Flag, r"Flag\.is_open is bool | None, but its option N gives int"),
        (NoChoice, r"NoChoice\.colour is 'green' by default: none of \('red', 'blue'\)"),
        (NoOption, r"no Option, but 'red'"),
    ],
)
def test_a_field_that_does_not_fit_its_option_is_a_mistake(settings: type, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        options.add(argparse.ArgumentParser(), settings)


def test_a_name_that_is_no_option_is_a_mistake() -> None:
    with pytest.raises(TypeError, match="Room has no option for inside, limits"):
        options.add(argparse.ArgumentParser(), Room, "colour", "limits", "inside")


def test_an_option_shows_something_for_its_value() -> None:
    with pytest.raises(TypeError, match="neither metavar nor choices: how it looks"):
        shown("", "how it looks")


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("serve", Settings),
        ("simulate", Prices),
        ("lookup-server", LookupSettings),
        ("lookup-server", Limits),
    ],
)
def test_a_command_has_all_options_of_its_settings(command: str, settings: type) -> None:
    (commands,) = (action for action in make_parser()._actions if isinstance(action.choices, dict))
    known = commands.choices[command]._option_string_actions
    assert options.names(settings)
    assert set(options.names(settings).values()) <= set(known)
