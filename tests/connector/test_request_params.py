"""What clients write into requests, of any type: wrong ones are served as without."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from penstock.vllm import compat
from penstock.vllm.compat import requests
from penstock.vllm.scheduler_facts import arrival
from tests.connector.engine import PlainEngine
from tests.connector.test_scheduler import FULL, PROMPT

NO_OBJECTS: tuple[Any, ...] = (
    "text",
    "",
    '{"penstock.tenant": "red"}',
    b'{"penstock.tenant": "red"}',
    7,
    0,
    1.5,
    True,
    ["penstock.tenant", "red"],
    [["penstock.tenant", "red"]],
    [],
)
OF_ANY_TYPE: tuple[Any, ...] = (
    *(None, *NO_OBJECTS, {}, {"a": {"b": []}}, {1: 2}),
    *(float("nan"), float("inf"), -1, 10**400, -(10**400), "\ud800", [[]] * 3, [None], [2**70]),
)


def request(params: Any = None, **more: Any) -> Any:
    values = {"cache_salt": None, "trace_headers": None, "mm_features": [], "kv_hints": None}
    return SimpleNamespace(kv_transfer_params=params, **values | more)


@pytest.fixture(autouse=True)
def nothing_was_said() -> None:
    requests._warn_of_params.cache_clear()


@pytest.mark.parametrize("given", NO_OBJECTS, ids=repr)
def test_parameters_that_are_no_object_are_none(
    given: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm.penstock"):
        for _ in range(3):
            assert arrival(request(given)).params is None
    [said] = caplog.messages
    assert f"no object but {type(given).__name__}" in said
    # What the client wrote is not repeated.
    assert "penstock.tenant" not in said


def test_an_object_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    for given in (None, {}, {"penstock.tenant": "red"}):
        assert arrival(request(given)).params == given
    assert caplog.messages == []


class Frontend:
    """A frontend of vLLM, with or without Penstock, as far as Penstock adds to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, connector: str) -> None:
        transfer = SimpleNamespace(kv_connector=connector, kv_connector_extra_config={})
        self._config = SimpleNamespace(kv_transfer_config=transfer)
        monkeypatch.setattr(
            InputProcessor,
            "process_inputs",
            lambda self, sampling: SimpleNamespace(sampling_params=sampling),
        )
        compat.drop_wrong_params()

    def take(self, given: Any) -> Any:
        """A request's parameters once the frontend has taken it."""
        processor: Any = InputProcessor.__new__(InputProcessor)
        processor.vllm_config = self._config
        extra = {"kv_transfer_params": given, "other": 1}
        sampling = SamplingParams(extra_args=extra)
        taken = processor.process_inputs(sampling).sampling_params.extra_args
        assert taken["other"] == 1
        assert extra == {"kv_transfer_params": given, "other": 1}
        return taken.get("kv_transfer_params")


@pytest.mark.parametrize("given", NO_OBJECTS, ids=repr)
def test_frontends_drop_them_where_vllm_would_fail(
    given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Frontend(monkeypatch, "PenstockConnector").take(given) is None


def test_frontends_leave_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"penstock.tenant": "red"}
    assert Frontend(monkeypatch, "PenstockConnector").take(wanted) == wanted
    assert Frontend(monkeypatch, "NixlConnector").take("text") == "text"


FIELDS = (
    "penstock.load_policy",
    "penstock.tenant",
    "penstock.keep",
    "penstock.prefetch",
    "penstock.let_go",
    "penstock.promise",
    "do_remote_prefill",
    "do_remote_decode",
)


@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
def test_fields_of_any_type_do_not_stop_the_engine(role: str) -> None:
    engine = PlainEngine([FULL], role=role, has_hashes=True, handover_timeout=0.001)
    made_of = [
        {"namespaces": value, "tokens": other, "last": third}
        for value in OF_ANY_TYPE
        for other, third in ((16, "00" * 32), ("16", value), (value, value))
    ]
    wrong = [{name: value} for name in FIELDS for value in OF_ANY_TYPE]
    wrong += [{"penstock.promise": value, "do_remote_prefill": True} for value in made_of]
    for number, params in enumerate(wrong):
        name = f"r{number}"
        for hints in (None, params):
            asked = engine.ask(f"{name} {hints is None}", PROMPT, params, salt=b"", hints=hints)
            engine.half.match(asked.request_id, 0)
            engine.step({asked.request_id: len(PROMPT)})
            engine.half.promise(asked.request_id)
            engine.finish(asked)
            engine.settle()
    assert not engine.half._requests
    engine.half.shutdown()


@pytest.mark.parametrize("salt", [None, "", "a salt", 7, b"bytes", ["list"], "\ud800"], ids=repr)
def test_a_salt_of_any_type_is_a_salt(salt: Any) -> None:
    found = arrival(request(cache_salt=salt)).salt
    assert bool(found) == (salt not in (None, ""))


def test_hints_without_a_payload_are_none() -> None:
    payloads: tuple[Any, ...] = (None, [], "text", 7, {}, {"value": 5})
    actions = [KvHintAction(str(n), "penstock.keep", "1", each) for n, each in enumerate(payloads)]
    told = [
        compat.kv_hints(request(kv_hints=KvHintsEnvelope("1", "m", [action]))) for action in actions
    ]
    assert told == [{}] * 4 + [{"penstock.keep": None}, {"penstock.keep": 5}]
