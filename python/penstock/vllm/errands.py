"""Errands: work beside the engine, on a thread that lives while there is any."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from penstock.supervised import count_failure

logger = logging.getLogger("vllm.penstock")

T = TypeVar("T")


class Errands(Generic[T]):
    """The errands of one kind, done one after the other."""

    def __init__(self, thread: str, run: Callable[[T], None], *, failed: str) -> None:
        """`run` does an errand on the thread of this name. If it raises, the failure is counted and
        logged with the text `failed`, and the next errand is done."""
        self._thread = thread
        self._do = run
        self._failed = failed
        self._lock = threading.Lock()
        self._waiting: deque[T] = deque()
        self._is_running = False

    def add(self, errands: Iterable[T]) -> None:
        """Has these done after those that wait, and returns at once."""
        with self._lock:
            self._waiting.extend(errands)
            if self._is_running or not self._waiting:
                return
            self._is_running = True
        threading.Thread(target=self._run, name=self._thread, daemon=True).start()

    def clear(self) -> None:
        """Forgets the errands that wait."""
        with self._lock:
            self._waiting.clear()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    return
                errand = self._waiting.popleft()
            try:
                self._do(errand)
            # A panic of native code is no `Exception`.
            except BaseException:
                count_failure(self._thread)
                logger.exception("%s", self._failed)
