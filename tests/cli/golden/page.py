"""Makes a command's page: its help, and what becomes of wrong calls.

Each call is made in a process of its own, forked from this one, which has imported the commands. So
a page shows real exit statuses, and whatever a call prints by whatever way.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab.demo import program as demo
from penstock.cli.main import COMMANDS, main, make_parser
from tests.cli.golden.calls import Call, calls
from tests.cli.golden.room import PASSWORD, Room

FOLDER = Path(__file__).parent
DEMO = "demo"
"""The demo's name among the commands."""

WIDTH = 100
"""Columns of help."""

LONGEST = 60
"""Seconds that a wrong call may take."""

_NOBODY = 65534
_HEAD = "Wrong calls. Behind each, its exit status; beneath, what it prints."


def preload() -> None:
    """Imports what calls import, so that it is imported once, and sets the environment of all."""
    for name in [name for name in os.environ if name.startswith(("PENSTOCK_", "PYTHONHASHSEED"))]:
        del os.environ[name]
    # argparse takes the width of help from here.
    os.environ["COLUMNS"] = str(WIDTH)
    os.environ["NO_COLOR"] = "1"
    for name in COMMANDS:
        importlib.import_module(f"penstock.cli.{name.replace('-', '_')}")
    for name in ("vllm.settings", "vllm.compat.versions"):
        importlib.import_module(f"penstock.{name}")


def commands() -> dict[str, argparse.ArgumentParser]:
    """Every command, and every group of commands, without `penstock` before its name; and the
    demo, a program of its own."""
    found = {DEMO: demo.make_parser()}

    def walk(parser: argparse.ArgumentParser) -> None:
        found[parser.prog.removeprefix("penstock").strip()] = parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for each in action.choices.values():
                    walk(each)

    walk(make_parser())
    return found


def path(command: str, folder: Path = FOLDER) -> Path:
    """The file of a command's page."""
    words = ["lab"] if command == DEMO else ["penstock"]
    return folder / ("-".join([*words, *command.split()]) + ".txt")


def _shown(words: Sequence[str]) -> str:
    """A call as it is typed."""
    program = ("python", "-m", "lab.demo")
    return shlex.join((*program, *words[1:]) if words[:1] == (DEMO,) else ("penstock", *words))


def page(command: str, parser: argparse.ArgumentParser, room: Room) -> str:
    """A command's page.

    Raises:
        AssertionError: a wrong call was not refused, shows a traceback or a password, or takes too
            long.
    """
    lines = list(_help(command, room))
    lines += ["", "-" * WIDTH, _HEAD]
    for call in calls(command, parser):
        status, out, err = _make(call, room)
        shown = _shown(call.words)
        for problem in _problems(status, out + err):
            said = f"it ends with {status} and prints\n{out}{err}"
            raise AssertionError(f"{shown}: {problem}; {said}")
        lines += ["", f"$ {shown} → {status}"]
        lines += [f"  {line}".rstrip() for line in (out + err).splitlines()]
    return "\n".join([*lines, ""])


def _help(command: str, room: Room) -> Iterator[str]:
    status, out, err = _make(Call((*command.split(), "--help")), room)
    assert (status, err) == (0, ""), err
    yield from (line.rstrip() for line in out.splitlines())


def _problems(status: int, printed: str) -> Iterator[str]:
    if status not in (1, 2):
        yield "it is no exit status of a wrong call"
    if "Traceback" in printed or "panicked" in printed:
        yield "it fails by accident"
    if PASSWORD in printed:
        yield "it shows the password"
    if not printed.strip():
        yield "it says nothing"


def _make(call: Call, room: Room) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a call."""
    words = [
        word.replace("$ROOM", str(room.folder))
        .replace("$PORT", str(room.server.port))
        .replace("$NEWER", room.newer)
        for word in call.words
    ]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            _run(words, call, room, out.fileno(), err.fileno())
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(room.plain(file.read()))
    return os.waitstatus_to_exitcode(status), *texts


def _run(words: list[str], call: Call, room: Room, out: int, err: int) -> None:
    """The forked process. Does not return."""
    status = 70
    try:
        signal.alarm(LONGEST)
        for number, source in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
            os.dup2(source, number)
        os.chdir(room.folder)
        os.environ["XDG_CACHE_HOME"] = str(room.folder / "cache")
        if call.is_other_user and os.geteuid() == 0:
            os.setuid(_NOBODY)
        status = demo.main(words[1:]) if words[:1] == [DEMO] else main(words)
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
