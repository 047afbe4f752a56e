"""The quick start, followed word by word as a reader follows it, prints what the page says.

Replaced are only the model's weights and tokenizer (a small random Qwen3, in a folder of the page's
name, because the real one has to be downloaded), the pool's folder, and ports that are taken.
`pip install .` is left out: the wheel and its installation have their own tests.

A reader has a machine at rest, and a test may not. So the servers wait longer for the pool than by
default, and before the next command the test waits until the pool has what a prompt left.

An output is what the page says, but for these, which differ from run to run:

- a quantity with a unit (`0.006 ms`, `1549 MiB/s`, `20 GiB`, `0.52 s`) stands for any number with a
  unit of the same kind;
- `…` stands for any text within a line, and `file system X` for any kind of file system;
- white space counts as one space, because the widths of columns follow from numbers.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import penstock
from lab.models import attention
from lab.processes import free_port
from lab.waiting import eventually

pytestmark = pytest.mark.e2e

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
MODEL = "Qwen/Qwen3-0.6B"
PROMPT = "The penstock carries water from the reservoir to the turbine. "
"""The page's, which the tokenizer is made for. Any other text would have a token for each byte."""

NOT_RUN = ("pip install .",)
PATIENCE = "--set lookup_timeout=120 --set load_timeout=240"
"""What the servers are told besides."""
BLOCK = 128
"""Tokens of a block, by the page."""
START_SECONDS = 600.0
STOP_SECONDS = 240.0
COMMAND_SECONDS = 240.0

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_UNITS = (r"(?:[KMGT]i)?B/s", r"(?:[KMGT]i)?B", "ms", "s")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Block:
    """A fenced block of the page, with the text between it and the block before."""

    before: str
    language: str
    text: str


def blocks(page: str) -> Iterator[Block]:
    """The page's blocks in their order."""
    end = 0
    for found in _BLOCK.finditer(page):
        yield Block(page[end : found.start()], found[1], found[2])
        end = found.end()


def pattern(line: str) -> re.Pattern[str]:
    """What a line of output on the page stands for: see above."""
    kinds = {f"unit{number}": unit for number, unit in enumerate(_UNITS)}
    quantities = "|".join(rf"(?P<{name}>\b[\d.]+ {unit}(?!\w))" for name, unit in kinds.items())
    parts = re.compile(rf"{quantities}|(?P<any>…)|(?P<system>file system \w+)|(?P<space>\s+)")
    made, end = "", 0
    for found in parts.finditer(line):
        made += re.escape(line[end : found.start()])
        kind = str(found.lastgroup)
        made += {"any": ".+", "system": r"file system \w+", "space": r"\s+"}.get(
            kind, rf"[\d.]+ {kinds.get(kind)}"
        )
        end = found.end()
    return re.compile(made + re.escape(line[end:]))


def differences(said: str, printed: str) -> list[str]:
    """Where an output is not what the page says."""
    expected, found = (
        [line.strip() for line in text.splitlines() if line.strip()] for text in (said, printed)
    )
    if len(expected) != len(found):
        return [f"{len(expected)} lines on the page, but printed were:\n{printed}"]
    return [
        f"the page says   {line}\nbut printed was {other}"
        for line, other in zip(expected, found, strict=True)
        if not pattern(line).fullmatch(other)
    ]


