"""Threads whose failures are noticed: logged, counted, and the work begun again.

A plain thread whose work raises just ends, and whatever it did is not done any more. Nobody hears
of it. Threads of this room begin their work again, after a pause that grows from failure to
failure, and say how they are.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

__all__ = ["Running", "ThreadState", "Threads", "count_failure", "failures"]

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0

_ERROR_CHARACTERS = 300
"""A failure may carry foreign text of any length. So much of it is shown."""

_lock = threading.Lock()
_failures: Counter[str] = Counter()


def failures() -> Mapping[str, int]:
    """How often the work of each thread of this process has failed, by the thread's name."""
    with _lock:
        return dict(_failures)


def count_failure(name: str) -> None:
    """Counts a failure of a thread that goes on by itself."""
    with _lock:
        _failures[name] += 1


Wait = Callable[[threading.Event, float], bool]
"""Waits until the event is set, at most so many seconds. Returns whether it is set."""


@dataclass(frozen=True)
class ThreadState:
    """How a supervised thread is."""

    name: str
    is_alive: bool
    """Whether the thread runs. A failed thread that pauses before it begins again runs too."""
    is_failing: bool = False
    """Whether its work has failed and has made no progress since."""
    failures: int = 0
    """How often its work raised."""
    restarts: int = 0
    """How often its work was begun again."""
    last_error: str | None = None
    """The last failure, in one line; None if there was none."""


class Running:
    """What the work of a supervised thread sees of its thread."""

    def __init__(self, stopping: threading.Event, progressed: Callable[[], None]) -> None:
        self.stopping = stopping
        """Set when the thread must end. Work that waits must wait for this too."""
        self._progressed = progressed

    def progressed(self) -> None:
        """A round of the work went well: the thread is not failing, and its next pause is short."""
        self._progressed()


Work = Callable[[Running], None]


class Threads:
    """The supervised threads of one component.

    >>> threads = Threads(logging.getLogger("penstock"))
    >>> threads.start("penstock-example", lambda running: None, advice="restart the example")
    >>> threads.stop(timeout=60)
    True
    >>> [(state.name, state.failures) for state in threads.states()]
    [('penstock-example', 0)]
    """

    def __init__(self, logger: logging.Logger, *, wait: Wait = threading.Event.wait) -> None:
        """`wait` is how a thread pauses before it begins again; tests give one without a clock."""
        self._logger = logger
        self._wait = wait
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        self._states: dict[str, ThreadState] = {}
        self._pauses: dict[str, float] = {}
        self._wakes: dict[str, Callable[[], None]] = {}
        self._logged: set[tuple[str, str]] = set()

    def start(
        self, name: str, work: Work, *, advice: str, wake: Callable[[], None] | None = None
    ) -> None:
        """Starts a daemon thread that does `work` until it returns, or until :meth:`stop`.

        If the work raises, it is begun again, until :meth:`stop`. `advice` is logged with its
        failures: what stands still meanwhile, and what to do about it. Work that waits for more
        than `Running.stopping` gives a `wake`: it is called by :meth:`stop`, and ends the wait.

        A thread of the same name whose work has returned may be started again; its counts go on.

        Raises:
            RuntimeError: a thread of this name is running, or the threads were stopped.
        """
        with self._lock:
            if self._stopping.is_set():
                raise RuntimeError(f"the thread {name} cannot start: its component was stopped")
            if name in self._threads and self._threads[name].is_alive():
                raise RuntimeError(f"a thread {name} is running")
            thread = threading.Thread(
                target=self._run, args=(name, work, advice), name=name, daemon=True
            )
            self._threads[name] = thread
            self._states.setdefault(name, ThreadState(name, is_alive=False))
            self._pauses.setdefault(name, FIRST_PAUSE_SECONDS)
            if wake is not None:
                self._wakes[name] = wake
            thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """Tells all threads to end, and waits for each at most `timeout` seconds; without one, as
        long as it takes. Returns whether all have ended."""
        self._stopping.set()
        with self._lock:
            threads = [each for each in self._threads.values() if each is not self._own()]
            wakes = list(self._wakes.values())
        for wake in wakes:
            wake()
        for thread in threads:
            thread.join(timeout)
        return not any(thread.is_alive() for thread in threads)

    @staticmethod
    def _own() -> threading.Thread:
        """The thread that asks: it cannot wait for itself."""
        return threading.current_thread()

    def states(self) -> list[ThreadState]:
        """How each thread is, by name. Any thread may ask."""
        with self._lock:
            return [
                replace(self._states[name], is_alive=self._threads[name].is_alive())
                for name in sorted(self._states)
            ]

    @property
    def failing(self) -> list[ThreadState]:
        """The threads whose work has failed and has made no progress since, by name."""
        return [state for state in self.states() if state.is_failing]

    def _run(self, name: str, work: Work, advice: str) -> None:
        running = Running(self._stopping, lambda: self._progressed(name))
        while True:
            try:
                work(running)
                self._progressed(name)
                return
            # A panic of native code is no `Exception`. It must be noticed too.
            except BaseException as error:
                pause = self._failed(name, error, advice)
            if self._stopping.is_set() or self._wait(self._stopping, pause):
                return
            with self._lock:
                state = self._states[name]
                self._states[name] = replace(state, restarts=state.restarts + 1)

    def _progressed(self, name: str) -> None:
        with self._lock:
            self._pauses[name] = FIRST_PAUSE_SECONDS
            self._states[name] = replace(self._states[name], is_failing=False)

    def _failed(self, name: str, error: BaseException, advice: str) -> float:
        """Notes a failure. Returns the pause before the work may begin again, in seconds."""
        count_failure(name)
        shown = f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
        # The place stands for the failure, not its text: foreign text may be new each time, and
        # neither the log nor this set may grow with it.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{type(error).__name__} {frame.filename}:{frame.lineno}"
        with self._lock:
            is_new = (name, place) not in self._logged
            self._logged.add((name, place))
            pause = self._pauses[name]
            self._pauses[name] = min(2 * pause, LONGEST_PAUSE_SECONDS)
            state = self._states[name]
            self._states[name] = replace(
                state, is_failing=True, failures=state.failures + 1, last_error=shown
            )
        if is_new:
            self._logger.error(
                "the thread %s failed (%s) and begins again in %g s; further failures of this kind "
                "are counted, not logged. %s",
                name,
                shown,
                pause,
                advice,
                exc_info=error,
            )
        return pause
