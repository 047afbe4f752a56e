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

from penstock._native import ModelVariant, PoolFinder, PromptPrefix, Store, TokenIds
from penstock.errors import Closed, ConfigError, StoreError
from penstock.lookup.adapters import Adapters
from penstock.lookup.engines import EngineAddress, EngineView, Followers
from penstock.lookup.models import Lora, Model, Models, Refused, read_models
from penstock.option import option
from penstock.supervised import Running, Threads, ThreadState

__all__ = ["Found", "InPool", "Limits", "OnEngine", "Question", "Service", "Settings", "open"]

logger = logging.getLogger("penstock.lookup")

_IN_PLACE_SECONDS = 0.02
"""The longest that a pool is asked in place: by the thread that asks, which serves others too."""
_NEAR_SECONDS = 0.005
"""A pool that takes longer is asked by other threads for a while."""
_FAR_SECONDS = 1.0
"""Seconds for which a pool that took longer than `_NEAR_SECONDS` is asked by other threads."""

REFRESHER = "penstock-lookup-models"
"""The thread that reads the pools' models."""
_FAULT = "fault"
"""The kind of failure that is this service's own."""
_MOST_LOGGED = 20
"""Refused models that are logged of one reading of one pool."""

_UNKNOWN_SECONDS = 2.0
"""How long a pool's models are believed, when somebody asks for one that is not among them."""


@dataclass(frozen=True)
class Settings:
    """Bounds of the service."""

    blocks: int = option(1_000_000, "N", "blocks that each pool's index remembers, 36 bytes each")
    threads: int = option(8, "N", "threads that ask pools")
    engine_blocks: int = option(1_000_000, "N", "blocks remembered of each engine's own cache")
    believe_found: float = option(10.0, "SECONDS", "how long a block counts as there")
    believe_missing: float = option(0.25, "SECONDS", "how long a block counts as missing")
    timeout: float = option(2.0, "SECONDS", "longest that a pool may take to answer")
    refresh: float = option(60.0, "SECONDS", "time between two readings of the pools' models")


@dataclass(frozen=True)
class Limits:
    """Bounds of a server that answers over HTTP."""

    concurrency: int = option(256, "N", "look-ups at the same time; further ones are answered 503")
    prompt_tokens: int = option(1 << 18, "N", "the longest prompt")
    body_bytes: int = 8 << 20
    body_seconds: float = 10.0
    """The longest that a request's body may take to come."""


@dataclass(frozen=True)
class Question:
    """A prompt for a model, as a request to an engine has it."""

    model: str
    prompt: list[int] | TokenIds
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
class OnEngine:
    """What one engine would find: in its own cache, and then in its pool."""

    name: str
    state: str
    """`complete`: its events have told of all that it has. `partial`: it may have more. `gone`: it
    cannot be heard, and what it has is not known."""
    own: int | None
    """Tokens of the prompt in its own cache; None if that is not known."""
    tokens: int | None
    """Tokens of the prompt that it need not compute; None if neither cache nor pool is known."""
    heard: float | None
    """Seconds since it told something; None if it never did. An idle engine tells nothing."""


@dataclass(frozen=True)
class Found:
    """The answer to a question."""

    model: str
    prompt_tokens: int
    pools: tuple[InPool, ...]
    engines: tuple[OnEngine, ...] = ()


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

    def find_in_place(self, variant: ModelVariant, prefix: PromptPrefix, own: int) -> int | None:
        """The tokens that an engine would find; None if the pool is not fast enough."""
        began = time.monotonic()
        if began < self.far_until:
            return None
        tokens = None
        with contextlib.suppress(StoreError):
            tokens = self.finder.find(variant, prefix, timeout=_IN_PLACE_SECONDS, own=own)
        ended = time.monotonic()
        if tokens is None or ended - began > _NEAR_SECONDS:
            self.far_until = ended + _FAR_SECONDS
        return tokens


@dataclass(frozen=True)
class _Asked:
    """One way to serve the model in one pool, and what it has of the prompt."""

    pool: _Pool
    model: Model
    tokens: int | Future[int]
    engines: tuple[tuple[EngineView, int, int | Future[int]], ...]
    """Engines, the tokens in their own caches, and the tokens with the pool."""


