"""Which engines of a pool share nothing though they serve the same model, and by which facts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from penstock._native import Store
from penstock.cli.findings import Finding
from penstock.cli.pool_diff import differences, flat
from penstock.errors import StoreError
from penstock.pool.namespace import DESCRIPTIONS, DIGEST_BYTES, model_of, read_namespace

_MOST = 256
"""Descriptions that are looked at."""
_NAMED = 6
"""Facts that are named."""


def of_namespaces(store: Store, timeout: float) -> Iterator[Finding]:
    """A finding for each model of which engines use several namespaces, and one if there are none
    such."""
    try:
        described = dict(_descriptions(store, timeout))
    except StoreError as error:
        yield Finding("sharing", "note", f"what engines use could not be read: {error}")
        return
    is_split = False
    for of_one in _by_model(described):
        if len(of_one) < 2:
            continue
        is_split = True
        facts = [dict(flat(description)) for _, description in of_one]
        pairs = itertools.pairwise(facts)
        names = sorted({name for pair in pairs for name, _, _ in differences(*pair)})
        rest = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
        one, other = (digest.hex()[:8] for digest, _ in of_one[:2])
        yield Finding(
            "sharing",
            "note",
            f"{of_one[0][1]['model']}: {len(of_one)} namespaces, which share no block; they differ "
            f"in {', '.join(names[:_NAMED])}{rest}",
            f"`penstock pool diff {one} {other}` shows how; "
            "`pool purge --namespace NS` removes one that no engine uses any more",
        )
    if described and not is_split:
        count = len({description["model"] for description in described.values()})
        models = "1 model" if count == 1 else f"{count} models"
        yield Finding("sharing", "ok", f"{models}: all engines of a model share its blocks")


def _by_model(
    described: Mapping[bytes, dict[str, Any]],
) -> list[list[tuple[bytes, dict[str, Any]]]]:
    """The namespaces of each model, alike in all that sets namespaces of one engine apart. A model
    is known by its name, and by its configuration and weights, as it may lie in several places."""
    found: list[tuple[set[str], list[tuple[bytes, dict[str, Any]]]]] = []
    for digest, description in described.items():
        # A hybrid model's groups have a namespace each; a tenant's blocks are kept apart.
        group = description.get("group"), description.get("tenant"), "draft" in description
        signs, own = {repr((description["model"], *group))}, [(digest, description)]
        if "config" in description and "weights" in description:
            signs.add(repr((description["config"], description["weights"], *group)))
        for known in [each for each in found if each[0] & signs]:
            found.remove(known)
            signs, own = signs | known[0], known[1] + own
        found.append((signs, own))
    return [own for _, own in found]


def _descriptions(store: Store, timeout: float) -> Iterator[tuple[bytes, dict[str, Any]]]:
    for key, _ in store.list(DESCRIPTIONS, timeout=timeout)[:_MOST]:
        digest = key[DIGEST_BYTES : 2 * DIGEST_BYTES]
        description = read_namespace(store, digest, timeout=timeout)
        if description is not None and model_of(description) is not None:
            yield digest, description
