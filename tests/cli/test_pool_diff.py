"""`penstock pool diff` on pools with namespaces that engines describe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.waiting import LIMIT
from penstock._native import Store, tenant_namespace
from penstock.cli.main import main
from penstock.pool.namespace import (
    DESCRIPTIONS,
    namespace_digest,
    object_key,
    publish_namespace,
)

FACTS: dict[str, Any] = {"model": "m", "weights": "a", "options": {"x.y": 1}}
OTHER = FACTS | {"model": "elsewhere", "weights": "b"}
ENGINES, OTHERS = namespace_digest(FACTS), namespace_digest(OTHER)
TENANTS = tenant_namespace(ENGINES, "red")


@pytest.fixture
def pool(tmp_path: Path) -> str:
    url = f"file://{tmp_path}/pool?size=64MiB"
    store = Store.open(url)
    for namespace, facts in (
        (ENGINES, FACTS),
        (OTHERS, OTHER),
        (TENANTS, FACTS | {"tenant": "red"}),
    ):
        publish_namespace(store, namespace, facts)
        store.put(object_key(namespace, bytes(32)), b"value", timeout=LIMIT)
    return url


def diff(pool: str, one: bytes, other: bytes, *more: str) -> int:
    return main(["pool", "diff", one.hex(), other.hex(), pool, *more])


def test_facts_that_differ_are_shown_and_names_for_people_are_none(
    pool: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff(pool, ENGINES, OTHERS, "--json") == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row == {"fact": "weights", ENGINES.hex(): "a", OTHERS.hex(): "b"}


def test_a_tenants_namespace_differs_by_the_tenant_and_is_headed_by_all_of_its_name(
    pool: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff(pool, ENGINES, TENANTS) == 0
    head, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["fact", ENGINES.hex(), TENANTS.hex()]
    assert row == ["tenant", "-", "red"]


def test_the_same_differs_in_nothing(pool: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(pool, ENGINES, ENGINES) == 1
    assert "no fact" in capsys.readouterr().out


def test_descriptions_are_no_engines_namespace(
    pool: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff(pool, ENGINES, DESCRIPTIONS) == 2
    assert "no engine's blocks" in capsys.readouterr().err
