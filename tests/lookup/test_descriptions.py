"""Descriptions that no engine wrote: refused by name, while all else is served."""

from __future__ import annotations

import contextlib
import json
import logging
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.pretended import BLOCK, OPTIONS, Engine, hashes
from lab.waiting import eventually
from penstock._native import Store
from penstock.errors import ConfigError
from penstock.lookup import Refused, Service
from penstock.lookup.adapters import Adapters
from penstock.lookup.http import Application
from penstock.lookup.models import models_of
from penstock.lookup.service import REFRESHER, Settings
from penstock.lookup.tokenizing import Tokenizers
from penstock.pool.namespace import (
    DESCRIPTIONS,
    Unreadable,
    canonical_json,
    description_of,
    object_key,
)

PROMPT = list(range(20 * BLOCK + 1))

NUMBERS: list[Any] = [0, -1, 3, 2**31, 2**32, 2**63, 2**64, 2**70, 1.5, 1e300]
OTHERS: list[Any] = ["", "16", "zz", "x" * 30_000, None, True, [], [1], {}, {"a": 1}, [[]]]
LISTS: list[Any] = [["00"], ["00" * 16] * 500, ["zz" * 16], [None], ["x"] * 5000, ["x" * 30_000]]
SPANS: list[Any] = [
    *([[0, 0, 0, 0]], [[1, 0, 0, 1]], [[0, 65536, 0, 1]], [[-1, 1, 0, 1]], [[0, 2**70, 0, 1]]),
    *([[0, 1, 0]], [[0, 1, 0, 1]] * 3000, [["0", "1", "0", "1"]], [[0, 1, 0, 1.5]]),
]
GOOD = Engine(Store.open("memory://?size=1MiB"), "good")
BAD = Engine(Store.open("memory://?size=1MiB"), "bad")
PATHS = [
    *("model", "hash", "hash_seed", "block_size", "group", "spans", "lookup"),
    *("group.index", "group.kind", "group.window", "lookup.served", "lookup.hash_tokens"),
    *("lookup.samples", "lookup.samples.plain", "lookup.adapter_options", "lookup.namespaces"),
    *("lookup.position", "lookup.drops_last"),
]


@pytest.fixture
def store() -> Store:
    return Store.open("memory://?size=64MiB")


def changed(path: str, value: Any) -> dict[str, Any]:
    """A description with another value at one place."""
    description: dict[str, Any] = json.loads(json.dumps(BAD.description))
    *parts, last = path.split(".")
    place = description
    for part in parts:
        place = place[part]
    place[last] = value
    return description


def publish(store: Store, text: bytes, digest: bytes = b"\7" * 16) -> None:
    """Puts something where a description should be."""
    store.put(object_key(DESCRIPTIONS, digest), text, timeout=60.0)


def json_values() -> st.SearchStrategy[Any]:
    numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    plain = st.none() | st.booleans() | numbers | st.text(max_size=40)
    return st.recursive(
        plain,
        lambda inner: (
            st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5)
        ),
        max_leaves=20,
    )


def check(description: dict[str, Any]) -> None:
    """The good model is there, and what is said of the bad one can be said to others."""
    # Under its own namespace, it is the description of its model's last group.
    for namespace in (b"\7" * 16, BAD.namespace):
        models = models_of({GOOD.namespace: GOOD.description, namespace: description})
        assert "good" in {model.name for model in models.known}
        assert len(models.known) + len(models.refused) <= 2
        assert all(isinstance(why, str) for pair in models.refused.items() for why in pair)


@pytest.mark.parametrize("path", PATHS)
def test_a_strange_field_hurts_no_other_model(path: str, store: Store) -> None:
    good = Engine(store, "good")
    good.put(hashes(PROMPT)[:5])
    values = NUMBERS + OTHERS + LISTS + SPANS
    for number, (value, namespace) in enumerate(product(values, (None, BAD.namespace))):
        digest = namespace or number.to_bytes(16, "big")
        if namespace is not None:
            store.remove([object_key(DESCRIPTIONS, digest)], timeout=60.0)
        publish(store, json.dumps(changed(path, value)).encode(), digest)
    with Service([store]) as service:
        [pool] = service.find("good", PROMPT).pools
        assert pool.tokens == 5 * BLOCK
        for name in [*service.refused, *(model.name for model in service.models)]:
            with contextlib.suppress(Refused, ConfigError):
                service.find(name, PROMPT)


@pytest.mark.parametrize(
    "value", NUMBERS + OTHERS + LISTS + SPANS, ids=lambda value: repr(value)[:20]
)
def test_each_strange_value_is_refused_or_harmless_alone(value: Any) -> None:
    for path in PATHS:
        check(changed(path, value))


@given(st.dictionaries(st.sampled_from(PATHS), json_values(), min_size=1, max_size=4))
def test_arbitrary_fields_are_refused_or_harmless(changes: dict[str, Any]) -> None:
    description = json.loads(json.dumps(BAD.description))
    for path, value in changes.items():
        *parts, last = path.split(".")
        place = description
        for part in parts:
            inner = place.get(part)
            place = inner if isinstance(inner, dict) else place
        place[last] = value
    check(description)


