"""The service behind all doors: which tokens of a prompt are in which pool."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from types import TracebackType

from penstock._native import ModelVariant, PoolFinder, PromptPrefix, Store
from penstock.errors import Closed, ConfigError, StoreError
from penstock.lookup.adapters import Adapters
from penstock.lookup.models import Lora, Model, Models, Refused, read_models

__all__ = ["Found", "InPool", "Question", "Service", "Settings", "open"]

logger = logging.getLogger("penstock.lookup")

_IN_PLACE_SECONDS = 0.02
"""The longest that a pool is asked in place: by the thread that asks, which serves others too."""
_NEAR_SECONDS = 0.005
"""A pool that takes longer is asked by other threads for a while."""
_FAR_SECONDS = 1.0
"""So long."""

_UNKNOWN_SECONDS = 2.0
"""How long a pool's models are believed, when somebody asks for one that is not among them."""


@dataclass(frozen=True)
class Settings:
    """Bounds of the service."""

    blocks: int = 1_000_000
    """Blocks that the index of each pool remembers. A block takes 36 bytes."""
    believe_found: float = 10.0
    """Seconds for which a block is believed to be in a pool that has said so."""
    believe_missing: float = 0.25
    """Seconds for which a block is believed not to be in a pool that has said so."""
    timeout: float = 2.0
    """The longest that a pool may take to answer, in seconds."""
    refresh: float = 60.0
    """Seconds between two readings of the models that the pools describe."""
    threads: int = 8
    """Threads that ask pools."""


@dataclass(frozen=True)
class Question:
    """A prompt for a model, as a request to an engine has it."""

    model: str
    prompt: list[int]
    """Token ids."""
    cache_salt: str | None = None
    lora: Lora | str | None = None
    """The adapter, or the name of one of the service's own."""
    tenant: str | None = None
    """The tenant that the request names beside its salt: then only the tenant's objects count."""


@dataclass(frozen=True)
class InPool:
    """What an engine would find in a pool."""

    url: str
    """The pool, without credentials."""
    namespace: str
    """The namespace that engines of this configuration use. A pool may have several of a model."""
    block_size: int
    tokens: int | None
    """Tokens of the prompt from the first on; None if the pool did not answer."""
    error: str | None = None
    """Kind of the pool's failure."""


@dataclass(frozen=True)
class Found:
    """The answer to a question."""

    model: str
    prompt_tokens: int
    pools: tuple[InPool, ...]


@dataclass
class _Pool:
    """A pool, its index and its models."""

    url: str
    store: Store
    finder: PoolFinder
    models: Models = field(default_factory=Models)
    failure: str | None = None
    far_until: float = 0.0
    """Until when it is not asked in place."""

    def find_in_place(self, variant: ModelVariant, prefix: PromptPrefix) -> int | None:
        """The tokens that an engine would find; None if the pool is not fast enough."""
        began = time.monotonic()
        if began < self.far_until:
            return None
        tokens = None
        with contextlib.suppress(StoreError):
            tokens = self.finder.find(variant, prefix, timeout=_IN_PLACE_SECONDS)
        ended = time.monotonic()
        if tokens is None or ended - began > _NEAR_SECONDS:
            self.far_until = ended + _FAR_SECONDS
        return tokens


@dataclass(frozen=True)
class Pending:
    """An answer, part of which a pool still has to give."""

    question: Question
    asked: tuple[tuple[_Pool, Model, int | Future[int]], ...]

    @property
    def waits_for(self) -> list[Future[int]]:
        """What must be done before :meth:`found`."""
        return [tokens for _, _, tokens in self.asked if isinstance(tokens, Future)]

    def found(self) -> Found:
        """The answer. A pool that failed has told no tokens."""
        pools = []
        for pool, model, asked in self.asked:
            tokens, error = None, None
            try:
                tokens = asked.result() if isinstance(asked, Future) else asked
            except StoreError as failure:
                error = failure.kind
            pools.append(InPool(pool.url, model.namespace.hex(), model.block_size, tokens, error))
        question = self.question
        return Found(question.model, len(question.prompt), tuple(pools))


