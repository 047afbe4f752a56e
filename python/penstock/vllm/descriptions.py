"""Descriptions of this engine's namespaces, put into the pool for `penstock pool ls`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock._native import Store
from penstock.errors import PenstockError
from penstock.pool.namespace import publish_namespace
from penstock.vllm.errands import Errands

logger = logging.getLogger("vllm.penstock")

MOST_TENANTS = 1000
"""The most tenants whose namespaces one engine describes. Namespaces of further ones have objects
like all others, but no description."""

_AGAIN_SECONDS = 300.0

Describe = Callable[[str], Sequence[tuple[bytes, Mapping[str, Any]]]]
"""A tenant's name, or an empty text for blocks that nobody owns → the groups' namespaces, each with
its description."""


class Descriptions:
    """Publishes descriptions, beside the engine."""

    def __init__(self, store: Store, describe: Describe) -> None:
        self._store = store
        self._describe = describe
        self._next: dict[str, float] = {}
        """Tenant → when its namespaces are described again."""
        self._tenants: dict[str, None] = {}
        self._errands = Errands(
            "penstock-publish",
            self._describe_for,
            failed="Penstock: describing namespaces failed. It is tried again in "
            f"{_AGAIN_SECONDS:g} s; until then `penstock pool ls` does not know them. Please "
            "report this",
        )

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
        if tenant and len(self._tenants) < MOST_TENANTS:
            self._tenants.setdefault(tenant)
        self._errands.add([tenant])

    @property
    def tenants(self) -> list[str]:
        """The tenants whose namespaces were described, also before the namespaces were others."""
        return list(self._tenants)

    def forget(self) -> None:
        """The namespaces are others now: they are described with their first stores."""
        self._next.clear()

    def _describe_for(self, tenant: str) -> None:
        try:
            for namespace, description in self._describe(tenant):
                publish_namespace(self._store, namespace, description)
        except PenstockError as error:
            logger.warning("Penstock: could not describe a namespace in the pool: %s", error)
            # The others would fail as well, each after its time.
            self._errands.clear()