class Terminal:
    """A terminal of its own, in which one command runs until Ctrl-C is typed."""

    def __init__(self, command: str, folder: Path, environment: dict[str, str]) -> None:
        self._ours, theirs = os.openpty()
        # `setsid` makes the new terminal the one whose Ctrl-C reaches the command.
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "bash", "-c", f"exec {command}"],
            cwd=folder,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self._printed = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while piece := os.read(self._ours, 1 << 16):
                self._printed += piece
        except OSError:
            # The last process has closed the terminal.
            return

    @property
    def printed(self) -> str:
        return _COLOURS.sub("", self._printed.decode(errors="replace")).replace("\r", "")

    def wait_for(self, said: str) -> None:
        """Waits until the terminal shows the line that the page shows."""

        def is_said() -> bool:
            if pattern(said).search(self.printed):
                return True
            assert self.process.poll() is None, self.printed
            return False

        eventually(is_said, lambda: f"{said!r}\n{self.printed}", seconds=START_SECONDS)

    def type_interrupt(self) -> None:
        os.write(self._ours, b"\x03")

    def family(self) -> list[psutil.Process]:
        """The processes of this terminal."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid:
                    found.append(process)
            except (psutil.Error, ProcessLookupError):
                continue
        return found

    def kill(self) -> None:
        """Ends what is left."""
        for process in self.family():
            process.kill()
        self.process.wait()
        self._reader.join(120)
        os.close(self._ours)


class Reader:
    """Somebody who follows the page, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.terminals: list[Terminal] = []
        self.seconds: dict[str, float] = {}
        """What the blocks took, by their first lines."""
        self.printed: dict[str, str] = {}
        """What the blocks of commands printed, by their first lines."""
        kept = {name: text for name, text in os.environ.items() if not name.startswith("PENSTOCK_")}
        self._environment = kept | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # Memory and cores of a small machine: vLLM's CPU build takes all it finds.
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }

    def follow(self, page: str) -> None:
        """Does what the page says, and compares what it prints."""
        printed = ""
        for block in blocks(page):
            if "Ctrl-C" in block.before:
                self._end_servers()
            begin = time.monotonic()
            if block.language == "":
                printed = "".join(map(self._run, block.text.splitlines()))
                self.printed[block.text.splitlines()[0]] = printed
            elif block.language == "python":
                name = re.search(r"Save this as `(.+?)`", block.before)
                assert name is not None, block.before
                (self.folder / name[1]).write_text(block.text)
            elif block.text.startswith("INFO:"):
                for terminal in self.terminals:
                    terminal.wait_for(block.text.strip())
            else:
                found = differences(block.text, printed)
                assert not found, "\n".join(found)
            self.seconds[block.text.splitlines()[0]] = time.monotonic() - begin

    def _run(self, command: str) -> str:
        """What a command prints."""
        words = shlex.split(command)
        if command in NOT_RUN:
            return ""
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            self._environment[name] = value
            return ""
        if words[:2] == ["penstock", "serve"] and "--dry-run" not in words:
            patient = f"{command} {PATIENCE}"
            self.terminals.append(Terminal(patient, self.folder, self._environment))
            return ""
        printed = self._shell(command)
        if words[:2] == ["python", "ask.py"]:
            self._wait_for_stores(command, int(printed.split()[0]) // BLOCK)
        return printed

    def _shell(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
        )
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}"
        return done.stdout

    def _wait_for_stores(self, asked: str, blocks: int) -> None:
        """Waits until the pool has the prompt's blocks, and the description of their namespace. An
        idle engine learns with its next request what was stored, so this asks again."""

        def objects() -> int:
            with penstock.open(self._environment["PENSTOCK_POOL"]) as pool:
                return sum(each.objects for each in pool.namespaces())

        def are_stored() -> bool:
            if objects() > blocks:
                return True
            self._shell(asked)
            return False

        eventually(are_stored, objects, seconds=COMMAND_SECONDS)

    def _end_servers(self) -> None:
        """Types Ctrl-C in each server's terminal. All of its processes end in order.

        vLLM's front end may log that its engine is gone: both hear the Ctrl-C, in any order.
        """
        for terminal in self.terminals:
            terminal.type_interrupt()
        for terminal in self.terminals:
            status = terminal.process.wait(STOP_SECONDS)
            assert status in (0, 128 + signal.SIGINT, -signal.SIGINT), terminal.printed[-5000:]
            _, left = psutil.wait_procs(terminal.family(), timeout=STOP_SECONDS)
            assert not left, terminal.printed[-5000:]
            assert "Application shutdown complete" in terminal.printed, terminal.printed[-5000:]
            assert not re.search(r'File "[^"]*/penstock/', terminal.printed), terminal.printed


@pytest.fixture
def reader() -> Iterator[Reader]:
    """A reader in a folder with a short path, in which the model lies."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as name:
        made = Reader(Path(name))
        attention.qwen3(made.folder / MODEL, text=PROMPT)
        yield made
        for terminal in made.terminals:
            terminal.kill()


def page_for(folder: Path) -> str:
    """The page, with a pool in `folder`, and other ports where its own are taken."""
    page = PAGE.read_text().replace("/tmp/penstock-quickstart", f"{folder}/pool")
    for port in ("8001", "8002"):
        with socket.socket() as probe:
            # As servers do: connections that have ended hold no port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", int(port)))
            except OSError:
                page = page.replace(port, str(free_port()))
    return page


@pytest.mark.alone
@pytest.mark.skipif(
    shutil.which("curl") is None,
    reason="the page uses curl, which is not installed (scripts/install-servers.sh installs it)",
)
def test_the_page_is_as_it_happens(reader: Reader) -> None:
    reader.follow(page_for(reader.folder))
    for command, seconds in reader.seconds.items():
        print(f"{seconds:6.1f} s  {command}")
    [answers] = (text for line, text in reader.printed.items() if line.startswith("python ask.py"))
    first, second = (line.partition(" s: ")[2] for line in answers.splitlines())
    assert first == second, "the page says that the text is the same"


def test_a_wrong_page_fails(reader: Reader) -> None:
    page = page_for(reader.folder).partition("Now start two servers")[0]
    wrong = page.replace("This pool can serve.", "This pool can serve well.")
    assert wrong != page
    with pytest.raises(AssertionError, match="the page says   This pool can serve well"):
        reader.follow(wrong)


class TestTheRule:
    """A wrong page fails."""

    SAID = (
        "✓ put         1549 MiB/s, values of 1 MiB, one by one\n1101 prompt tokens, 0 cached: '…'\n"
    )

    @pytest.mark.parametrize(
        ("old", "new"),
        [("1549", "27"), ("1549 MiB/s", "1.5 GiB/s"), ("         ", " "), ("…", "some text")],
    )
    def test_what_differs_from_run_to_run_is_let_through(self, old: str, new: str) -> None:
        assert differences(self.SAID, self.SAID.replace(old, new)) == []

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("put", "get"),
            ("MiB/s", "ms"),
            ("1101", "1102"),
            ("0 cached", "1024 cached"),
            ("'…'", "''"),
            ("one by one\n", "one by one\nmore\n"),
        ],
    )
    def test_what_does_not_is_told(self, old: str, new: str) -> None:
        assert differences(self.SAID, self.SAID.replace(old, new)) != []
