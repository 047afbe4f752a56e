"""Waiting for vLLM's messages without spinning, on vLLM's own queue."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.alone]


def test_a_process_at_rest_waits_for_the_socket(tmp_path: Path) -> None:
    import zmq
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    from penstock.vllm import compat

    address = f"ipc://{tmp_path}/queue"
    with zmq.Context() as context:
        writer = SpinCondition(is_reader=False, context=context, notify_address=address)
        reader = SpinCondition(is_reader=True, context=context, notify_address=address)

        def looks(seconds: float) -> int:
            """How often it looks at the queue while nothing comes."""
            reader.record_read()
            count, end = 0, time.monotonic() + seconds
            while time.monotonic() < end:
                reader.wait(timeout_ms=1000)
                count += 1
            return count

        try:
            compat.rest(False)
            spinning = looks(0.2)
            compat.rest(True)
            resting = looks(0.2)
            assert resting < spinning / 10
            # A message wakes it, without fail: one that was sent before it began to wait, too.
            time.sleep(0.2)
            writer.notify()
            reader.record_read()
            reader.wait(timeout_ms=1000)
            compat.rest(False)
            assert looks(0.2) > resting * 10
        finally:
            compat.rest(False)
            for socket in (
                writer.local_notify_socket,
                reader.local_notify_socket,
                reader.read_cancel_socket,
                reader.write_cancel_socket,
            ):
                socket.close(linger=0)
