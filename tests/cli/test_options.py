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
