"""The storage backend that SGLang's HiCache loads: its interface, over a pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from penstock.sglang import compat
from penstock.sglang.counters import Counters
from penstock.sglang.facts import KV, engine_facts
from penstock.sglang.hits import SidePool, leading, reach
from penstock.sglang.hostpools import HostPool, HostPools
from penstock.sglang.metrics import Prometheus, Transfers
from penstock.sglang.pages import PIECES, Loan, lent
from penstock.sglang.settings import Settings
from penstock.sglang.store import LOOKUP_OBJECTS, Object, PageStore

T = TypeVar("T")


class PenstockStorage(HiCacheStorage):  # type: ignore[misc]
    """HiCache's third level in a Penstock pool.

    With `interface_v1`, pages move between SGLang's host memory and the pool in place, and SGLang
    calls the methods whose names end in `v1` and `v2`. Without it, SGLang copies each page of KV,
    and calls `batch_get` and `batch_set`. The two forms do not share pages with each other.

    No method raises once the host pools are registered: an exception would end SGLang's thread. A
    failure is a miss or a page that is not stored. It is counted, and logged once a minute.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Opens the pool as SGLang's `HiCacheStorageConfig` says, which its factory gives.

        Raises:
            ConfigError: SGLang lacks something, a setting is wrong, or the weights cannot be told
                from others.
            StoreError: the pool's directory cannot be used.
        """
        compat.check()
        settings = Settings.parse(storage_config.extra_config or {})
        metrics = Prometheus(storage_config) if storage_config.enable_storage_metrics else None
        self._counters = Counters(None if metrics is None else metrics.count)
        self._transfers = None if metrics is None else Transfers()
        self._known = HostPools(settings, storage_config, engine_facts(settings))
        self._store = PageStore(settings, self._counters)
        self._pools: dict[str, HostPool] = {}
        self._in_place = bool((storage_config.extra_config or {}).get("interface_v1"))
        self._is_logical = False

    # What SGLang registers.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Takes SGLang's host pool for the model's KV.

        Raises:
            ConfigError: its pages cannot be had, or the type of its KV cannot be known.
        """
        super().register_mem_pool_host(mem_pool_host)
        # Some models have KV in side pools only: this one then just counts pages.
        self._is_logical = getattr(mem_pool_host, "kv_buffer", None) is None
        if not self._is_logical:
            self._register(KV, mem_pool_host, in_place=self._in_place)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Takes a side pool, as :meth:`register_mem_pool_host`."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != KV:
            self._register(str(host_pool_name), host_pool, in_place=True)

    def _register(self, name: str, pool: Any, *, in_place: bool) -> None:
        self._pools[name] = self._known.register(name, pool, in_place=in_place)
        self._store.describe(*self._pools[name].namespace)

    # Pages in place.

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Loads pages into host memory. For each, whether it is there now, verified."""
        if self._is_logical:
            return [True] * len(keys)
        return self._guarded("a load", lambda: self._load(KV, keys, host_indices), _none_of(keys))

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Stores pages of host memory. For each, whether the pool has it now."""
        if self._is_logical:
            return [True] * len(keys)
        return self._guarded("a store", lambda: self._save(KV, keys, host_indices), _none_of(keys))

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, Any]:
        """Loads pages of each side pool into host memory, as :meth:`batch_get_v1` does for the
        KV."""
        return {each.name: self._move("a load", self._load, each) for each in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, Any]:
        """Stores pages of each side pool, as :meth:`batch_set_v1` does for the KV."""
        return {each.name: self._move("a store", self._save, each) for each in transfers}

    def _move(self, what: str, move: Callable[..., list[bool]], transfer: Any) -> list[bool]:
        keys = transfer.keys or []
        name = str(transfer.name)
        return self._guarded(what, lambda: move(name, keys, transfer.host_indices), _none_of(keys))

    def _load(self, name: str, keys: Sequence[str], indices: Any) -> list[bool]:
        pool = self._pools[name]
        loans = pool.pages.targets(_checked(pool, keys, indices))
        start = time.perf_counter()
        loaded = pool.whole(self._store.get(pool.objects(keys, loans)))
        seconds = time.perf_counter() - start
        each = pool.objects_of_page
        for page, is_loaded in enumerate(loaded):
            if is_loaded:
                pool.pages.arrived(indices, page, loans[page * each : (page + 1) * each])
        self._count_load(loaded, loans, seconds)
        return loaded

    def _count_load(self, loaded: Sequence[bool], loans: Sequence[Loan], seconds: float) -> None:
        pages = sum(loaded)
        nbytes = pages * sum(loan.nbytes for loan in loans) // max(1, len(loaded))
        self._counters.count("loaded_pages", pages)
        self._counters.count("loaded_bytes", nbytes)
        self._counters.count("missed_pages", len(loaded) - pages)
        if self._transfers is not None:
            self._transfers.loaded(pages, nbytes, seconds)

    def _save(self, name: str, keys: Sequence[str], indices: Any) -> list[bool]:
        pool = self._pools[name]
        loans = pool.pages.sources(_checked(pool, keys, indices))
        return self._put(pool, pool.objects(keys, loans))

    def _put(self, pool: HostPool, objects: list[Object]) -> list[bool]:
        start = time.perf_counter()
        done, nbytes = self._store.put(objects)
        seconds = time.perf_counter() - start
        there = pool.whole(done)
        stored = nbytes * len(there) // max(1, sum(each.loan.nbytes for each in objects))
        self._counters.count("stored_pages", stored)
        self._counters.count("stored_bytes", nbytes)
        self._counters.count("present_pages", sum(there) - stored)
        self._counters.count("unstored_pages", len(there) - sum(there))
        if self._transfers is not None:
            self._transfers.stored(stored, nbytes, seconds)
        return there

    # Look-ups.

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """The number of leading pages that the pool has."""
        return self._guarded("a look-up", lambda: leading(self._there(keys, [])[0]), 0)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """How far a prompt can be restored, in all pools that it needs."""
        transfers = pool_transfers or []
        return self._guarded(
            "a look-up",
            lambda: self._restorable(keys, transfers),
            PoolTransferResult(0, {}, []),
        )

    def _restorable(self, keys: Sequence[str], transfers: Sequence[Any]) -> Any:
        kv, *sides = self._there(keys, [str(each.name) for each in transfers])
        kv_pages = leading(kv)
        found = reach(
            kv_pages,
            [
                SidePool(
                    each.name, str(each.hit_policy.value), there, len(each.keys) if each.keys else 1
                )
                for each, there in zip(transfers, sides, strict=True)
            ],
        )
        hits = {KV: kv_pages} if kv_pages else {}
        return PoolTransferResult(found.pages, hits | found.by_pool, found.possible)

    def _there(self, keys: Sequence[str], sides: Sequence[str]) -> list[list[bool]]:
        """For the model's KV, then for each side pool, which pages the store has.

        Pages are looked up in pieces, in order. Nothing behind a piece is asked for if a page of
        the model's KV is missing in it: no prefix needs that. It counts as missing. So does what
        the store did not answer in time.
        """
        wanted = [self._pools.get(name) for name in (KV, *sides)]
        found: list[list[bool]] = [[] for _ in wanted]
        timeout = self._store.lookup_timeout
        end = time.monotonic() + timeout
        start, count = 0, self._first_piece(wanted)
        while start < len(keys) and all(found[0]):
            began = time.monotonic()
            there = self._look_up(wanted, keys[start : start + count], end - began)
            if there is None:
                break
            for pages, more in zip(found, there, strict=True):
                pages += more
            start += count
            # Fast stores take many at once. With slow ones, a late piece must not cost much.
            if time.monotonic() - began < timeout / 10:
                count *= 2
        self._counters.count("lookup_pages", len(keys))
        self._counters.count("lookup_hit_pages", leading(found[0]))
        return [pages + [False] * (len(keys) - len(pages)) for pages in found]

    @staticmethod
    def _first_piece(wanted: Sequence[HostPool | None]) -> int:
        """The pages that a look-up asks for first."""
        objects_of_page = sum(pool.objects_of_page for pool in wanted if pool is not None)
        return max(1, LOOKUP_OBJECTS // max(1, objects_of_page))

    def _look_up(
        self, wanted: Sequence[HostPool | None], keys: Sequence[str], timeout: float
    ) -> list[list[bool]] | None:
        """For each host pool, which of these pages the store has. None if it does not answer."""
        names = [name for pool in wanted if pool is not None for name in pool.names(keys)]
        answers = self._store.contains(names, timeout) if names else []
        if answers is None:
            return None
        there = iter(answers)
        found = []
        for place, pool in enumerate(wanted):
            if pool is None:
                found.append([place == 0 and self._is_logical] * len(keys))
            else:
                count = len(keys) * pool.objects_of_page
                found.append(pool.whole([next(there) for _ in range(count)]))
        return found

    def exists(self, key: str) -> bool:
        """Whether the pool has a page."""
        return self.batch_exists([key]) == 1

    # Pages that SGLang copies.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Loads a page into a tensor of its size; a new one if there is none. None for a miss."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Loads several pages. Each is what :meth:`get` returns."""
        return self._guarded(
            "a load", lambda: self._get_copies(keys, target_locations), [None] * len(keys)
        )

    def _get_copies(self, keys: Sequence[str], targets: Any) -> list[Any]:
        pool = self._copies()
        if targets is None:
            targets = [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        loans = [lent(target) for target in targets]
        start = time.perf_counter()
        loaded = self._store.get(pool.objects(keys, loans))
        self._count_load(loaded, loans, time.perf_counter() - start)
        return [
            target if is_loaded else None for target, is_loaded in zip(targets, loaded, strict=True)
        ]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Stores a page, a tensor in host memory. Whether the pool has it now."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Stores several pages, as :meth:`set` does one. Whether the pool has all of them now."""
        return self._guarded("a store", lambda: self._set_copies(keys, values), False)

    def _set_copies(self, keys: Sequence[str], values: Any) -> bool:
        pool = self._copies()
        return all(
            self._put(pool, pool.objects(keys, [lent(value.contiguous()) for value in values]))
        )

    def _copies(self) -> HostPool:
        if self._in_place:
            raise ValueError("with interface_v1, pages move in place: SGLang passes no copies")
        return self._pools[KV]

    # The rest.

    def clear(self) -> bool:
        """Removes the pages of all namespaces of this backend, those of its neighbours included.
        False if the pool failed meanwhile."""
        return self._store.clear([pool.namespace.digest for pool in self._pools.values()])

    def get_stats(self) -> Any:
        """SGLang's `StorageMetrics` since the last call; None if SGLang's metrics are off."""
        return None if self._transfers is None else self._transfers.take()

    def moves_in_place(self) -> bool:
        """Whether the pages of all host pools move without a copy by SGLang."""
        forms = [pool.pages.description["form"] for pool in self._pools.values()]
        return all(form == PIECES for form in forms)

    def counters(self) -> dict[str, int]:
        """Penstock's own counters since this backend was made."""
        return self._counters.all()

    def close(self) -> None:
        """Lets go of SGLang's host memory. What is asked afterwards is not found."""
        self._pools.clear()
        self._is_logical = False
        self.registered_pools: dict[str, Any] = {}
        self.mem_pool_host: Any = None

    def _guarded(self, what: str, work: Callable[[], T], otherwise: T) -> T:
        try:
            return work()
        except Exception as error:
            self._store.troubles.report(what, error)
            return otherwise


def _none_of(keys: Sequence[str] | None) -> list[bool]:
    return [False] * len(keys or [])


def _checked(pool: HostPool, keys: Sequence[str], indices: Any) -> Any:
    """The indices, if they are those of so many pages."""
    if indices is None or len(indices) != len(keys) * pool.pages.page_tokens:
        count = 0 if indices is None else len(indices)
        raise ValueError(
            f"{len(keys)} pages of {pool.pages.page_tokens} tokens come with {count} indices"
        )
    return indices
