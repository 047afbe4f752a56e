"""The versions of vLLM that Penstock works with, and the differences between them.

A version that differs has a class in a file of its own in this package, which inherits from the
class of the version before. The class also lists the names that Penstock uses in this version.
"""

from __future__ import annotations

import functools
import logging
import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version

from penstock.errors import ConfigError
from penstock.vllm.compat import contract
from penstock.vllm.compat.vllm_0_30 import Vllm030
from penstock.vllm.compat.vllm_0_32 import Vllm032
from penstock.vllm.compat.vllm_0_33 import Vllm033

logger = logging.getLogger("vllm.penstock")

SUPPORTED = ("0.30", "0.31", "0.32", "0.33")
"""Minor versions of vLLM that end-to-end tests run against. There is no CPU build of 0.33: its
Python files run over the compiled ones of 0.32's build (`scripts/vllm-version.sh`)."""


_CLASSES: dict[str, type[Vllm030]] = {
    "0.30": Vllm030,
    "0.32": Vllm032,
    "0.33": Vllm033,
}
"""First minor version that a class is for → the class, oldest first."""


def differences(version: str) -> Vllm030:
    """What differs in a version of vLLM: of the newest class that is not for a later version."""
    first, *_ = _CLASSES.values()
    try:
        asked = Version(version)
    except InvalidVersion:
        # A checkout that was not built has no version. Take it as the newest one.
        asked = Version(str(sys.maxsize))
    newest_first = reversed(_CLASSES.items())
    return next((known for since, known in newest_first if asked >= Version(since)), first)()


@functools.cache
def installed() -> Vllm030:
    """What differs in the vLLM of this environment."""
    import vllm

    return differences(vllm.__version__)


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
    return contract.violations(package, differences(version).USES)


@functools.cache
def _violations(version: str) -> tuple[str, ...]:
    package = contract.installed_package()
    assert package is not None
    return tuple(violations(package, version))
