"""Peers that do not answer: whether they have been asked, and signals for who waits for them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from lab.waiting import LIMIT, eventually
from tests.servers import Server

CHECKS = 5
"""More places than where Python looks for signals before a call of one native function."""
ESTABLISHED = "01"
"""As in Linux's ``tcp_states.h``. Of a port that listens, the queue counts connections."""


def freeze(server: Server) -> None:
    """Stops a server's process, and waits until it stands still: it answers nobody any more."""
    server.freeze()
    assert server.process is not None
    os.waitid(os.P_PID, server.process.pid, os.WSTOPPED | os.WNOWAIT)


def unread(server: Server) -> list[int]:
    """The bytes that a server has not read, of each TCP connection that has such bytes.

    The kernel takes for a frozen server what its clients send. So this tells who has sent a
    request.
    """
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, queues, *_ = line.split()
        nbytes = int(queues.partition(":")[2], 16)
        port = int(local.partition(":")[2], 16)
        if port == server.port and state == ESTABLISHED and nbytes:
            found.append(nbytes)
    return found


@contextmanager
def signalled(
    handler: Callable[[], None], once: Callable[[], bool] | None = None
) -> Iterator[None]:
    """A signal comes while the body waits on the main thread: once something holds that shows that
    it waits.

    A call of a native function shows nothing. So without `once`, the body must be such a call.
    Then signals come, one after the other, that nobody minds. Python handles a few of them at most
    on its way into the function, and further ones only in there, where it waits.
    """
    sent = handled = 0
    has_begun = is_meant = is_done = is_over = False
    problems: list[str] = []

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal handled, is_done
        try:
            if is_over:
                problems.append("the wait was over before the signal came")
            elif is_meant:
                handler()
        finally:
            is_done = is_meant
            # The last thing here, so that none is handled inside of another one.
            handled += 1

    def send() -> None:
        nonlocal sent
        sent += 1
        os.kill(os.getpid(), signal.SIGUSR1)

    def watch() -> None:
        nonlocal is_meant
        try:
            eventually(lambda: has_begun)
            if once is not None:
                eventually(once)
            else:
                for _ in range(CHECKS):
                    send()
                    eventually(lambda: handled == sent)
        except TimeoutError as problem:
            problems.append(str(problem))
        # Also if it is too late: whoever waits is woken up.
        is_meant = True
        send()

    before = signal.signal(signal.SIGUSR1, handle)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        has_begun = True
        yield
    finally:
        is_over = True
        # Until the last signal has been handled: here, if not in the body.
        eventually(lambda: is_done and not watcher.is_alive(), seconds=3 * LIMIT)
        signal.signal(signal.SIGUSR1, before)
    assert not problems, problems
