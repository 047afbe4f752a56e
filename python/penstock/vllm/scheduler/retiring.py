"""Retiring: what becomes, in the pool, of the KV of weights that the engine has left."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence

from penstock._native import Store
from penstock.errors import PenstockError
from penstock.pool.namespace import remove_namespace
from penstock.supervised import count_failure
from penstock.vllm.counters import Counters

logger = logging.getLogger("vllm.penstock")

_THREAD = "penstock-retire"
_TIMEOUT = 60.0


class Retiring:
    """Tells stores which namespaces are the first to go when room is short; or removes them. Works
    on a thread that lives while there is anything to do."""

    def __init__(self, stores: Iterable[Store], counters: Counters, *, removes: bool) -> None:
        self._stores = tuple(stores)
        self._counters = counters
        self._removes = removes
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._is_running = False
        self._removed = 0

    def retire(self, namespaces: Sequence[bytes]) -> None:
        """The engine stores nothing in these namespaces any more. Returns at once."""
        with self._lock:
            self._waiting.extend(namespaces)
            if self._is_running or not self._waiting:
                return
            self._is_running = True
        threading.Thread(target=self._run, name=_THREAD, daemon=True).start()

    def count(self) -> None:
        """Counts the namespaces that were removed since the last call."""
        with self._lock:
            removed, self._removed = self._removed, 0
        self._counters.count("dropped_namespaces", removed)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    return
                namespace = self._waiting.popleft()
            for store in self._stores:
                self._retire(store, namespace)
            if self._removes:
                with self._lock:
                    self._removed += 1

    def _retire(self, store: Store, namespace: bytes) -> None:
        try:
            if self._removes:
                remove_namespace(store, namespace, timeout=_TIMEOUT)
            else:
                store.retire(namespace, timeout=_TIMEOUT)
        except PenstockError as error:
            logger.warning(
                "Penstock: namespace %s of earlier weights stays as it is in %s: %s",
                namespace.hex(),
                store.url,
                error,
            )
        # A panic of native code is no `Exception`.
        except BaseException:
            count_failure(_THREAD)
            logger.exception("Penstock: retiring a namespace failed. Please report this")
