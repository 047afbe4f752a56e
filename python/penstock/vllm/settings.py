"""The connector's settings, from ``kv_connector_extra_config`` and the environment."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar
from urllib.parse import urlsplit

from penstock._native import Store, parse_size
from penstock.errors import ConfigError
from penstock.layout.geometry import RANK, parse_geometry
from penstock.layout.negotiate import AUTO, LAYOUTS
from penstock.option import option, shown
from penstock.pool import CONNECT_TIMEOUT, POOL_VARIABLE
from penstock.vllm import advisor
from penstock.vllm.lookup_limit import FIRST, LookupLimit
from penstock.vllm.names import PREFIX, TENANT, TENANT_NAME

if TYPE_CHECKING:
    from pydantic import TypeAdapter

logger = logging.getLogger("vllm.penstock")

OFF, LOSSLESS = "off", "lossless"
"""Values of the setting ``compression``."""


# Commands show options where there is no pydantic. So it is imported only when settings are read.


@dataclass(frozen=True)
class _Read:
    """Reads or refuses a value: what is given, or what pydantic has made of it."""

    read: Callable[[Any], Any]
    is_first: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import core_schema

        schema = handler(source)
        if self.is_first:
            return core_schema.no_info_before_validator_function(self.read, schema)
        return core_schema.no_info_after_validator_function(self.read, schema)


@dataclass(frozen=True)
class _Within:
    """Bounds of a number or a text, by pydantic's names."""

    bounds: Mapping[str, Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(source) | self.bounds


def _one_of(*names: str) -> _Read:
    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"one of {', '.join(names)}; not {value!r}")
        return value

    return _Read(check)


def _read_size(value: Any) -> Any:
    return parse_size(value) if isinstance(value, str) else value


def _check_positive(value: int) -> int:
    from pydantic_core import PydanticKnownError

    # Not a bound of the number: the error is to show what was given, which may be text.
    if value <= 0:
        raise PydanticKnownError("greater_than", {"gt": 0})
    return value


def _check_geometry(value: str) -> str:
    # Zero is a multiple of everything, so this checks only the text. No model is known here.
    parse_geometry(value, layers=0, heads=0)
    return value


def _check_endpoint(value: str) -> str:
    # The value is not shown, because a URL may hold a password.
    try:
        parts = urlsplit(value)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_usable = False
    if value and not is_usable:
        raise ValueError("not the URL of an OTLP/HTTP collector, such as http://127.0.0.1:4318")
    return value


def _check_host_memory(value: str) -> str:
    if value and (not value.startswith("shm://") or len(value.split()) > 1):
        raise ValueError("one URL of shared memory, such as shm://kv?size=64GiB")
    return value


def _check_address(value: str) -> str:
    if value:
        # Imported here, because it brings a server.
        from penstock.vllm.bootstrap import read_address

        read_address(value)
    return value


_Count = Annotated[int, _Read(_read_size, is_first=True), _Read(_check_positive)]
_Share = Annotated[float, _Within({"ge": 0, "le": 1})]
_Seconds = Annotated[float, _Within({"gt": 0, "allow_inf_nan": False})]


VERSION, KEEP, DROP = WEIGHT_UPDATES = ("version", "keep", "drop")

_CORES_FOR_MORE_LANES = 8
"""Cores of a rank from which on it gets a lane more of each kind."""


@dataclass(frozen=True)
class Lanes:
    """Numbers of a rank's native threads."""

    get: int
    put: int
    copy: int