@dataclass(frozen=True)
class Pending:
    """An answer, part of which a pool still has to give."""

    question: Question
    asked: tuple[_Asked, ...]
    engines: tuple[EngineView, ...]

    @property
    def waits_for(self) -> list[Future[int]]:
        """What must be done before :meth:`found`."""
        waits = [one.tokens for one in self.asked if isinstance(one.tokens, Future)]
        for one in self.asked:
            waits += [tokens for *_, tokens in one.engines if isinstance(tokens, Future)]
        return waits

    def found(self) -> Found:
        """The answer. A pool that failed has told no tokens."""
        pools = []
        for one in self.asked:
            tokens, error = _told(one.tokens)
            namespace, block_size = one.model.namespace.hex(), one.model.block_size
            pools.append(InPool(one.pool.url, namespace, block_size, tokens, error))
        engines = tuple(self._on(view) for view in self.engines)
        question = self.question
        return Found(question.model, len(question.prompt), tuple(pools), engines)

    def _on(self, view: EngineView) -> OnEngine:
        own: int | None = None
        most: int | None = None
        for one in self.asked:
            if view.address.pool not in (None, one.pool.url):
                continue
            tokens, _ = _told(one.tokens)
            for other, its_own, with_pool in one.engines:
                if other is view:
                    own = max(own or 0, its_own)
                    tokens = max(its_own, _told(with_pool)[0] or 0)
            if tokens is not None:
                most = max(most or 0, tokens)
        state = view.state
        return OnEngine(view.address.name, state.name, own, most, state.heard)


