"""Ten thousand puts and gets: memory, file descriptors and threads as before."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import penstock
from lab.waiting import eventually

pytestmark = pytest.mark.long

CYCLES = 10_000
WARM_UP = 1_000
VALUE_BYTES = 16 << 10
ALLOWED_GROWTH = 4 << 20
"""A cycle that lost as little as its key and one object would lose more than this."""


def assert_no_more(now: Callable[[], int], before: int) -> None:
    """That a number of threads or descriptors of this process falls to what it was.

    A thread that was waited for may be counted a moment longer, and threads of other tests open and
    close their own connections.
    """
    eventually(lambda: now() <= before, lambda: (now(), before))


def test_ten_thousand_cycles_leave_nothing_behind(pool_url: str) -> None:
    process = psutil.Process()
    gc.collect()
    descriptors, threads = process.num_fds(), process.num_threads()
    with penstock.open(pool_url) as pool:
        value, into = os.urandom(VALUE_BYTES), bytearray(VALUE_BYTES)

        def cycle(number: int) -> None:
            key = f"key {number % 64}"
            pool.put(key, value)
            assert pool.get(key, into=into) == VALUE_BYTES
            if number % 3 == 0:
                assert pool.get_many([key, "absent"])[0] == value
            if number % 7 == 0:
                pool.remove([key])

        for number in range(WARM_UP):
            cycle(number)
        gc.collect()
        memory, open_descriptors = process.memory_info().rss, process.num_fds()
        for number in range(CYCLES):
            cycle(number)
        gc.collect()
        assert process.memory_info().rss - memory < ALLOWED_GROWTH
        assert_no_more(process.num_fds, open_descriptors)
        assert into == value
    gc.collect()
    assert_no_more(process.num_fds, descriptors)
    assert_no_more(process.num_threads, threads)


def test_opening_and_closing_leaves_nothing_behind(tmp_path: Path) -> None:
    process = psutil.Process()

    def cycle() -> None:
        with penstock.open(f"file://{tmp_path}/pool?size=16MiB") as pool:
            pool.put("key", b"value")
            pool.get("key")

    for _ in range(20):
        cycle()
    gc.collect()
    descriptors, threads = process.num_fds(), process.num_threads()
    memory = process.memory_info().rss
    for _ in range(500):
        cycle()
    gc.collect()
    assert_no_more(process.num_fds, descriptors)
    assert_no_more(process.num_threads, threads)
    assert process.memory_info().rss - memory < ALLOWED_GROWTH
