"""Tenants, without vLLM: whose namespaces the scheduler half uses, and what it says of them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lab.waiting import LIMIT, eventually
from penstock._native import Store, tenant_namespace
from penstock.cli import words
from penstock.errors import ConfigError
from penstock.pool import read_namespace
from penstock.vllm import descriptions
from penstock.vllm.descriptions import Descriptions
from penstock.vllm.messages import BlockJob
from tests.connector.engine import Asked, PlainEngine
from tests.connector.test_scheduler import COARSE, FULL, PROMPT, computed

RED, BLUE = {"penstock.tenant": "red"}, {"penstock.tenant": "blue"}


def tenants_of(jobs: list[BlockJob]) -> list[tuple[str, bytes]]:
    return [(job.tenant, job.salt) for job in jobs]


def load_all(engine: PlainEngine, request: Asked) -> list[BlockJob]:
    """Takes the whole offer; the load's job."""
    engine.load(request, 0, 20)
    return engine.step({}).loads


def test_a_tenants_blocks_are_looked_for_and_loaded_from_its_own_namespaces() -> None:
    engine = PlainEngine([FULL, COARSE])
    engine.put_prompt(PROMPT, (0, 1), tenant="red")
    # A name without a salt owns nothing, and a salt without a name neither.
    for name, params, salt in (
        ("blue", BLUE, b"salt"),
        ("label", RED, b""),
        ("salt", None, b"salt"),
        ("not a name", {"penstock.tenant": "not a name"}, b"salt"),
        ("nobody", None, b""),
    ):
        assert engine.match(engine.ask(name, PROMPT, params, salt=salt)) == 0, name
    red = engine.ask("red", PROMPT, RED, salt=b"salt")
    assert engine.match(red) == 16
    engine.load(red, 0, 16)
    assert tenants_of(engine.step({}).loads) == [("red", b"salt")]
    engine.settle()


def test_what_everybody_shares_stays_where_it_was() -> None:
    engine = PlainEngine([FULL])
    engine.put_prompt(PROMPT)
    label = engine.ask("label", PROMPT, RED)
    assert engine.match(label) == 20
    assert tenants_of(load_all(engine, label)) == [("", b"")]
    engine.settle()
    assert engine.match(engine.ask("red", PROMPT, RED, salt=b"salt")) == 0


def test_stores_and_prefetches_have_their_tenant() -> None:
    engine = PlainEngine([FULL])
    red = engine.ask("red", PROMPT, RED, salt=b"salt")
    assert engine.match(red) == 0
    assert tenants_of(computed(engine, red)) == [("red", b"salt")]
    engine.settle()
    waiting = engine.ask("waiting", PROMPT, RED, salt=b"salt")
    prefetches = eventually(lambda: engine.step({}).prefetches)
    assert tenants_of(prefetches) == [("red", b"salt")]
    engine.settle()
    assert engine.match(waiting) == 20


def host_change(tenant: str, chunk: bytes) -> bytes:
    """A block of group 0 that came into host memory, as an engine would say it."""
    # A tenant's namespace ends with the bytes that stand for the tenant.
    return b"\0\0\3" + tenant_namespace(bytes(16), tenant)[-5:] + chunk


def test_with_one_salt_and_two_names_each_finds_what_is_its_own() -> None:
    engine = PlainEngine([FULL])
    # The hashes are the same. Nothing that is known of the one says anything about the other.
    for name, params in (("red", RED), ("blue", BLUE)):
        request = engine.ask(name, PROMPT, params, salt=b"salt")
        assert engine.match(request) == 0
        [store] = computed(engine, request)
        assert (store.tenant, len(store.blocks)) == (name, 5)
    engine.settle()
    for name, params in (("red", RED), ("blue", BLUE)):
        again = engine.ask(f"again {name}", PROMPT, params, salt=b"salt")
        assert engine.match(again) == 20
        assert tenants_of(load_all(engine, again)) == [(name, b"salt")]
        engine.settle()
    assert engine.match(engine.ask("everybody", PROMPT)) == 0


