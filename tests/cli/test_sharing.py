"""`penstock doctor` says by which facts engines of one model are kept apart."""

from __future__ import annotations

from typing import Any

import pytest

from penstock._native import Store
from penstock.cli import sharing
from penstock.cli.findings import Finding
from penstock.pool.namespace import namespace_digest, publish_namespace

WINDOW, ALL = {"kind": "sliding_window", "window": 4}, {"kind": "full_attention", "window": None}
FACTS: dict[str, Any] = {"model": "m", "group": ALL, "weights": "a", "options": {"x.y": 1}}


@pytest.fixture
def store() -> Store:
    return Store.open("memory://?size=4MiB")


def found(store: Store, *descriptions: dict[str, Any]) -> list[Finding]:
    for each in descriptions:
        publish_namespace(store, namespace_digest(each), each)
    return list(sharing.of_namespaces(store, 5.0))


def test_an_empty_pool_says_nothing(store: Store) -> None:
    assert found(store) == []


def test_groups_and_tenants_of_one_engine_are_no_split(store: Store) -> None:
    [finding] = found(
        store, FACTS, FACTS | {"group": WINDOW}, FACTS | {"tenant": "red"}, FACTS | {"model": "n"}
    )
    assert (finding.level, finding.message) == (
        "ok",
        "2 models: all engines of a model share its blocks",
    )


def test_facts_that_keep_engines_apart_are_named(store: Store) -> None:
    other = FACTS | {"weights": "b", "options": {"x.y": 2, "x.z": 3}}
    [finding] = found(store, FACTS, other, FACTS | {"group": WINDOW})
    assert finding.level == "note"
    assert finding.message.endswith("they differ in options.x.y, options.x.z, weights")
    digests = sorted(namespace_digest(each).hex()[:8] for each in (FACTS, other))
    assert all(digest in finding.advice for digest in digests)


def test_a_long_list_is_cut(store: Store) -> None:
    options = {f"x.{n}": n for n in range(9)}
    [finding] = found(store, FACTS | {"options": {}}, FACTS | {"options": options})
    assert finding.message.endswith(", options.x.4 and 4 others")


def test_a_model_that_lies_in_several_places_is_one_model(store: Store) -> None:
    here = FACTS | {"config": "c"}
    there = here | {"model": "/elsewhere", "options": {"x.y": 2}}
    [finding] = found(store, here, there)
    assert finding.level == "note"
    assert finding.message.endswith("they differ in options.x.y")
    # Of one configuration there are many models.
    [finding] = found(store, there | {"model": "other", "weights": "b"})
    assert "2 namespaces" in finding.message


def test_models_that_a_third_name_joins_are_one_model(store: Store) -> None:
    one = FACTS | {"config": "c"}
    two = FACTS | {"config": "d", "model": "n", "weights": "b"}
    both = two | {"model": "m", "options": {}}
    [finding] = found(store, one, two, both)
    assert "3 namespaces" in finding.message