def _told(asked: int | Future[int]) -> tuple[int | None, str | None]:
    """The tokens that a pool told, or the kind of its failure."""
    try:
        return (asked.result() if isinstance(asked, Future) else asked), None
    except StoreError as failure:
        return None, failure.kind


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
        engines: Sequence[EngineAddress] = (),
    ) -> None:
        """`engines` are followed by their KV events. `adapters` has LoRA adapters, name → path:
        their files are read here. `aliases` has further names of models: name → a name in the
        pools' descriptions.

        Raises:
            StoreError: a pool does not answer.
            ConfigError: the engines cannot be followed.
        """
        self.settings = settings or Settings()
        self._pools = [self._pool(store) for store in stores]
        self._aliases = dict(aliases or {})
        self._adapters = Adapters(adapters or {})
        self._refreshing = threading.Lock()
        for pool in self._pools:
            self._read(pool)
        self._note_read()
        self._followers = Followers(engines, self.settings.engine_blocks)
        self._closed = threading.Event()
        self._asking = ThreadPoolExecutor(self.settings.threads, "penstock-lookup")
        self._wanted = threading.Event()
        """Set when the models shall be read now."""
        self._threads = Threads(logger)
        self._threads.start(
            REFRESHER,
            self._refresh_often,
            advice="Until then, models that are new in the pools stay unknown. Look-ups of the "
            "known ones go on. Please report it.",
            wake=self._wanted.set,
        )

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
        self._followers.close()
        self._asking.shutdown()
        self._threads.stop(self.settings.timeout)

    def find(
        self,
        model: str,
        prompt: list[int] | TokenIds,
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

    def find_at_once(self, question: Question) -> Found | None:
        """The answer; None if a pool would have to be waited for.

        Raises:
            Refused, ConfigError, Closed: as :meth:`find`.
        """
        pending = self._begin(question, may_wait=False)
        return None if pending is None else pending.found()

    def begin(self, question: Question) -> Pending:
        """Begins to answer. What the index of a pool does not know, threads ask the pool for. A
        pool that has answered fast is asked in place, which takes less time than another thread.

        Raises:
            Refused, ConfigError, Closed: as :meth:`find`.
        """
        pending = self._begin(question, may_wait=True)
        assert pending is not None
        return pending

    def _begin(self, question: Question, *, may_wait: bool) -> Pending | None:
        """Begins to answer, see :meth:`begin`. None if a pool would have to be waited for and that
        may not be."""
        if self._closed.is_set():
            raise Closed("the look-up service is closed")
        hashed: dict[object, PromptPrefix] = {}
        asked: list[_Asked] = []
        engines = self._serving(question.model)
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
            tokens = self._tokens(pool, variant, prefix, 0, may_wait)
            if tokens is None:
                return None
            having = []
            for view in engines:
                if view.address.pool in (None, pool.url):
                    has = view.tokens(model, prefix)
                    if has is None:
                        continue
                    with_pool = (
                        self._tokens(pool, variant, prefix, has, may_wait) if has else tokens
                    )
                    if with_pool is None:
                        return None
                    having.append((view, has, with_pool))
            asked.append(_Asked(pool, model, tokens, tuple(having)))
        return Pending(question, tuple(asked), tuple(engines))

    def _tokens(
        self, pool: _Pool, variant: ModelVariant, prefix: PromptPrefix, own: int, may_wait: bool
    ) -> int | Future[int] | None:
        """The tokens that an engine would find that has the first `own` of them itself; None if the
        pool would have to be waited for and that may not be."""
        tokens = pool.finder.known(variant, prefix, own=own)
        if tokens is None:
            tokens = pool.find_in_place(variant, prefix, own)
        if tokens is not None or not may_wait:
            return tokens
        timeout = self.settings.timeout
        return self._asking.submit(pool.finder.find, variant, prefix, timeout=timeout, own=own)

    def _serving(self, name: str) -> list[EngineView]:
        """The engines that serve this model."""
        if not self._followers.views:
            return []
        names = {self._aliases.get(name, name), name}
        for _, model in self._models(name):
            names |= model.names
        return [
            view
            for view in self._followers.views
            if view.address.model is None or view.address.model in names
        ]

    @property
    def engines(self) -> list[EngineView]:
        """The engines that are followed."""
        return self._followers.views

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
            self._wanted.set()
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

    @property
    def threads(self) -> list[ThreadState]:
        """How the threads are that read models and follow engines. One that failed begins again by
        itself; meanwhile, what it reads is not renewed."""
        return [*self._threads.states(), *self._followers.threads]

    def stats(self) -> Iterable[tuple[str, int, int]]:
        """For each pool: URL, blocks in the index, blocks that the pool was asked for."""
        return [(pool.url, *pool.finder.stats()) for pool in self._pools]

    def refresh(self) -> None:
        """Reads the models that the pools describe. A pool that fails keeps those it had."""
        if not self._refreshing.acquire(blocking=False):
            return
        faults: list[Exception] = []
        try:
            for pool in self._pools:
                try:
                    self._read(pool)
                    pool.failure = None
                except StoreError as error:
                    pool.failure = error.kind
                    logger.warning("the models of %s could not be read: %s", pool.url, error)
                except Exception as error:
                    # A fault of this service. The other pools are read all the same.
                    pool.failure = _FAULT
                    faults.append(error)
            self._note_read()
        finally:
            self._refreshing.release()
        if faults:
            raise faults[0]

    def _read(self, pool: _Pool) -> None:
        """Reads the models of a pool. Logs what is newly refused.

        Raises:
            StoreError: the pool failed.
        """
        models = read_models(pool.store, timeout=self.settings.timeout)
        new = [name for name, why in models.refused.items() if pool.models.refused.get(name) != why]
        for name in new[:_MOST_LOGGED]:
            logger.warning("%s: %s is not served: %s", pool.url, name, models.refused[name])
        if len(new) > _MOST_LOGGED:
            more = len(new) - _MOST_LOGGED
            logger.warning("%s: %d more are not served; GET /models names them", pool.url, more)
        pool.models = models

    def _note_read(self) -> None:
        self._adapters.read({model.hashing.adapter_options for model in self.models})
        self._read_at = time.monotonic()

    def _refresh_often(self, running: Running) -> None:
        while not running.stopping.is_set():
            self._wanted.wait(self.settings.refresh)
            self._wanted.clear()
            if not running.stopping.is_set():
                self.refresh()
                running.progressed()


def open(
    urls: Sequence[str],
    settings: Settings | None = None,
    *,
    adapters: Mapping[str, str] | None = None,
    aliases: Mapping[str, str] | None = None,
    engines: Sequence[EngineAddress] = (),
) -> Service:
    """Opens the service for some pools; see :class:`Service`.

    Raises:
        ConfigError: no URL was given, or one is wrong.
        StoreError: a pool does not answer.
    """
    if not urls:
        raise ConfigError("no pool: give at least one URL")
    stores = [Store.open(url, client_name="penstock-lookup") for url in urls]
    return Service(stores, settings, adapters=adapters, aliases=aliases, engines=engines)
