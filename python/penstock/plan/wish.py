"""The operator's wishes for KV memory, as vLLM's ``additional_config`` carries them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError

PROPORTIONAL = "penstock.enable_pp_prop_kv_cache"
TOKENS = "penstock.kv_cache_tokens"
"""Keys of vLLM's ``additional_config``, which reaches every process of the engine."""


@dataclass(frozen=True)
class Wish:
    """The operator's wishes: a proportional split, a number of tokens, or both."""

    proportional: bool = False
    tokens: int | None = None

    @classmethod
    def parse(cls, additional: Mapping[str, Any]) -> Wish:
        """Reads vLLM's ``additional_config``.

        Raises:
            ConfigError: a value is of the wrong kind.
        """
        proportional = additional.get(PROPORTIONAL, False)
        tokens = additional.get(TOKENS)
        if not isinstance(proportional, bool):
            raise ConfigError(f"{PROPORTIONAL} is true or false, not {proportional!r}")
        if tokens is not None and (
            isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1
        ):
            raise ConfigError(f"{TOKENS} is a positive number of tokens, not {tokens!r}")
        return cls(proportional, tokens)

    def __bool__(self) -> bool:
        return self.proportional or self.tokens is not None
