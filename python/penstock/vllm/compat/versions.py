"""Which versions of vLLM Penstock works with."""

from __future__ import annotations

from penstock.errors import ConfigError

SUPPORTED = ("0.32",)
"""Minor versions of vLLM that the end-to-end tests run against."""


def check_version() -> None:
    """Refuses a vLLM that Penstock was not built for.

    Raises:
        ConfigError: with the versions that are.
    """
    import vllm
    from packaging.version import Version

    version = Version(vllm.__version__)
    if f"{version.major}.{version.minor}" not in SUPPORTED:
        raise ConfigError(
            f"this Penstock works with vLLM {', '.join(SUPPORTED)}, found {vllm.__version__}; "
            "install one of these, or a Penstock that knows this vLLM"
        )
