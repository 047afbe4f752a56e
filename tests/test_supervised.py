"""Supervised threads: a failure is noticed, counted, logged once, and the work begun again.

No test waits for a clock: pauses are noted, not slept.
"""

from __future__ import annotations

import logging
import queue
import threading

import pytest

from lab.waiting import eventually
from penstock.supervised import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Running, Threads

LIMIT = 60.0
"""Guards against hanging."""

logger = logging.getLogger("tests.supervised")

pytestmark = pytest.mark.threads_fail


class Pauses:
    """Notes how long threads would pause, and ends each pause at once."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, stopping: threading.Event, seconds: float) -> bool:
        self.seconds.append(seconds)
        return stopping.is_set()


class Panic(BaseException):
    """As a panic of native code comes to Python: no `Exception`."""


class Failing:
    """Work that raises so many times, then says that it is done, and waits for its end."""

    def __init__(self, *errors: BaseException) -> None:
        self._errors = list(errors)
        self.done = threading.Event()

    def __call__(self, running: Running) -> None:
        if self._errors:
            raise self._errors.pop(0)
        running.progressed()
        self.done.set()
        running.stopping.wait()


@pytest.mark.parametrize("error", [ValueError("strange"), SystemExit(1), Panic("native")])
def test_failed_work_begins_again_and_is_counted(error: BaseException) -> None:
    threads, work = Threads(logger, wait=Pauses()), Failing(error)
    threads.start("penstock-a", work, advice="nothing to do")
    assert work.done.wait(LIMIT)
    (state,) = threads.states()
    assert (state.name, state.is_alive, state.is_failing) == ("penstock-a", True, False)
    assert (state.failures, state.restarts) == (1, 1)
    assert state.last_error == f"{type(error).__name__}: {error}"
    assert threads.stop(LIMIT)
    assert not threads.states()[0].is_alive


def test_a_thread_that_failed_is_failing_until_it_makes_progress() -> None:
    paused, go_on = threading.Event(), threading.Event()

    def wait(stopping: threading.Event, seconds: float) -> bool:
        paused.set()
        return not go_on.wait(LIMIT)

    threads, work = Threads(logger, wait=wait), Failing(ValueError("strange"))
    threads.start("penstock-a", work, advice="nothing to do")
    assert paused.wait(LIMIT)
    assert [state.name for state in threads.failing] == ["penstock-a"]
    assert threads.states()[0].is_alive
    go_on.set()
    assert work.done.wait(LIMIT)
    assert threads.failing == []
    assert threads.stop(LIMIT)


def test_pauses_grow_to_a_bound_and_shrink_with_progress() -> None:
    pauses = Pauses()
    threads = Threads(logger, wait=pauses)
    ended = threading.Event()
    rounds = 0

    def work(running: Running) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 11:
            running.progressed()
        if rounds == 12:
            ended.set()
            return
        raise ValueError("strange")

    threads.start("penstock-a", work, advice="nothing to do")
    assert ended.wait(LIMIT)
    assert threads.stop(LIMIT)
    doubled = [min(FIRST_PAUSE_SECONDS * 2**n, LONGEST_PAUSE_SECONDS) for n in range(10)]
    assert pauses.seconds == [*doubled, FIRST_PAUSE_SECONDS]


def test_a_failure_is_logged_once_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    # The same fault with foreign text that is new each time, and two other faults.
    errors = [ValueError(f"strange {n}" * 1000) for n in range(50)]
    threads, work = Threads(logger, wait=Pauses()), Failing(*errors, KeyError("x"), Panic())
    threads.start("penstock-a", work, advice="start the engine again")
    assert work.done.wait(LIMIT)
    assert threads.stop(LIMIT)
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3
    assert all("penstock-a" in record.getMessage() for record in caplog.records)
    assert all("start the engine again" in record.getMessage() for record in caplog.records)
    assert all(len(record.getMessage()) < 1000 for record in caplog.records)
    assert threads.states()[0].failures == 52


def test_a_paused_thread_stops_when_asked() -> None:
    paused = threading.Event()

    def wait(stopping: threading.Event, seconds: float) -> bool:
        paused.set()
        return stopping.wait(LIMIT)

    threads = Threads(logger, wait=wait)
    threads.start("penstock-a", Failing(ValueError("strange")), advice="nothing to do")
    assert paused.wait(LIMIT)
    assert threads.stop(LIMIT)
    (state,) = threads.states()
    assert (state.is_alive, state.is_failing, state.restarts) == (False, True, 0)


def test_work_that_waits_for_something_else_is_woken_to_stop() -> None:
    asked: queue.SimpleQueue[None] = queue.SimpleQueue()

    def work(running: Running) -> None:
        while not running.stopping.is_set():
            asked.get(timeout=LIMIT)

    threads = Threads(logger)
    threads.start("penstock-a", work, advice="none", wake=lambda: asked.put(None))
    assert threads.stop(LIMIT)
    assert threads.states()[0].failures == 0


def test_a_thread_that_does_not_end_is_said_to_be_running() -> None:
    go_on = threading.Event()
    threads = Threads(logger)

    def work(running: Running) -> None:
        go_on.wait(LIMIT)

    threads.start("penstock-a", work, advice="none")
    assert not threads.stop(timeout=0.0)
    go_on.set()
    assert threads.stop(LIMIT)


def test_a_name_is_started_again_only_after_its_work_has_returned() -> None:
    threads, work = Threads(logger, wait=Pauses()), Failing(ValueError("strange"))
    threads.start("penstock-a", work, advice="none")
    assert work.done.wait(LIMIT)
    with pytest.raises(RuntimeError, match="penstock-a is running"):
        threads.start("penstock-a", work, advice="none")
    assert threads.stop(LIMIT)
    with pytest.raises(RuntimeError, match="was stopped"):
        threads.start("penstock-b", work, advice="none")


def test_counts_of_a_name_go_on_when_it_is_started_again() -> None:
    threads = Threads(logger, wait=Pauses())
    for _ in range(2):
        errors: list[BaseException] = [ValueError("strange")]
        ended = threading.Event()

        def work(
            running: Running, errors: list[BaseException] = errors, ended: threading.Event = ended
        ) -> None:
            if errors:
                raise errors.pop()
            ended.set()

        threads.start("penstock-a", work, advice="none")
        assert ended.wait(LIMIT)
        # The work has returned; its thread ends by itself.
        eventually(lambda: not threads.states()[0].is_alive)
    (state,) = threads.states()
    assert (state.failures, state.restarts, state.is_failing) == (2, 2, False)
