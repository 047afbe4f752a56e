"""The connector's settings."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from lab.network import LIMIT, Way
from penstock.errors import ConfigError
from penstock.pool.namespace import object_key
from penstock.vllm.settings import Lanes, Settings, _warn_of_policy
from tests.servers import Server

POOL = {"penstock.pool": "valkey://cache.example"}


def test_a_file_of_keys_is_named() -> None:
    assert Settings.parse(POOL).encryption_key_file == ""
    parsed = Settings.parse(POOL | {"penstock.encryption_key_file": "/etc/penstock/keys"})
    assert parsed.encryption_key_file == "/etc/penstock/keys"


def test_an_empty_name_does_not_turn_encryption_off() -> None:
    with pytest.raises(ConfigError, match="encryption_key_file is empty"):
        Settings.parse(POOL | {"penstock.encryption_key_file": ""})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("host_bytes", "4GiB", 4 << 30),
        ("host_bytes", 1 << 30, 1 << 30),
        ("get_lanes", "3", 3),
        ("load_timeout", "0.2", 0.2),
        ("drain_timeout", 5, 5.0),
        ("host_tier", "False", False),
        ("host_memory", "shm://kv?size=1GiB", "shm://kv?size=1GiB"),
        ("salt", 7, "7"),
        ("kv_layout", "BLHNC", "BLHNC"),
        ("pool_geometry", "4x2", "4x2"),
        ("compression", "lossless", "lossless"),
        ("otlp_endpoint", "http://[::1]:4318", "http://[::1]:4318"),
        ("otlp_endpoint", "", ""),
    ],
)
def test_values_are_read_as_json_or_a_command_line_has_them(
    name: str, value: object, expected: object
) -> None:
    found = getattr(Settings.parse(POOL | {f"penstock.{name}": value}), name)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("colour", "red", "unknown setting 'penstock.colour' of the connector; known: penstock.po"),
        ("host_bytes", "much", "penstock.host_bytes: "),
        ("host_bytes", 0, "penstock.host_bytes must be positive, got 0"),
        ("get_lanes", -1, "penstock.get_lanes must be positive, got -1"),
        ("get_lanes", 1.5, "penstock.get_lanes: should be a valid integer, got a number with a"),
        ("load_timeout", "soon", "penstock.load_timeout: should be a valid number"),
        ("load_timeout", "inf", "penstock.load_timeout: should be a finite number"),
        ("host_tier", "maybe", "penstock.host_tier: true or false, not 'maybe'"),
        ("host_memory", "valkey://host", "penstock.host_memory: one URL of shared memory, such as"),
        ("host_memory", "shm://a shm://b", "penstock.host_memory: one URL of shared memory, such"),
        ("kv_layout", "XYZ", "penstock.kv_layout: one of auto, "),
        ("otlp_endpoint", "grpc://me:secret@host", "penstock.otlp_endpoint: not the URL of an OTL"),
        ("otlp_endpoint", "http://[::1", "penstock.otlp_endpoint: not the URL of an OTLP/HTTP"),
        ("load_policy", "sometimes", "penstock.load_policy: one of auto, always, never; not 'som"),
        ("compression", "zip", "penstock.compression: one of off, lossless; not 'zip'"),
        ("pool_geometry", "3", "penstock.pool_geometry: pool geometry '3'"),
        ("encryption_key_file", "", "penstock.encryption_key_file is empty: name a file"),
    ],
)
def test_a_bad_value_is_refused_in_a_line_that_names_its_key(
    name: str, value: object, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.parse(POOL | {f"penstock.{name}": value})
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_settings_are_read_and_checked_however_they_are_made() -> None:
    given: dict[str, Any] = {"host_bytes": "4GiB", "host_tier": "false", "salt": 7}
    made = Settings("valkey://cache.example", **given)
    assert made == Settings.parse(POOL | {f"penstock.{name}": given[name] for name in given})
    assert (made.host_bytes, made.host_tier, made.salt) == (4 << 30, False, "7")
    for wrong in {"colour": "red"}, {"get_lanes": 0}, {"load_policy": "sometimes"}:
        with pytest.raises(ConfigError, match=f"penstock.{next(iter(wrong))}"):
            Settings("valkey://cache.example", **wrong)


def test_what_is_wrong_is_said_all_at_once_without_the_pools_password() -> None:
    url = "valkey://me:hunter2@cache.example"
    with pytest.raises(ConfigError) as caught:
        Settings.parse({"penstock.pool": [url], "penstock.get_lanes": 0, "penstock.colour": url})
    said = str(caught.value)
    assert "penstock.pool: should be a valid string; penstock.get_lanes must be positive" in said
    assert "hunter2" not in said


def test_a_pool_is_needed_and_may_be_named_by_the_environment() -> None:
    with pytest.raises(ConfigError, match=r"no pool: set penstock\.pool"):
        Settings.parse({}, {})
    assert Settings.parse({"theirs": 1}, {"PENSTOCK_POOL": "memory:"}).pool == "memory:"


def test_settings_do_not_change() -> None:
    settings = Settings.parse(POOL)
    with pytest.raises(FrozenInstanceError):
        settings.get_lanes = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, "never"),
        ({}, "never"),
        ({"load_policy": "always"}, "never"),
        ({"penstock.load_policy": "always"}, "always"),
        ({"penstock.load_policy": "auto"}, "auto"),
    ],
)
def test_a_request_may_have_its_own_policy(params: dict[str, Any] | None, expected: str) -> None:
    settings = Settings.parse(POOL | {"penstock.load_policy": "never"})
    assert settings.policy_for(params) == expected


@pytest.mark.parametrize("wanted", ["sometimes", None, 1, ["always"], {}])
def test_a_policy_that_there_is_not_is_said_and_counts_as_none(
    wanted: object, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings.parse(POOL)
    # Another test of this process may have named the same policy.
    _warn_of_policy.cache_clear()
    with caplog.at_level("WARNING", "vllm.penstock"):
        for _ in range(2):
            assert settings.policy_for({"penstock.load_policy": wanted}) == "auto"
    assert len(caplog.messages) == 1
    assert repr(wanted) in caplog.text


@pytest.mark.parametrize(
    ("ranks", "cores", "expected"),
    [
        (1, 2, Lanes(2, 1, 1)),
        (1, 7, Lanes(2, 1, 1)),
        (1, 8, Lanes(3, 2, 2)),
        (8, 32, Lanes(2, 1, 1)),
        (8, 64, Lanes(3, 2, 2)),
    ],
)
def test_lanes_follow_the_cores_of_a_rank(ranks: int, cores: int, expected: Lanes) -> None:
    assert Settings("memory:").lanes(ranks, cores) == expected
    named = Settings("memory:", get_lanes=5, copy_lanes=1)
    assert named.lanes(ranks, cores) == Lanes(5, expected.put, 1)


def test_who_waits_longer_for_an_answer_waits_as_long_for_a_connection(
    valkey_server: Server,
) -> None:
    with Way(valkey_server.port) as way:
        # A server's first answer takes longer than the second that a connection may take otherwise.
        way.be(delay=0.6)
        url = f"valkey://127.0.0.1:{way.port}"
        store = Settings(url, lookup_timeout=LIMIT).open_pool("test")
        assert store.contains([object_key(bytes(16), bytes(32))], timeout=LIMIT) == [False]