class Service:
    """Answers how many tokens of a prompt engines would find, in each of some pools.

    A pool's models are read when the service is made, and then now and then, by a thread of its
    own. Any number of threads may ask.

    >>> import penstock.lookup
    >>> service = penstock.lookup.open(["memory://?size=1MiB"])
    >>> service.find("llama", [1, 2, 3])
    Traceback (most recent call last):
    penstock.lookup.models.Refused: no pool describes a model 'llama'; none is described yet: an \
engine describes its model when it stores its first block
    >>> service.close()
    """

    def __init__(
        self,
        stores: Sequence[Store],
        settings: Settings | None = None,
        *,
        adapters: Mapping[str, str] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """`adapters` has LoRA adapters, name → path: their files are read here. `aliases` has
        further names of models: name → a name in the pools' descriptions.

        Raises:
            StoreError: a pool does not answer.
        """
        self.settings = settings or Settings()
        self._pools = [self._pool(store) for store in stores]
        self._aliases = dict(aliases or {})
        self._adapters = Adapters(adapters or {})
        self._refreshing = threading.Lock()
        for pool in self._pools:
            pool.models = read_models(pool.store, timeout=self.settings.timeout)
        self._note_read()
        self._closed = threading.Event()
        self._asking = ThreadPoolExecutor(self.settings.threads, "penstock-lookup")
        self._refresher = threading.Thread(
            target=self._refresh_often, name="penstock-lookup-models", daemon=True
        )
        self._refresher.start()

    def _pool(self, store: Store) -> _Pool:
        # Questions to a pool that is down fail at once, but for a probe now and then.
        store = store.guarded()
        finder = PoolFinder(
            store,
            blocks=self.settings.blocks,
            believe_found=self.settings.believe_found,
            believe_missing=self.settings.believe_missing,
        )
        return _Pool(store.url, store, finder)

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads. Questions under way are answered."""
        self._closed.set()
        self._asking.shutdown()
        self._refresher.join(self.settings.timeout)

    def find(
        self,
        model: str,
        prompt: list[int],
        *,
        cache_salt: str | None = None,
        lora: Lora | str | None = None,
        tenant: str | None = None,
    ) -> Found:
        """How many tokens of the prompt an engine would find in each pool.

        Raises:
            Refused: no pool has the model, or something about it is not known here.
            ConfigError: the prompt, or what comes with it, is none.
            Closed: the service was closed.
        """
        pending = self.begin(Question(model, prompt, cache_salt, lora, tenant))
        wait(pending.waits_for)
        return pending.found()

    def begin(self, question: Question) -> Pending:
        """Begins to answer. What the index of a pool does not know, threads ask the pool for. A
        pool that has answered fast is asked in place, which takes less time than another thread.

        Raises:
            Refused, ConfigError, Closed: as :meth:`find`.
        """
        if self._closed.is_set():
            raise Closed("the look-up service is closed")
        hashed: dict[object, PromptPrefix] = {}
        asked: list[tuple[_Pool, Model, int | Future[int]]] = []
        for pool, model in self._models(question.model):
            hashing = model.hashing
            if (prefix := hashed.get(hashing)) is None:
                lora = self._adapters.named(question.lora, hashing.adapter_options)
                prefix = hashing.prefix(question.prompt, cache_salt=question.cache_salt, lora=lora)
                hashed[hashing] = prefix
            variant = model.variant
            if question.tenant is not None:
                own = variant.of_tenant(question.tenant)
                # Blocks without a salt belong to nobody.
                variant = own if question.cache_salt else variant
            tokens: int | Future[int] | None = pool.finder.known(variant, prefix)
            if tokens is None:
                tokens = pool.find_in_place(variant, prefix)
            if tokens is None:
                tokens = self._asking.submit(
                    pool.finder.find, variant, prefix, timeout=self.settings.timeout
                )
            asked.append((pool, model, tokens))
        return Pending(question, tuple(asked))

    def described(self, name: str) -> str:
        """The name of the model in the pools' descriptions: that from which engines load it.

        Raises:
            Refused: no pool has it, or something about it is not known here.
        """
        return self._models(name)[0][1].name

    def _models(self, name: str) -> list[tuple[_Pool, Model]]:
        """The ways in which pools know this model.

        Raises:
            Refused: there is none.
        """
        described = self._aliases.get(name, name)
        found = [
            (pool, model)
            for pool in self._pools
            for model in pool.models.known
            if described in model.names
        ]
        if found:
            return found
        for pool in self._pools:
            if described in pool.models.refused:
                raise Refused(f"the model {name!r}: {pool.models.refused[described]}")
        if time.monotonic() - self._read_at > _UNKNOWN_SECONDS:
            # An engine may just have described it. The next question finds it.
            threading.Thread(target=self.refresh, daemon=True).start()
        known = sorted({name for model in self.models for name in model.names})
        have = (
            f"they describe {', '.join(known)}"
            if known
            else "none is described yet: an engine describes its model when it stores its first "
            "block"
        )
        raise Refused(f"no pool describes a model {name!r}; {have}", is_unknown=True)

    @property
    def models(self) -> list[Model]:
        """The models that can be asked for."""
        return [model for pool in self._pools for model in pool.models.known]

    @property
    def refused(self) -> dict[str, str]:
        """The models that the pools describe and that cannot be asked for, and why."""
        return {name: why for pool in self._pools for name, why in pool.models.refused.items()}

    @property
    def failures(self) -> dict[str, str]:
        """Pools whose models could not be read the last time: URL → kind of failure."""
        return {pool.url: pool.failure for pool in self._pools if pool.failure is not None}

    def stats(self) -> Iterable[tuple[str, int, int]]:
        """For each pool: URL, blocks in the index, blocks that the pool was asked for."""
        return [(pool.url, *pool.finder.stats()) for pool in self._pools]

    def refresh(self) -> None:
        """Reads the models that the pools describe. A pool that fails keeps those it had."""
        if not self._refreshing.acquire(blocking=False):
            return
        try:
            for pool in self._pools:
                try:
                    pool.models = read_models(pool.store, timeout=self.settings.timeout)
                    pool.failure = None
                except StoreError as error:
                    pool.failure = error.kind
                    logger.warning("the models of %s could not be read: %s", pool.url, error)
            self._note_read()
        finally:
            self._refreshing.release()

    def _note_read(self) -> None:
        self._adapters.read({model.hashing.adapter_options for model in self.models})
        self._read_at = time.monotonic()

    def _refresh_often(self) -> None:
        while not self._closed.wait(self.settings.refresh):
            self.refresh()


def open(
    urls: Sequence[str],
    settings: Settings | None = None,
    *,
    adapters: Mapping[str, str] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Service:
    """Opens the service for some pools; see :class:`Service`.

    Raises:
        ConfigError: no URL was given, or one is wrong.
        StoreError: a pool does not answer.
    """
    if not urls:
        raise ConfigError("no pool: give at least one URL")
    stores = [Store.open(url, client_name="penstock-lookup") for url in urls]
    return Service(stores, settings, adapters=adapters, aliases=aliases)
