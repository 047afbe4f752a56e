"""The objects that all parts of the scheduler half share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock._native import Catalogue, Store
from penstock.vllm.adapters import NamedAdapters
from penstock.vllm.advisor import Advisor
from penstock.vllm.agreement import Agreement
from penstock.vllm.counters import Counters
from penstock.vllm.descriptions import Descriptions
from penstock.vllm.lookup_limit import LookupLimit
from penstock.vllm.roles import ROLES, Role
from penstock.vllm.scheduler.facts import AdapterOf, EngineFacts
from penstock.vllm.scheduler.orders import Orders
from penstock.vllm.scheduler.requests import Tracked
from penstock.vllm.scheduler.spans import Spans
from penstock.vllm.scheduler.weights import Weights
from penstock.vllm.settings import Settings


@dataclass(frozen=True)
class Common:
    """The shared objects of one engine. Each part of the scheduler half gets them, and also the
    parts that it calls."""

    settings: Settings
    facts: EngineFacts
    agreement: Agreement
    catalogue: Catalogue
    advisor: Advisor
    store: Store
    descriptions: Descriptions
    adapters: NamedAdapters
    adapter_of: AdapterOf
    limit: LookupLimit
    node: Store | None
    """Node memory; None if the engine has a host tier of its own."""
    spans: Spans
    orders: Orders
    role: Role = ROLES["kv_both"]
    weights: Weights = field(default_factory=Weights)
    counters: Counters = field(default_factory=Counters)

    def is_shared(self, request: Any) -> bool:
        """Whether the request's blocks may be shared: it uses no adapter, or the adapter's content
        is known and has never changed."""
        adapter = self.adapter_of(request)
        return adapter is None or self.adapters.shares(adapter)

    def look_in_node(self, name: str) -> None:
        """Notes what node memory has of the blocks that the catalogue knows by the name of a
        request. Without node memory, does nothing."""
        if self.node is not None:
            self.catalogue.look_in_node(
                name, self.node, self.agreement.namespaces, self.agreement.spans
            )

    def last(self, tracked: Tracked) -> int:
        """The last token position at which a load of the request may end. It is before the
        request's last token."""
        return self.catalogue.last_end(tracked.request.num_tokens)
