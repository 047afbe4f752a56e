"""The connector's settings, from ``kv_connector_extra_config`` and the environment."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from penstock._native import parse_size
from penstock.errors import ConfigError
from penstock.layout.geometry import RANK, parse_geometry
from penstock.layout.negotiate import AUTO, LAYOUTS
from penstock.vllm.advisor import AUTO as AUTO_LOADS
from penstock.vllm.advisor import POLICIES

logger = logging.getLogger("vllm.penstock")

PREFIX = "penstock."
"""Every setting is a key ``penstock.<name>`` of vLLM's ``kv_connector_extra_config``."""

POOL_VARIABLE = "PENSTOCK_POOL"
"""Environment variable that names the pool when the settings do not: a URL with a password
stays out of command lines this way."""


@dataclass(frozen=True)
class Settings:
    """What can be set, with the defaults."""

    pool: str
    host_bytes: int = 0
    """Host memory for blocks on their way and for those that stay there, the host tier; for all
    ranks of the engine together. 0, which cannot be asked for: as much as two of the engine's steps
    may store, and 1 GiB at least."""
    host_tier: bool = True
    """Whether blocks stay in host memory until the room is needed."""
    load_policy: str = AUTO_LOADS
    """Whether to load what can be loaded: `auto`, where it is expected to be faster than
    recomputing; `always`; or `never`."""
    lookup_timeout: float = 0.25
    """Seconds after which a look-up counts as a miss."""
    load_timeout: float = 0.5
    """Seconds a load may take at least; `load_floor` adds to it by size."""
    load_floor: int = 64 << 20
    """Bytes per second below which a load is given up."""
    drain_timeout: float = 5.0
    """Seconds that shutdown waits for stores to reach the pool."""
    get_lanes: int = 2
    """Native threads that get values from the pool, per rank."""
    put_lanes: int = 1
    """Native threads that put values into the pool, per rank, at low priority."""
    copy_lanes: int = 1
    """Native threads that copy between KV memory and host memory, per rank."""
    pool_geometry: str = RANK
    """What one object holds: `rank`, all that a rank has of a block; `portable`, pieces that
    engines of other pipeline and tensor-parallel degrees find too; or layers x heads, like 4x2."""
    kv_layout: str = AUTO
    """Layout of the engine's KV cache: `auto` for all layers of a block side by side where spec
    and attention backend allow it, or a layout's name, refused where it cannot be had."""
    salt: str = ""
    """Goes into the namespace: engines with another salt share nothing with this one."""
    model_id: str = ""
    """Stands for the weights in the namespace where they cannot be read from files."""
    encryption_key_file: str = ""
    """File of the keys that values are encrypted with; without it the environment variable
    PENSTOCK_ENCRYPTION_KEYS may hold them. Without either, values are not encrypted."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Settings:
        """Reads the settings.

        Raises:
            ConfigError: an unknown ``penstock.`` key, a bad value, or no pool.
        """
        kinds = {f.name: f.type for f in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in extra.items():
            if not key.startswith(PREFIX):
                continue
            name = key[len(PREFIX) :]
            if name not in kinds:
                known = ", ".join(PREFIX + n for n in kinds)
                raise ConfigError(f"unknown setting {key!r} of the connector; known: {known}")
            values[name] = _convert(key, value, str(kinds[name]))
        if values.get("kv_layout", AUTO) not in (AUTO, *LAYOUTS):
            raise ConfigError(
                f"{PREFIX}kv_layout: {AUTO}, or one of {', '.join(LAYOUTS)}; not "
                f"{values['kv_layout']!r}"
            )
        if values.get("load_policy", AUTO_LOADS) not in POLICIES:
            raise ConfigError(
                f"{PREFIX}load_policy: {', '.join(POLICIES)}; not {values['load_policy']!r}"
            )
        # Zero is a multiple of everything: only the text is checked here, no model is known.
        parse_geometry(values.get("pool_geometry", RANK), layers=0, heads=0)
        if values.get("encryption_key_file") == "":
            # A variable that nobody filled in must not turn encryption off.
            raise ConfigError(f"{PREFIX}encryption_key_file is empty: name a file, or leave it out")
        if not values.get("pool"):
            values["pool"] = environ.get(POOL_VARIABLE, "")
        if not values["pool"]:
            raise ConfigError(
                f"no pool: set {PREFIX}pool in kv_connector_extra_config, or {POOL_VARIABLE}, "
                "to a URL such as file:///var/cache/penstock or valkey://host:6379"
            )
        return cls(**values)

    def policy_for(self, params: Mapping[str, Any] | None) -> str:
        """Load policy of a request with these ``kv_transfer_params``, where it may name its own as
        ``penstock.load_policy``. One that there is not is said in the log, and counts as none."""
        wanted = (params or {}).get(PREFIX + "load_policy", self.load_policy)
        if wanted in POLICIES:
            return str(wanted)
        _warn_of_policy(repr(wanted)[:40])
        return self.load_policy

    def load_deadline(self, num_bytes: int) -> float:
        """Seconds that a load of this size may take."""
        return self.load_timeout + num_bytes / self.load_floor


@lru_cache(maxsize=64)
def _warn_of_policy(wanted: str) -> None:
    # Once each: clients may say it with every request.
    logger.warning(
        "Penstock: a request's %sload_policy is %s; %s are known, the engine's counts",
        PREFIX,
        wanted,
        ", ".join(POLICIES),
    )


_BOOLS = {"true": True, "false": False}


def _convert(key: str, value: Any, kind: str) -> Any:
    try:
        if kind == "str":
            return str(value)
        if kind == "bool":
            return _BOOLS[str(value).lower()]
        if kind == "float":
            number = float(value)
        elif isinstance(value, str):
            number = parse_size(value)
        else:
            number = int(value)
    except KeyError:
        raise ConfigError(f"{key}: true or false, not {value!r}") from None
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    if number <= 0:
        raise ConfigError(f"{key} must be positive, got {value!r}")
    return number
