"""Versions of the weights: each has namespaces of its own, for all engines that compute with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from penstock._native import Catalogue
from penstock.errors import ConfigError
from penstock.vllm.agreement import Agreement
from penstock.vllm.counters import Counters
from penstock.vllm.descriptions import Descriptions
from penstock.vllm.messages import ModelShares, RankWeights
from penstock.vllm.scheduler.orders import Orders
from penstock.vllm.scheduler.retiring import Retiring
from penstock.vllm.scheduler.weights import Weights
from penstock.vllm.settings import KEEP, Settings

logger = logging.getLogger("vllm.penstock")


class Versions:
    """Follows which weights the engine computes with.

    A change is noticed at once: nothing of before is loaded from then on. What the weights are now
    is asked when somebody needs to know, before the next request. So an update in many steps costs
    no more than one in a single step, and a name that it gives at its end is known by then.
    """

    def __init__(
        self,
        settings: Settings,
        weights: Weights,
        agreement: Agreement,
        catalogue: Catalogue,
        orders: Orders,
        descriptions: Descriptions,
        retiring: Retiring,
        counters: Counters,
        *,
        forget: Callable[[bool], None],
    ) -> None:
        """`forget` makes all requests forget what was found for them, or is waited for: it is of
        other namespaces. If it is given True, their blocks are of weights that are gone."""
        self._keeps = settings.weight_updates == KEEP
        self._weights = weights
        self._agreement = agreement
        self._catalogue = catalogue
        self._orders = orders
        self._descriptions = descriptions
        self._retiring = retiring
        self._counters = counters
        self._forget = forget
        self._left: set[bytes] = set()
        """Namespaces that the engine has left, while nobody knows for which ones."""

    def on_changed(self, changes: Mapping[str, int]) -> None:
        """Takes in how often each worker has seen its weights change."""
        weights = self._weights
        if not weights.is_news(changes):
            return
        for worker, count in changes.items():
            weights.changes[worker] = max(count, weights.changes.get(worker, 0))
        self._counters.count("weight_changes")
        if self._keeps:
            self._counters.count("kept_weight_changes")
            return
        self._leave("")
        weights.has_old_blocks = weights.has_old_encodings = True
        self._rename(None)
        self._forget(True)
        self._orders.void()

    def on_update(self, *, is_under_way: bool) -> None:
        """Takes in whether a trainer has begun to update the weights, and has not finished."""
        weights, before = self._weights, self._weights.is_updating
        weights.is_updating = is_under_way and not self._keeps
        if weights.is_updating and not before:
            logger.info(
                "Penstock: a trainer updates the weights: until it has finished, requests neither "
                "load nor store"
            )

    def on_named(self, version: str) -> None:
        """An update has called the weights of now so."""
        weights = self._weights
        # Those of the start are known by their files.
        if weights.count and version != weights.version:
            self._leave(version)

    @property
    def asks(self) -> bool:
        """Whether the workers shall be asked what their weights are, for :meth:`on_told`."""
        return self._weights.is_unknown and not self._weights.is_updating

    @property
    def name(self) -> str:
        """How the last update called the weights; empty if it did not."""
        return self._weights.version

    def on_told(self, told: Iterable[RankWeights | None]) -> None:
        """Takes in which weights the workers compute with. From now on the engine shares blocks
        with all engines that compute with the same."""
        known = [one for one in told if one is not None]
        self.on_changed({one.worker: one.changes for one in known})
        try:
            self._rename({one.rank: one.models for one in known})
        except ConfigError as error:
            logger.warning("Penstock: after an update, %s. Blocks are shared with nobody", error)
            self._rename(None)
        self._weights.is_unknown = False
        own = self._own()
        left, self._left = self._left.difference(own), set()
        self._retiring.retire(sorted(left), stays=own)
        logger.info(
            "Penstock: after an update of the weights, blocks are shared as %s",
            ", ".join(namespace.hex() for namespace in self._agreement.namespaces),
        )

    def _leave(self, version: str) -> None:
        """The engine's namespaces will be others, and it is not known which. An update calls the
        weights `version`; empty if it does not."""
        weights = self._weights
        if not weights.is_unknown:
            self._left.update(self._own())
        weights.is_unknown, weights.version = True, version

    def _own(self) -> list[bytes]:
        """The engine's namespaces, those of tenants too."""
        return [
            namespace
            for tenant in ("", *self._descriptions.tenants)
            for namespace in self._agreement.namespaces_of(tenant)
        ]

    def _rename(self, models: Mapping[tuple[int, int], ModelShares | None] | None) -> None:
        """The namespaces are those of these models, by rank; None if they are not known."""
        before = self._agreement.namespaces
        self._agreement.renew(models)
        if self._agreement.namespaces == before:
            return
        self._weights.count += 1
        self._weights.renew_writer()
        self._weights.last_old_job = self._orders.number()
        self._descriptions.forget()
        self._catalogue.forget_pool()
        self._catalogue.forget_host()
        self._forget(False)
