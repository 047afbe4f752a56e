"""The settings, from SGLang's ``--hicache-storage-backend-extra-config`` and the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.dataclasses import dataclass

from penstock._native import parse_size
from penstock.errors import ConfigError
from penstock.pool import POOL_VARIABLE

SGLANG_KEYS = frozenset(
    {
        "allocator",
        "backend_name",
        "class_name",
        "file_storage_path",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)
"""Keys of the same dictionary that are SGLang's."""


def _read_size(value: Any) -> Any:
    return parse_size(value) if isinstance(value, str) else value


_Count = Annotated[int, BeforeValidator(_read_size), Field(gt=0)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", coerce_numbers_to_str=True))
class Settings:
    """All settings, with their defaults."""

    # A URL may hold a password.
    pool: str = field(repr=False)
    """URL of the pool; or several as tiers, the nearest first, with spaces between. Without it, the
    environment variable PENSTOCK_POOL has it."""
    lookup_timeout: _Seconds = 0.25
    """Seconds after which a look-up ends. Pages not found by then are misses. Making a connection
    may take as long, but at least a second."""
    load_timeout: _Seconds = 0.5
    """Seconds that a piece of a load (64 MiB) may take; `transfer_floor` adds to it by size."""
    store_timeout: _Seconds = 5.0
    """Seconds that a piece of a store may take, see `load_timeout`: no request waits for stores."""
    transfer_floor: _Count = 64 << 20
    """Bytes per second below which a load or a store is given up."""
    model_path: str = ""
    """Folder of the weights, or their name on the Hugging Face hub. Empty: what SGLang serves."""
    model_id: str = ""
    """Text that stands for the weights in the namespace, if they cannot be read from files."""
    kv_dtype: str = ""
    """Name of the KV's type. Only needed where SGLang stores KV as plain bytes and does not tell
    their type. Refused if SGLang tells another."""
    salt: str = ""
    """Text that goes into the namespace. Engines with different salts share nothing."""
    encryption_key_file: Annotated[str, StringConstraints(min_length=1)] = ""
    """File of the keys that values are encrypted with. Without it, the environment variable
    PENSTOCK_ENCRYPTION_KEYS may hold the keys. Without either, values are not encrypted. A setting
    that is present but empty is refused."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Settings:
        """Reads the settings.

        Raises:
            ConfigError: an unknown key, a bad value, or no pool.
        """
        values = {key: value for key, value in extra.items() if key not in SGLANG_KEYS}
        values["pool"] = values.get("pool") or environ.get(POOL_VARIABLE, "")
        if not values["pool"]:
            raise ConfigError(
                'no pool: set "pool" in --hicache-storage-backend-extra-config, or '
                f"{POOL_VARIABLE}, to a URL such as file:///var/cache/penstock or "
                "valkey://host:6379"
            )
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(map(_sentence, error.errors()))) from None

    def load_deadline(self, nbytes: int) -> float:
        """Seconds that a load of `nbytes` may take."""
        return self.load_timeout + nbytes / self.transfer_floor

    def store_deadline(self, nbytes: int) -> float:
        """Seconds that a store of `nbytes` may take."""
        return self.store_timeout + nbytes / self.transfer_floor


def _sentence(problem: Any) -> str:
    """One of pydantic's findings, as one line."""
    name = problem["loc"][0]
    if problem["type"] == "unexpected_keyword_argument":
        known = ", ".join(Settings.__dataclass_fields__)
        return f"unknown key {name!r} in --hicache-storage-backend-extra-config; known: {known}"
    # A pool's URL may hold a password.
    shown = "" if name == "pool" else f", not {problem['input']!r}"
    return f"{name}: {problem['msg'].removeprefix('Input ')}{shown}"