@given(st.dictionaries(st.sampled_from(["model", "lookup"]) | st.text(), json_values()))
def test_arbitrary_descriptions_are_refused_or_harmless(description: dict[str, Any]) -> None:
    check(description)


@given(st.binary(max_size=300) | json_values().map(lambda value: json.dumps(value).encode()))
def test_arbitrary_bytes_are_a_description_or_unreadable(text: bytes) -> None:
    with contextlib.suppress(Unreadable):
        description = description_of(text)
        # Whoever reads it can say it to others.
        assert json.loads(canonical_json(description).decode("ascii")) == description


UNREADABLE = {
    "no JSON": b"\xff\x00 no JSON",
    "no JSON object": b"[1, 2]",
    "deep": b'{"model": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "17 levels": b'{"model": ' + b"[" * 17 + b"]" * 17 + b"}",
    "not a number": b'{"model": NaN}',
    "infinite": b'{"model": 1e999}',
    "many digits": b'{"model": ' + b"9" * 60_000 + b"}",
    "half a character": b'{"model": "\\ud800"}',
    "half a character as a name": b'{"\\ud800": "m"}',
    "too long": b'{"model": "' + b"x" * (64 << 10) + b'"}',
}


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
def test_what_is_no_description_is_named_and_all_else_is_served(
    text: bytes, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    Engine(store, "good").put(hashes(PROMPT)[:5])
    publish(store, text)
    name = f"namespace {'07' * 16}"
    with caplog.at_level(logging.WARNING, "penstock.lookup"), Service([store]) as service:
        for _ in range(3):
            service.refresh()
        assert service.find("good", PROMPT).pools[0].tokens == 5 * BLOCK
        assert "cannot be read" in service.refused[name]
        application = Application(service, Tokenizers({}))
        assert name in json.loads(json.dumps(application._models()))["refused"]
    # Once, however often it is read.
    assert len([record for record in caplog.records if name in record.getMessage()]) == 1


def test_one_that_comes_later_stops_no_reading(store: Store) -> None:
    other = Store.open("memory://?size=16MiB")
    Engine(store, "good")
    with Service([store, other], Settings(refresh=0.01)) as service:
        Engine(store, "bad", facts={"block_size": 2**64})
        eventually(lambda: "bad" in service.refused)
        Engine(other, "newcomer").put(hashes(PROMPT)[:5])
        eventually(lambda: "newcomer" in {model.name for model in service.models})
        assert service.find("newcomer", PROMPT).pools[0].tokens == 5 * BLOCK
        assert [(state.is_alive, state.failures) for state in service.threads] == [(True, 0)]


@pytest.mark.threads_fail
def test_a_fault_of_the_reader_is_seen_and_stops_no_other_pool(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No description brings this about. Should anything, then health, metrics and log say so."""
    from penstock.lookup import service as module

    other = Store.open("memory://?size=16MiB")
    Engine(store, "good")
    read, is_broken = module.read_models, [False]

    def failing(asked: Store, *, timeout: float) -> Any:
        if is_broken[0] and asked.url == store.url:
            raise RuntimeError("a fault")
        return read(asked, timeout=timeout)

    monkeypatch.setattr(module, "read_models", failing)
    with Service([store, other], Settings(refresh=0.01)) as service:
        application = Application(service, Tokenizers({}))
        assert _get(application, "/health") == (200, {"ok": True})
        is_broken[0] = True
        Engine(other, "newcomer")
        eventually(lambda: "newcomer" in {model.name for model in service.models})
        eventually(lambda: any(state.is_failing for state in service.threads))
        assert _get(application, "/health") == (503, {"ok": False, "failing": [REFRESHER]})
        metrics = application._measured.text().decode()
        assert f'penstock_lookup_thread_failing{{thread="{REFRESHER}"}} 1.0' in metrics
        is_broken[0] = False
        eventually(lambda: not any(state.is_failing for state in service.threads))
        assert _get(application, "/health") == (200, {"ok": True})
    logged = [record for record in caplog.records if "a fault" in record.getMessage()]
    assert [record.levelname for record in logged] == ["ERROR"]


def test_adapters_are_read_for_a_bounded_number_of_options(tmp_path: Any) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    adapters = Adapters({"mine": str(tmp_path)})
    adapters.read([OPTIONS])
    first = adapters.named("mine", OPTIONS)
    for number in range(10):
        adapters.read([OPTIONS, *(f"{number} {n}" for n in range(500))])
    assert adapters.named("mine", OPTIONS) == first
    assert len(adapters._read) == 32
    with pytest.raises(Refused, match="32 different options"):
        adapters.named("mine", "9 499")


def _get(application: Application, path: str) -> tuple[int, Any]:
    import asyncio

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("a GET has no body")

    scope = {"type": "http", "path": path, "method": "GET", "headers": []}
    asyncio.run(application(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])
