"""Descriptions of this engine's namespaces, put into the pool for `penstock pool ls`."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock._native import Store
from penstock.errors import PenstockError
from penstock.pool.namespace import publish_namespace
from penstock.supervised import count_failure

logger = logging.getLogger("vllm.penstock")

MOST_TENANTS = 1000
"""The most tenants whose namespaces one engine describes. Namespaces of further ones have objects
like all others, but no description."""

_AGAIN_SECONDS = 300.0
_THREAD = "penstock-publish"

Describe = Callable[[str], Sequence[tuple[bytes, Mapping[str, Any]]]]
"""A tenant's name, or an empty text for blocks that nobody owns → the groups' namespaces, each with
its description."""


class Descriptions:
    """Publishes descriptions, on a thread that lives while there are any to publish."""

    def __init__(self, store: Store, describe: Describe) -> None:
        self._store = store
        self._describe = describe
        self._next: dict[str, float] = {}
        """Tenant → when its namespaces are described again."""
        self._lock = threading.Lock()
        self._waiting: deque[str] = deque()
        self._is_running = False

    def publish(self, tenant: str = "") -> None:
        """Describes the namespaces in which a store of this tenant has succeeded, and returns at
        once.

        Publishes again now and then, because a pool may be emptied.
        """
        now = time.monotonic()
        when = self._next.get(tenant)
        if when is None and tenant and len(self._next) >= MOST_TENANTS:
            return
        if when is not None and now < when:
            return
        self._next[tenant] = now + _AGAIN_SECONDS
        with self._lock:
            self._waiting.append(tenant)
            if self._is_running:
                return
            self._is_running = True
        threading.Thread(target=self._run, name=_THREAD, daemon=True).start()

    @property
    def tenants(self) -> list[str]:
        """The tenants whose namespaces were described since the namespaces are what they are."""
        return [tenant for tenant in self._next if tenant]

    def forget(self) -> None:
        """The namespaces are others now: they are described with their first stores."""
        self._next.clear()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    return
                tenant = self._waiting.popleft()
            try:
                for namespace, description in self._describe(tenant):
                    publish_namespace(self._store, namespace, description)
            except PenstockError as error:
                logger.warning("Penstock: could not describe a namespace in the pool: %s", error)
                # The others would fail as well, each after its time.
                with self._lock:
                    self._waiting.clear()
            # A panic of native code is no `Exception`.
            except BaseException:
                count_failure(_THREAD)
                logger.exception(
                    "Penstock: describing namespaces failed. It is tried again in %g s; until then "
                    "`penstock pool ls` does not know them. Please report this",
                    _AGAIN_SECONDS,
                )
