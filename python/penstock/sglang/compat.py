"""What is used of SGLang beside the interface of its storage backends, and what must hold there."""

from __future__ import annotations

import importlib.util
from array import array
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any

from penstock.errors import ConfigError

SUPPORTED = ("0.5.23",)
"""The versions that the tests run with."""


def version() -> str | None:
    """SGLang's version; None if it is not installed."""
    try:
        return installed_version("sglang")
    except PackageNotFoundError:
        return None


def is_tested() -> bool:
    """Whether the tests run with the installed version."""
    return version() in SUPPORTED


def violations() -> list[str]:
    """What Penstock needs of SGLang and does not find there. Imports SGLang.

    Each is a sentence.
    """
    if importlib.util.find_spec("sglang") is None:
        return ["SGLang is not installed: install it beside Penstock"]
    found = [
        problem
        for module, name in (
            ("sglang.srt.mem_cache.hicache_storage", "HiCacheStorage"),
            ("sglang.srt.mem_cache.hicache_storage", "PoolTransferResult"),
            ("sglang.srt.mem_cache.storage", "StorageBackendFactory"),
            ("sglang.srt.observability.metrics_collector", "StorageMetrics"),
            ("sglang.srt.runtime_context", "get_context"),
        )
        if (problem := _missing(module, name))
    ]
    if not hashes_tell_callers_apart():
        found.append(
            "this SGLang names pages by their tokens alone: prompts with different salts or LoRA "
            "adapters would share pages. Use SGLang 0.5.23 or newer"
        )
    return found


def _missing(module: str, name: str) -> str:
    try:
        loaded = importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        return f"{module} cannot be imported: {error}"
    return "" if hasattr(loaded, name) else f"{module} has no {name}"


def hashes_tell_callers_apart() -> bool:
    """Whether the seed of SGLang's page hashes holds a request's `extra_key`, in which its LoRA
    adapter is, and its `cache_salt`."""
    try:
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.utils import storage_namespace_seed
    except ImportError:
        return False
    plain = RadixKey(array("q", [1]))
    seeds = {
        storage_namespace_seed(plain.extra_key, plain.cache_salt),
        storage_namespace_seed("adapter", None),
        storage_namespace_seed(None, "salt"),
    }
    return len(seeds) == 3


def published(name: str) -> Any:
    """A value of SGLang's resolved configuration, as this process has it; None if SGLang has not
    published one here, or has no such option."""
    from sglang.srt.runtime_context import get_context

    try:
        return get_context().config_leaf(name)
    except (ValueError, AttributeError):
        return None


def check() -> None:
    """Refuses a SGLang that lacks what Penstock needs.

    Raises:
        ConfigError: with all that is missing.
    """
    if wrong := violations():
        raise ConfigError(f"SGLang {version()} cannot be served: {'; '.join(wrong)}")
