"""Roles: which engine stores, and which loads (`kv_role` in vLLM's `--kv-transfer-config`)."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ConfigError


@dataclass(frozen=True)
class Role:
    """What an engine does with the pool."""

    loads: bool
    stores: bool
    expects: bool
    """Whether another engine computes every prompt first, so that its blocks are on their way."""


BOTH = "both"
"""The role of an engine that stores and loads, without vLLM's `kv_`."""

ROLES = {
    f"kv_{BOTH}": Role(loads=True, stores=True, expects=False),
    "kv_producer": Role(loads=False, stores=True, expects=False),
    "kv_consumer": Role(loads=True, stores=False, expects=True),
}
"""The roles, by vLLM's names for them."""


def role_named(name: str | None, *, consumer_stores: bool = False) -> Role:
    """The role of an engine. `consumer_stores` has a consumer store too.

    >>> role_named("kv_consumer").stores
    False

    Raises:
        ConfigError: there is no such role.
    """
    role = ROLES.get(name or "")
    if role is None:
        known = ", ".join(ROLES)
        raise ConfigError(f"kv_role is {name!r}: set one of {known} in --kv-transfer-config")
    if role.expects and consumer_stores:
        return Role(role.loads, True, role.expects)
    return role
