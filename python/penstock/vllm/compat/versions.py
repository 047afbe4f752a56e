"""The versions of vLLM that Penstock works with, and the differences between them.

A version that differs has its own file in this package. That file also lists the names that
Penstock uses in this version.
"""

from __future__ import annotations

import functools
import logging
import sys
from pathlib import Path
from typing import Any, Protocol, cast

from packaging.version import InvalidVersion, Version

from penstock.errors import ConfigError
from penstock.vllm.compat import contract, vllm_0_29, vllm_0_30, vllm_0_32, vllm_0_33
from penstock.vllm.compat.planning import Planning
from penstock.vllm.compat.uses import Use

logger = logging.getLogger("vllm.penstock")

SUPPORTED = ("0.29", "0.30", "0.31", "0.32")
"""Minor versions of vLLM that the end-to-end tests run against."""


class Differences(Protocol):
    """The functions and values in a version's file."""

    USES: tuple[Use, ...]
    UNASKED: tuple[str, ...]
    """Methods of the connector that this version does not call."""
    PLANNING: Planning
    CARRIES_DRAFTS: bool
    """Whether the layers of drafters were tried with this version."""

    def hash_block_size(self, vllm_config: Any, kv_cache_config: Any) -> int | None:
        """Tokens of the blocks that hashes are computed over; None for the only group's block
        size."""

    def prefix_cacheable_groups(self, kv_cache_config: Any) -> tuple[int, ...]:
        """Numbers of the KV-cache groups that vLLM finds by prefix."""

    def has_layer_views(self, spec: Any) -> bool:
        """Whether vLLM makes a view of the KV cache for each layer of this kind."""

    def adapt_scheduler(self) -> None:
        """Makes vLLM's scheduler in this process do what other versions do by themselves."""


_FILES: dict[str, Differences] = {
    "0.29": cast("Differences", vllm_0_29),
    "0.30": cast("Differences", vllm_0_30),
    "0.32": cast("Differences", vllm_0_32),
    "0.33": cast("Differences", vllm_0_33),
}
"""First minor version that a file is for → the file, oldest first."""


def differences(version: str) -> Differences:
    """The file for a version of vLLM: the newest file that is not for a later version."""
    first, *_ = _FILES.values()
    try:
        asked = Version(version)
    except InvalidVersion:
        # A checkout that was not built has no version. Take it as the newest one.
        asked = Version(str(sys.maxsize))
    return next(
        (file for since, file in reversed(_FILES.items()) if asked >= Version(since)), first
    )


@functools.cache
def installed() -> Differences:
    """The file for the vLLM of this environment."""
    import vllm

    return differences(vllm.__version__)


def adapt_scheduler() -> None:
    """Makes vLLM's scheduler in this process do what the connector needs, if this version does not
    do it by itself."""
    installed().adapt_scheduler()


def check_version() -> None:
    """Refuses a vLLM that Penstock does not know. A newer version that has everything Penstock
    needs is only logged.

    Raises:
        ConfigError: the message has the known versions, or the differences of a newer version.
    """
    import vllm

    version = Version(vllm.__version__)
    minor = f"{version.major}.{version.minor}"
    if minor in SUPPORTED:
        return
    known = f"this Penstock is tested with vLLM {', '.join(SUPPORTED)}, found {vllm.__version__}"
    if Version(minor) < Version(SUPPORTED[-1]):
        raise ConfigError(f"{known}; install one of these, or a Penstock that knows this vLLM")
    if wrong := _violations(vllm.__version__):
        raise ConfigError(
            f"{known}, which differs in what Penstock uses: {'; '.join(wrong)}. Install one of "
            "these, or a Penstock that knows this vLLM"
        )
    logger.warning("Penstock: %s, which has all that Penstock uses, but was not tried", known)


def violations(package: Path, version: str) -> list[str]:
    """All points in which the vLLM in this package folder, of this version, is not as Penstock
    needs it."""
    file = differences(version)
    return contract.violations(package, file.USES, file.UNASKED)


@functools.cache
def _violations(version: str) -> tuple[str, ...]:
    package = contract.installed_package()
    assert package is not None
    return tuple(violations(package, version))
