"""Retiring: what becomes, in the pool, of the KV of weights that the engine has left."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from penstock._native import Store
from penstock.errors import PenstockError
from penstock.pool.namespace import remove_namespace
from penstock.vllm.counters import Counters
from penstock.vllm.errands import Errands

logger = logging.getLogger("vllm.penstock")

_TIMEOUT = 60.0


class Retiring:
    """Tells stores which namespaces are the first to go when room is short; or removes them."""

    def __init__(self, stores: Iterable[Store], counters: Counters, *, removes: bool) -> None:
        self._stores = tuple(stores)
        self._counters = counters
        self._removes = removes
        self._lock = threading.Lock()
        self._removed = 0
        self._own: frozenset[bytes] = frozenset()
        """The namespaces of now."""
        self._errands = Errands(
            "penstock-retire",
            self._retire,
            failed="Penstock: retiring a namespace of earlier weights failed. Please report this",
        )

    def retire(self, namespaces: Iterable[bytes], *, stays: Iterable[bytes]) -> None:
        """The engine stores nothing in these namespaces any more, but in those that it `stays`
        with, or has come back to. Returns at once."""
        with self._lock:
            self._own = frozenset(stays)
        self._errands.add(namespaces)

    def count(self) -> None:
        """Counts the namespaces that were removed since the last call."""
        with self._lock:
            removed, self._removed = self._removed, 0
        self._counters.count("dropped_namespaces", removed)

    def _retire(self, namespace: bytes) -> None:
        for store in self._stores:
            with self._lock:
                if namespace in self._own:
                    return
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
                return
        with self._lock:
            self._removed += self._removes
