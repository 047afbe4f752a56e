"""Quotas as `penstock pool stats` shows them, from the store's own report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from penstock.cli import words
from penstock.pool import NamespaceUsage

_FACT = re.compile(r"(?:tier(\d+):)?quota_bytes:(.*)")
_OF_EACH = "tenant/*/"


@dataclass(frozen=True)
class Account:
    """What one account may have and has, in bytes as the store charges them."""

    account: str
    """The account as pool URLs name it: ``tenant/NAME`` or ``namespace/HEX``. ``tenant/*`` is the
    quota of each tenant without one of its own; ``tenant/*/DIGEST`` is such a tenant."""
    tenant: str | None
    """The tenant's name, as far as it is known."""
    quota_bytes: int
    used_bytes: int | None
    """Bytes that the account has; None if they are not counted yet, and for ``tenant/*``."""
    tier: int | None
    """The tier's number, the nearest is 1; None in a pool without tiers."""


def accounts(facts: Mapping[str, str], used: Sequence[NamespaceUsage]) -> list[Account]:
    """The accounts that a store's report names. The names of tenants without a quota of their own
    come from the descriptions of namespaces."""
    names = {
        one.digest.hex()[-10:]: str(one.description["tenant"])
        for one in used
        if one.description is not None and "tenant" in one.description
    }
    found = []
    for name, quota in facts.items():
        match = _FACT.fullmatch(name)
        if match is None:
            continue
        tier, account = match.groups()
        if account.startswith(_OF_EACH):
            tenant = names.get(account.removeprefix(_OF_EACH))
        else:
            named = account.removeprefix("tenant/")
            tenant = None if named in (account, "*") else named
        found.append(
            Account(
                account,
                tenant,
                int(quota),
                words.number(facts, name.replace("quota_bytes:", "quota_used_bytes:", 1)),
                None if tier is None else int(tier),
            )
        )
    return found


def table(found: Sequence[Account]) -> Table:
    """The accounts for people."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    with_tiers = any(one.tier is not None for one in found)
    if with_tiers:
        table.add_column("tier")
    table.add_column("account", no_wrap=True)
    table.add_column("used", justify="right")
    table.add_column("quota", justify="right")
    for one in found:
        name = one.account
        if name.startswith(_OF_EACH) and one.tenant is not None:
            name = f"tenant/{one.tenant} (*)"
        if one.used_bytes is not None:
            has = words.size(one.used_bytes)
        else:
            has = "each" if name == "tenant/*" else "not counted"
        tier = [str(one.tier or "")] if with_tiers else []
        table.add_row(*tier, words.text(name), has, words.size(one.quota_bytes))
    return table
