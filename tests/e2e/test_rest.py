"""Waiting for vLLM's messages without spinning, on vLLM's own queue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.waiting import eventually

pytestmark = pytest.mark.e2e

LONG_AGO = 1e9
"""Seconds for which vLLM's queue spins after a message: longer than any test, so no time decides
what it does."""
LIMIT = 120.0


class Watched:
    """A poller that notes how long it is asked to wait for, and who woke it."""

    def __init__(self, poller: Any) -> None:
        self._poller = poller
        self.asked: list[int | None] = []
        self.woken_by: list[Any] = []

    def poll(self, timeout: int | None = None) -> Any:
        self.asked.append(timeout)
        # Forever is not waited out.
        events = self._poller.poll(0 if timeout is None else timeout)
        self.woken_by = [socket for socket, _ in events]
        return events


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """Both ends of vLLM's notices: who sends them, and who waits for them."""
    import zmq
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    from penstock.vllm import compat

    address = f"ipc://{tmp_path}/queue"
    with zmq.Context() as context:
        writer = SpinCondition(is_reader=False, context=context, notify_address=address)
        reader = SpinCondition(is_reader=True, context=context, notify_address=address)
        reader.busy_loop_s = LONG_AGO
        reader.poller = Watched(reader.poller)
        try:
            yield writer, reader
        finally:
            compat.rest(False)
            for socket in (
                writer.local_notify_socket,
                reader.local_notify_socket,
                reader.read_cancel_socket,
                reader.write_cancel_socket,
            ):
                socket.close(linger=0)


def test_a_process_at_rest_waits_for_the_socket(queue: tuple[Any, Any]) -> None:
    from penstock.vllm import compat

    _, reader = queue

    def waits(timeout_ms: int | None) -> list[int | None]:
        """What the socket is asked after a message, in three turns without another one."""
        reader.poller.asked.clear()
        reader.record_read()
        for _ in range(3):
            reader.wait(timeout_ms)
        return list(reader.poller.asked)

    for _ in range(2):
        # It spins: it looks at its queue and never at the socket.
        compat.rest(False)
        assert waits(1000) == waits(None) == []
        # It rests: every turn sleeps at the socket, and never for long.
        compat.rest(True)
        assert waits(1000) == waits(None) == [5, 5, 5]
        assert waits(2) == [2, 2, 2]


def test_a_message_wakes_a_process_at_rest(queue: tuple[Any, Any]) -> None:
    from penstock.vllm import compat

    writer, reader = queue
    compat.rest(True)

    # A notice may be lost, as vLLM keeps one at a time; the first ones are, since the writer does
    # not know the reader yet.
    def is_woken() -> bool:
        writer.notify()
        reader.record_read()
        reader.wait(timeout_ms=1000)
        return reader.local_notify_socket in reader.poller.woken_by

    def is_noticed() -> bool:
        writer.notify()
        return bool(reader.local_notify_socket.poll(10))

    # While it waits.
    eventually(is_woken)
    # Before it began to wait, too.
    eventually(is_noticed)
    reader.record_read()
    reader.wait(timeout_ms=1000)
    assert reader.poller.woken_by == [reader.local_notify_socket]