def test_what_host_memory_holds_for_one_name_is_not_promised_to_another() -> None:
    engine = PlainEngine([FULL])
    red = engine.ask("red", PROMPT, RED, salt=b"salt")
    assert engine.match(red) == 0
    computed(engine, red)
    engine.settle()
    for chunk in engine.names(red, 0)[:5]:
        engine.half._catalogue.change_host(host_change("red", chunk))
    assert engine.match(engine.ask("blue", PROMPT, BLUE, salt=b"salt")) == 0
    assert engine.match(engine.ask("everybody", PROMPT)) == 0
    again = engine.ask("again", PROMPT, RED, salt=b"salt")
    assert engine.match(again) == 20
    assert engine.half._catalogue.reaches("again", 0, 20)[0].host_bytes > 0


def described(store: Store, namespace: bytes) -> dict[str, Any]:
    """The namespace's description, once it is there."""
    return eventually(lambda: read_namespace(store, namespace))


def test_a_tenants_namespaces_are_described_with_its_name() -> None:
    engine = PlainEngine([FULL])
    store, [shared] = engine.half._store, engine.agreement.namespaces
    for name, params, salt in (("everybody", RED, b""), ("red", RED, b"salt")):
        request = engine.ask(name, PROMPT, params, salt=salt)
        assert engine.match(request) == 0
        computed(engine, request)
        engine.settle()
    common = described(store, shared)
    assert "tenant" not in common
    own = described(store, tenant_namespace(shared, "red"))
    # Through it, a look-up service that knows the tenant only finds the model's own namespaces.
    assert own["lookup"]["namespaces"] == [shared.hex()]
    assert own == common | {"tenant": "red"}
    assert words.description(own) == words.description(common) + ", tenant red"


@pytest.fixture
def store() -> Store:
    return Store.open("memory://?size=1MiB")


def name_of(tenant: str) -> bytes:
    return tenant.encode().ljust(16, b"-")


def test_only_so_many_tenants_are_described(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    monkeypatch.setattr(descriptions, "MOST_TENANTS", 2)
    published = Descriptions(store, lambda tenant: [(name_of(tenant), {"tenant": tenant})])
    for tenant in ("red", "blue", "green", "red", ""):
        published.publish(tenant)
    # The engine's own are described whoever came before, and come last here.
    assert described(store, name_of("")) == {"tenant": ""}
    assert read_namespace(store, name_of("red")) == {"tenant": "red"}
    assert read_namespace(store, name_of("blue")) == {"tenant": "blue"}
    assert read_namespace(store, name_of("green")) is None


def test_describing_makes_nobody_wait_and_takes_one_thread(store: Store) -> None:
    may_go, asked = threading.Event(), list[str]()

    def describe(tenant: str) -> list[tuple[bytes, dict[str, str]]]:
        asked.append(tenant)
        assert may_go.wait(LIMIT)
        return [(name_of(tenant), {"tenant": tenant})]

    published = Descriptions(store, describe)
    for number in range(50):
        published.publish(f"tenant-{number % 25}")
    threads = [thread for thread in threading.enumerate() if thread.name == "penstock-publish"]
    assert len(threads) == 1
    may_go.set()
    threads[0].join(LIMIT)
    assert asked == [f"tenant-{number}" for number in range(25)]
    # The next one begins a new thread.
    published.publish("late")
    assert described(store, name_of("late")) == {"tenant": "late"}


def test_a_namespace_of_a_tenant_needs_a_name() -> None:
    assert tenant_namespace(bytes(16), "red") != tenant_namespace(bytes(16), "blue")
    for name in ("", "not a name", "x" * 65):
        with pytest.raises(ConfigError, match="a tenant's name has 1 to 64 letters"):
            tenant_namespace(bytes(16), name)
