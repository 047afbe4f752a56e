"""What a pool says reaches the terminal as printable text, whatever it holds."""

from __future__ import annotations

import json
import logging
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.pretended import Engine, hashes
from penstock import PenstockError
from penstock._native import Store
from penstock.cli import main, words
from penstock.cli.main import _fail
from penstock.cli.pool_diff import differences, flat
from penstock.cli.quotas import accounts, table
from penstock.cli.sharing import of_namespaces
from penstock.cli.top import page
from penstock.cli.writers import of_marks
from penstock.pool import NamespaceUsage
from penstock.pool.namespace import DESCRIPTIONS, ROLL, object_key
from penstock.printable import printable
from tests.terminal import written_to_terminal

EVIL = "\x1b[2J\x1b]0;pwned\x07evil[red]x[/red][/]\r\nfeigned line\x7f\x9b31m\u202e:smile:"
"""Clears the screen, sets the title, begins a line of its own; markup that ends nothing."""
CALL = "import sys; from penstock.cli import main; sys.exit(main())"


@pytest.fixture
def pool(tmp_path: Path) -> str:
    """A pool with two namespaces of a model, both of them described by an attacker."""
    url = f"file://{tmp_path}/pool?size=64MiB"
    store = Store.open(url)
    for number in range(2):
        engine = Engine(store, EVIL, facts={EVIL: [EVIL, number], "weights": f"{EVIL}:{EVIL}"})
        engine.put(hashes(list(range(100)))[:2])
    return url


def namespaces(url: str) -> list[str]:
    found = Store.open(url).usage(timeout=60.0)
    return [digest.hex() for digest, *_ in found if digest != DESCRIPTIONS]


def commands(url: str) -> list[list[str]]:
    one, other = namespaces(url)
    return [
        ["pool", "ls", url],
        ["pool", "stats", url],
        ["pool", "verify", url],
        ["pool", "diff", one, other, url],
        ["doctor", url],
    ]


def is_harmless(written: str) -> bool:
    return all(each.isprintable() or each == "\n" for each in written)


def test_commands_write_printable_text(pool: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands(pool):
        assert main(command) in (0, 1)
        written = "".join(capsys.readouterr())
        assert is_harmless(written), command
        assert "\nfeigned line" not in written
        if command[1] in ("ls", "verify"):
            # It is shown, so that an operator sees it.
            assert r"evil[red]x[/red]" in written.replace("\n", "").replace(" ", "")


def test_commands_write_valid_json(pool: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands(pool):
        assert main([*command, "--json"]) in (0, 1)
        written = capsys.readouterr().out
        assert is_harmless(written), command
        document = json.loads(written)
        if command[1] == "ls":
            assert EVIL in {one["description"].get("model") for one in document}


def test_a_terminal_gets_no_control_sequence_from_a_pool(pool: str) -> None:
    written = written_to_terminal(100, [sys.executable, "-c", CALL, "pool", "ls", pool])
    assert b"\x1b[2J" not in written
    assert b"\x1b]0;" not in written
    assert b"\nfeigned" not in written
    assert b"pwned" in written


def test_errors_and_logs_are_printable(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    _fail(PenstockError(f"the server said {EVIL}"), 1)
    assert is_harmless(capsys.readouterr().err)
    for name in ("penstock.lookup", "vllm.penstock", "sglang.penstock"):
        try:
            raise ValueError(EVIL)
        except ValueError:
            logging.getLogger(name).exception("it said %s", EVIL)
    assert len(caplog.records) == 3
    assert is_harmless(caplog.text)


@given(st.text())
def test_what_is_printable_stays_so(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert printable(shown) == shown
    assert shown == text or not text.isprintable()


def json_values() -> st.SearchStrategy[Any]:
    plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    return st.recursive(
        plain,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=12,
    )


NAMES = (
    *("model", "kind", "name", "kv_dtype", "block_size", "group", "weights", "options"),
    *("engine", "salt", "tenant", "draft", "config", "lookup"),
)
descriptions = st.dictionaries(st.sampled_from(NAMES) | st.text(), json_values(), max_size=8)


@given(descriptions, descriptions)
def test_every_description_can_be_shown(one: dict[str, Any], other: dict[str, Any]) -> None:
    shown = words.description(one)
    assert shown.isprintable()
    assert len(shown) <= 301
    json.loads(words.as_json(differences(dict(flat(one)), dict(flat(other)))))
    used = [NamespaceUsage(b"\1" * 16, 1, 1, one), NamespaceUsage(b"\2" * 16, 1, 1, other)]
    facts = {"quota_bytes:tenant/*": "1", f"quota_bytes:namespace/{'01' * 16}": "2"}
    words.console().print(table(accounts(facts, used)))


@given(descriptions, descriptions)
def test_doctor_compares_every_description(one: dict[str, Any], other: dict[str, Any]) -> None:
    store = Store.open("memory://?size=4MiB")
    for number, description in enumerate((one, other)):
        text = json.dumps(description | {"model": description.get("model", "m")}).encode()
        store.put(object_key(DESCRIPTIONS, bytes([number]) * 16), text, timeout=60.0)
    for finding in of_namespaces(store, 60.0):
        assert finding.level in ("ok", "note")


@pytest.mark.parametrize("said", ["", "garbage", "-1", "1.5", "²", "9" * 5000, "1e9", EVIL])
def test_numbers_of_a_server_may_be_none(said: str) -> None:
    names = ("used_memory", "maxmemory", "evicted_keys", "used_bytes", "capacity_bytes")
    facts = dict.fromkeys(names, said)
    words.console().print(page({}, facts, 1.0, 100))
    assert words.number(facts, *names) is None


def test_a_mark_may_be_of_any_time(pool: str) -> None:
    store = Store.open(pool)
    # XXH3-64 of nothing, as the roll of engines without keys.
    key = object_key(ROLL, struct.pack("<Q", 0x2D06800538D394C2))
    times = (0, 2**40, 2**64 - 1)
    marks = b"".join(struct.pack("<QQQ16s", time, 7, time, bytes(16)) for time in times)
    store.put(key, marks, timeout=60.0)
    found = [finding.message for finding in of_marks(store, 60.0)]
    assert len(found) == len(times)
    # The newest first.
    assert ["at no valid time" in text for text in found] == [True, True, False]
