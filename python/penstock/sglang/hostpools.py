"""SGLang's host pools as objects of the store: which objects a page of each pool has."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock.pool.namespace import namespace_digest
from penstock.sglang import facts
from penstock.sglang.pages import PIECES, WHOLE, Cut, FlatPages, Loan, Pages, pages_of
from penstock.sglang.settings import Settings
from penstock.sglang.store import Object, object_name

logger = logging.getLogger("sglang.penstock")


class Described(NamedTuple):
    """A namespace and what it stands for."""

    digest: bytes
    facts: Mapping[str, Any]


class HostPool:
    """One host pool, with the namespace of its pages."""

    def __init__(self, name: str, pages: Pages, namespace: Described, cut: Cut) -> None:
        self.name = name
        self.pages = pages
        self.namespace = namespace
        self._cut = cut

    @property
    def objects_of_page(self) -> int:
        """Objects that make up a page."""
        return max(1, self._cut.shares)

    def names(self, keys: Sequence[str]) -> list[bytes]:
        """The names of all objects of these pages, page after page."""
        digest = self.namespace.digest
        if not self._cut.shares:
            return [object_name(digest, key) for key in keys]
        shares = range(self._cut.first, self._cut.first + self._cut.shares)
        return [object_name(digest, key, share) for key in keys for share in shares]

    def objects(self, keys: Sequence[str], loans: Sequence[Loan]) -> list[Object]:
        """The objects of these pages, in the memory that :attr:`pages` has lent."""
        return list(map(Object, self.names(keys), loans))

    def whole(self, done: Sequence[bool]) -> list[bool]:
        """For each page, whether all of its objects are done."""
        each = self.objects_of_page
        return [all(done[i : i + each]) for i in range(0, len(done), each)]


class HostPools:
    """Makes :class:`HostPool` of what SGLang registers."""

    def __init__(self, settings: Settings, config: Any, engine: Mapping[str, Any]) -> None:
        self._settings = settings
        self._config = config
        self._engine = engine
        self._model = config.model_name or ""

    def register(self, name: str, pool: Any, *, in_place: bool) -> HostPool:
        """A host pool whose pages move in place, if that can be and is wanted.

        Raises:
            ConfigError: its pages cannot be had, or what they are cannot be known.
        """
        if not in_place:
            return self._named(name, pool, FlatPages(pool), WHOLE)
        cut = self._cut(name, pool)
        pages = pages_of(pool, cut)
        if pages.description["form"] != PIECES:
            logger.warning(
                "Penstock: SGLang's host pool %r (%s, layout %s) does not tell where the pieces of "
                "its pages lie: each page is copied once more",
                name,
                type(pool).__name__,
                pool.layout,
            )
        return self._named(name, pool, pages, cut)

    def _named(self, name: str, pool: Any, pages: Pages, cut: Cut) -> HostPool:
        found = {
            "model": self._model,
            **self._engine,
            **facts.pool_facts(
                self._settings, self._config, name, pool, pages.description, cut.shares
            ),
        }
        # The name under which a model is served does not change its KV.
        identity = {key: value for key, value in found.items() if key != "model"}
        namespace = Described(namespace_digest(identity), found)
        logger.info("Penstock: namespace %s: %s", namespace.digest.hex(), found)
        return HostPool(name, pages, namespace, cut)

    def _cut(self, name: str, pool: Any) -> Cut:
        """How pages are cut by heads: so that engines of all sizes that divide SGLang's
        `tp_lcm_size` find them, if SGLang's layout makes that possible."""
        config = self._config
        if not config.tp_lcm_size or name != facts.KV or str(pool.layout) != "page_head":
            return WHOLE
        if config.is_mla_model:
            return WHOLE
        shares = config.tp_lcm_size // config.tp_size
        return Cut(shares, config.tp_rank * shares)
