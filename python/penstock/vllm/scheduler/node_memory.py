"""Node memory: the host tier that the engines of a machine share."""

from __future__ import annotations

from penstock._native import Catalogue, Store
from penstock.vllm.agreement import Agreement


class NodeMemory:
    """The blocks in node memory, as the catalogue knows them."""

    def __init__(self, store: Store | None, catalogue: Catalogue, agreement: Agreement) -> None:
        """`store` is None if the engine has a host tier of its own."""
        self._store = store
        self._catalogue = catalogue
        self._agreement = agreement

    def look_up(self, name: str) -> None:
        """Notes what node memory has of the blocks that the catalogue knows by the name of a
        request. Without node memory, does nothing."""
        if self._store is not None:
            self._catalogue.look_up_node_memory(name, self._store, self._agreement.pool_groups)
