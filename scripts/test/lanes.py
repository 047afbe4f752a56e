"""Runs stages in two lanes, and tells what became of each."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from scripts.test.stages import Stage

LANES = 2
"""As many as CI has cores."""

WHOLE = 5250.0
"""Seconds for all stages together: a guard against what hangs, within CI's 90 minutes."""

_TO_END = 20.0
"""Seconds that a stage gets to end by itself."""


@dataclass(frozen=True)
class Outcome:
    """What became of a stage."""

    stage: Stage
    seconds: float
    failure: str | None
    """Why it failed, if it did."""
    cpu: float = 0.0
    """CPU seconds of its command and of all children that were waited for. Engines of end-to-end
    tests are not: they are killed."""
    skipped: tuple[str, ...] = ()
    """What its tests said of being skipped, and of passing nevertheless."""
    faults: tuple[str, ...] = ()
    """The lines of its output that say what failed and where, if it failed."""


class Lanes:
    """Stages that run beside each other. A stage that fails stops no other: one run tells all."""

    def __init__(self, root: Path, whole: float = WHOLE) -> None:
        self._root = root
        self._end = time.monotonic() + whole
        self._printing = threading.Lock()
        self._taking = threading.Condition()
        self._busy = 0
        self._waits_for_both = False
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._said: queue.SimpleQueue[Outcome | int] = queue.SimpleQueue()
        """What is over, and the numbers of signals."""

    def interrupt(self, number: int, _frame: object = None) -> None:
        """Handles a signal: the run ends its stages and raises `SystemExit`.

        Nothing is raised in the handler itself. Python may run it in the middle of taking a lock,
        which would stay taken then, or where what is raised is ignored.
        """
        self._said.put(number)

    def run(self, stages: Sequence[Stage]) -> Generator[Outcome, None, None]:
        """Runs the stages in this order, `LANES` at a time, and yields each as it is over."""
        left = list(stages)

        def work() -> None:
            while (stage := self._take(left)) is not None:
                outcome = self._run(stage)
                self._give_back(stage)
                self._said.put(outcome)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(LANES)]
        try:
            for thread in threads:
                thread.start()
            for _ in stages:
                said = self._said.get()
                if isinstance(said, int):
                    sys.exit(128 + said)
                yield said
        finally:
            self._stop()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()

    def _take(self, left: list[Stage]) -> Stage | None:
        """The next stage, once there is room for it. The order is kept: nothing overtakes a stage
        that waits for both lanes."""
        with self._taking:
            self._taking.wait_for(lambda: not self._waits_for_both)
            if not left or self._stopped:
                return None
            stage = left.pop(0)
            if stage.both_lanes:
                self._waits_for_both = True
                self._taking.wait_for(lambda: self._busy == 0)
            self._busy += 1
            return stage

    def _give_back(self, stage: Stage) -> None:
        with self._taking:
            self._busy -= 1
            if stage.both_lanes:
                self._waits_for_both = False
            self._taking.notify_all()

    def _run(self, stage: Stage) -> Outcome:
        began = time.monotonic()
        if stage.report is not None:
            (self._root / stage.report).unlink(missing_ok=True)
        # Of a stage beside which nothing else writes, all is seen as it comes.
        self._print(f"\n== {stage.name}\n" if stage.both_lanes else f"-- {stage.name}: begins\n")
        with tempfile.TemporaryFile() as file:
            failure, cpu = self._process(stage, file)
            file.seek(0)
            text = file.read().decode(errors="replace")
        if failure is None and stage.runs_some and not re.search(r"^running [1-9]", text, re.M):
            failure = "no test ran"
        if not stage.both_lanes:
            self._print(f"\n== {stage.name}\n{text}")
        return Outcome(
            stage,
            time.monotonic() - began,
            failure,
            cpu,
            tuple(self._skipped(stage)),
            tuple(_faults(text)) if failure is not None else (),
        )

    def _process(self, stage: Stage, output: IO[bytes]) -> tuple[str | None, float]:
        """Runs the stage's command, and says why it failed, if it did, and its CPU seconds. Writes
        what it says to `output`, and shows it too if nothing runs beside it."""
        with self._taking:
            if self._stopped:
                return "not begun", 0.0
            try:
                process = subprocess.Popen(
                    stage.command,
                    cwd=self._root,
                    # What hangs has said how far it came.
                    env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(stage.env),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if stage.both_lanes else output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                return str(error), 0.0
            self._running.add(process)
        showing = None
        if process.stdout is not None:
            showing = threading.Thread(target=self._show, args=(process.stdout, output))
            showing.start()
        left = max(1.0, self._end - time.monotonic())
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            _end(process)

        hangs = threading.Timer(left, give_up)
        hangs.start()
        try:
            cpu = _cpu(process)
            status = process.wait()
        finally:
            hangs.cancel()
            hangs.join()
            with self._taking:
                self._running.discard(process)
            if showing is not None:
                showing.join()
        if is_late.is_set():
            return "no time was left", cpu
        return f"status {status}" if status else None, cpu

    def _show(self, source: IO[bytes], output: IO[bytes]) -> None:
        with source:
            while chunk := os.read(source.fileno(), 65536):
                output.write(chunk)
                self._print(chunk.decode(errors="replace"))

    def _stop(self) -> None:
        """Begins no stage any more, and ends those that run."""
        with self._taking:
            self._stopped = True
            running = list(self._running)
        for process in running:
            _end(process)

    def _skipped(self, stage: Stage) -> Iterator[str]:
        if stage.report is not None and (self._root / stage.report).exists():
            said = re.findall(r"skipped: [^<\n]*", (self._root / stage.report).read_text())
            yield from sorted(set(said))

    def _print(self, text: str) -> None:
        with self._printing:
            sys.stdout.write(text)
            sys.stdout.flush()


_FAULT = re.compile(
    r"E   |FAILED |ERROR |error|[\w/.-]+\.(py|rs):\d+: "
    r"|\s+(FAIL|TIMEOUT|SIG[A-Z]+) \[|.* panicked at "
)
"""How lines begin that say what failed, and where: pytest's, nextest's, Rust's, compilers'."""

_SHOWN = 40
"""So many of them are shown once more at the end, the last ones of each stage."""


def _faults(text: str) -> list[str]:
    found = (line.rstrip()[:300] for line in text.splitlines() if _FAULT.match(line))
    return list(dict.fromkeys(found))[-_SHOWN:]


def _cpu(process: subprocess.Popen[bytes]) -> float:
    """Waits until a command is over, and returns its CPU seconds. Nothing if another thread has
    ended it. From proc(5), `stat`: utime, stime, and those of children that were waited for."""
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        numbers = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except (ChildProcessError, FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(map(int, numbers[11:15])) / os.sysconf("SC_CLK_TCK")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a command and all its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TO_END)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