@dataclass(frozen=True)
class Settings:
    """All settings, with their defaults. They are read and checked as they are made. A field says
    whether `penstock serve` has an option for it.

    Raises:
        ConfigError: an unknown setting, or a bad value.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "coerce_numbers_to_str": True}

    pool: str = field(
        metadata=shown(
            "URL",
            "pool to share, or several as tiers, the nearest first, with spaces between "
            "(default: $PENSTOCK_POOL, else a directory in the user's cache)",
        )
    )
    """URL of the pool; or several as tiers, the nearest first, with spaces between."""
    _: KW_ONLY
    host_bytes: _Count = option(
        0,
        "SIZE",
        "host memory, all ranks together, for blocks on their way and for those that stay in "
        "it until the room is needed (default: as much as two steps may store, 1 GiB at least)",
    )
    """Bytes of host memory, for all ranks of the engine together. It holds blocks on their way, and
    blocks that stay (the host tier). The default 0, which users cannot set, stands for the bytes
    that two of the engine's steps may store, and at least 1 GiB."""
    host_tier: bool = True
    """Whether blocks stay in host memory until their room is needed."""
    host_memory: Annotated[str, _Read(_check_host_memory)] = option(
        "",
        "URL",
        "node memory, as shm://NAME?size=64GiB: one host tier for all servers of this machine "
        "that name it. --host-bytes is then for blocks on their way only (default: each server "
        "has a host tier of its own)",
    )
    """Node memory, as `shm://NAME?size=64GiB`. All engines of the machine that name it share one
    host tier, in shared memory. `host_bytes` is then for blocks on their way only: what two steps
    may store, and at least 128 MiB. Empty: each engine has a host tier of its own."""
    load_policy: Annotated[str, _one_of(*advisor.POLICIES)] = option(
        advisor.AUTO,
        "POLICY",
        "whether to load what the pool has: auto, where this engine's own measurements say "
        "that it is faster than recomputing; always; or never",
        choices=advisor.POLICIES,
    )
    lookup_timeout: _Seconds = FIRST
    """Seconds after which a look-up counts as a miss. Unless it is set, the limit follows the pool,
    up to two seconds. Making a connection may take as long, but at least a second."""
    load_timeout: _Seconds = 0.5
    """Seconds that every load may take; `load_floor` adds to it by size."""
    load_floor: _Count = 64 << 20
    """Bytes per second below which a load is given up."""
    store_timeout: _Seconds = 5.0
    """Seconds that one put into the pool may take. No request waits for it."""
    store_wait: _Seconds = 0.1
    """Seconds that a block waits for room in host memory before it is dropped, which means that it
    is not stored. vLLM cannot use its KV memory for another block meanwhile."""
    handover_timeout: _Seconds = 5.0
    """Seconds that a request waits at most for the next block of another engine that computes its
    prompt."""
    bootstrap: Annotated[str, _Read(_check_address)] = ""
    """HOST:PORT at which an engine that stores answers proxies which ask prefill engines for their
    names, as vLLM's proxy for Mooncake does. Empty: nowhere."""
    consumer_stores: bool = False
    """Whether an engine with `kv_role` kv_consumer stores what it computes. Without it, only
    prefill engines store."""
    keep_limit: _Seconds = 600.0
    """Seconds for which a request may ask at most that its blocks be kept in the pool
    (`penstock.keep`)."""
    keep_share: _Share = 0.25
    """Share of the pool that blocks kept by this engine may take; 0 to keep none. A pool that does
    not tell its size counts as 16 GiB; of several tiers, the smallest counts."""
    keep_share_of_one: _Share = 0.1
    """Share of the pool that kept blocks of one tenant, or of one cache salt, may take. Requests
    without a salt share one such account."""
    witness_time: Annotated[float, _Within({"ge": 0, "le": 0.5})] = 0.01
    """Share of the steps' time that may go into comparing blocks that the engine has computed with
    what the pool has of them. 0: nothing is compared."""
    witness_share: _Share = 0.0
    """Share of the requests that could be loaded which are computed all the same, to compare their
    blocks. Without `witness_time` there are none."""
    event_check: _Seconds = 30.0
    """Seconds after which the pool is asked again for a block that this engine has announced in
    vLLM's KV events."""
    event_content: bool = False
    """Whether events of the pool hold what requests hold: token ids, names of images, sessions."""
    drain_timeout: _Seconds = 5.0
    """Seconds that shutdown waits for stores to reach the pool."""
    get_lanes: _Count = 0
    """Native threads that get values from the pool, per rank. The default 0, which users cannot
    set, stands for what `lanes` says; so it does for the next two."""
    put_lanes: _Count = 0
    """Native threads that put values into the pool, per rank, at low priority."""
    copy_lanes: _Count = 0
    """Native threads that copy between KV memory and host memory, per rank."""
    pool_geometry: Annotated[str, _Read(_check_geometry)] = option(
        RANK,
        "GEOMETRY",
        "what one object of the pool holds: rank, all that a rank has of a block; portable, "
        "pieces that engines of other pipeline and tensor-parallel degrees find too; or "
        "LAYERSxHEADS",
    )
    kv_layout: Annotated[str, _one_of(AUTO, *LAYOUTS)] = option(
        AUTO,
        "LAYOUT",
        "layout of the KV cache: auto for all layers of a block side by side where it can be "
        f"had, or {', '.join(LAYOUTS)}",
        choices=(AUTO, *LAYOUTS),
    )
    """Layout of the engine's KV cache: `auto`, or a layout's name. With `auto`, all layers of a
    block lie side by side where spec and attention backend allow it. A named layout is refused if
    it is not possible."""
    compression: Annotated[str, _one_of(OFF, LOSSLESS)] = OFF
    """Whether values in the pool are compressed: `off`, or `lossless`, which keeps every bit.
    Engines share objects only with engines of the same setting."""
    salt: str = ""
    """Text that goes into the namespace. Engines with different salts share nothing."""
    weight_updates: Annotated[str, _one_of(*WEIGHT_UPDATES)] = VERSION
    """What becomes of KV when the weights of a running engine change: `version`, each version of
    the weights has KV of its own; `keep`, KV of earlier weights is used on purpose, by engines of
    this setting among themselves; `drop`, as `version`, and the KV of the weights before is removed
    from the pool, for whoever uses it."""
    model_id: str = ""
    """Text that stands for the weights in the namespace, if they cannot be read from files."""
    encryption_key_file: Annotated[str, _Within({"min_length": 1})] = option(
        "",
        "FILE",
        "encrypt values with the keys of this file, lines ID:KEY (KEY: base64 of 32 bytes); "
        "the first encrypts, all decrypt (default: $PENSTOCK_ENCRYPTION_KEYS has them, else none)",
    )
    """File of the keys that values are encrypted with. Without it, the environment variable
    PENSTOCK_ENCRYPTION_KEYS may hold the keys. Without either, values are not encrypted. A setting
    that is present but empty is refused, because a variable that nobody filled in must not turn
    encryption off."""
    otlp_endpoint: Annotated[str, _Read(_check_endpoint)] = ""
    """URL of an OpenTelemetry collector that takes OTLP over HTTP, such as http://127.0.0.1:4318.
    It gets a span of each request that looks for blocks. `/v1/traces` is added to a URL without a
    path. By default there are no spans."""

    # The signature that types are checked by is the one that the dataclass makes.
    if not TYPE_CHECKING:

        def __init__(self, pool: Any, **given: Any) -> None:
            from pydantic import ValidationError

            try:
                _reader().validator.validate_python({"pool": pool, **given}, self_instance=self)
            except ValidationError as error:
                raise ConfigError("; ".join(map(_sentence, error.errors()))) from None

    def lanes(self, ranks: int, cores: int | None = None) -> Lanes:
        """The native threads of each rank of an engine that has so many. `cores` are the machine's
        by default. Where a rank has eight cores there is one lane more of each kind than where it
        has fewer. On two cores, more lanes made loads slower; no larger machine has been measured.
        """
        cores = cores or os.cpu_count() or 1
        more = int(cores >= _CORES_FOR_MORE_LANES * ranks)
        return Lanes(
            get=self.get_lanes or 2 + more,
            put=self.put_lanes or 1 + more,
            copy=self.copy_lanes or 1 + more,
        )

    def lookup_limit(self, extra: Mapping[str, Any]) -> LookupLimit:
        """The limit of look-ups, for an engine whose settings are read from `extra`: fixed if the
        operator has set it."""
        is_set = PREFIX + "lookup_timeout" in extra
        return LookupLimit(self.lookup_timeout if is_set else None)

    @classmethod
    def parse(cls, extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Settings:
        """Reads the settings.

        Raises:
            ConfigError: an unknown ``penstock.`` key, a bad value, or no pool.
        """
        values = {
            key[len(PREFIX) :]: value for key, value in extra.items() if key.startswith(PREFIX)
        }
        if not values.get("pool"):
            values["pool"] = environ.get(POOL_VARIABLE, "")
        if not values["pool"]:
            raise ConfigError(
                f"no pool: set {PREFIX}pool in kv_connector_extra_config, or {POOL_VARIABLE}, "
                "to a URL such as file:///var/cache/penstock or valkey://host:6379"
            )
        return cls(**values)

    def policy_for(self, params: Mapping[str, Any] | None) -> str:
        """Load policy of a request with these ``kv_transfer_params``.

        A request may name its own policy as ``penstock.load_policy``. A name that does not exist is
        reported in the log, and the engine's policy applies."""
        wanted = (params or {}).get(PREFIX + "load_policy", self.load_policy)
        if wanted in advisor.POLICIES:
            return str(wanted)
        _warn_of_policy(repr(wanted)[:40])
        return self.load_policy

    def load_deadline(self, num_bytes: int) -> float:
        """Seconds that a load of `num_bytes` may take."""
        return self.load_timeout + num_bytes / self.load_floor

    def open_pool(self, client_name: str) -> Store:
        """The pool, behind a breaker. `client_name` is what a server's list of clients shows.

        Raises:
            ConfigError: the URL is wrong.
            StoreError: the directory cannot be used.
        """
        patience = max(CONNECT_TIMEOUT, self.lookup_timeout)
        store = Store.open(self.pool, client_name=client_name, connect_timeout=patience)
        return store.guarded()


@cache
def _reader() -> TypeAdapter[Settings]:
    from pydantic import TypeAdapter

    return TypeAdapter(Settings)


def tenant_name(params: Mapping[str, Any] | None) -> str:
    """The name of the tenant, for a request with these ``kv_transfer_params``.

    It is the request's ``penstock.tenant``: up to 64 letters, digits, dots, dashes and underscores.
    Anything else counts as no name, and the result is empty."""
    wanted = (params or {}).get(TENANT, "")
    return wanted if isinstance(wanted, str) and TENANT_NAME.fullmatch(wanted) else ""


@lru_cache(maxsize=64)
def _warn_of_policy(wanted: str) -> None:
    # Once for each name, as clients may send it with every request.
    logger.warning(
        "Penstock: a request's %sload_policy is %s; %s are known, the engine's counts",
        PREFIX,
        wanted,
        ", ".join(advisor.POLICIES),
    )


def _sentence(problem: Any) -> str:
    """One of pydantic's findings, as one line."""
    name = problem["loc"][0]
    key, value = PREFIX + name, problem["input"]
    match problem["type"]:
        case "unexpected_keyword_argument":
            known = ", ".join(PREFIX + each.name for each in fields(Settings))
            return f"unknown setting {key!r} of the connector; known: {known}"
        case "value_error":
            return f"{key}: {problem['ctx']['error']}"
        case "string_too_short":
            return f"{key} is empty: name a file, or leave it out"
        case "bool_parsing" | "bool_type":
            return f"{key}: true or false, not {value!r}"
        case "greater_than":
            return f"{key} must be positive, got {value!r}"
    # A pool's URL may hold a password.
    shown = "" if name == "pool" else f", not {value!r}"
    return f"{key}: {problem['msg'].removeprefix('Input ')}{shown}"
