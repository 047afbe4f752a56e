"""The connector's settings."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.vllm.settings import Settings

POOL = {"penstock.pool": "valkey://cache.example"}


def test_a_file_of_keys_is_named() -> None:
    assert Settings.parse(POOL).encryption_key_file == ""
    parsed = Settings.parse(POOL | {"penstock.encryption_key_file": "/etc/penstock/keys"})
    assert parsed.encryption_key_file == "/etc/penstock/keys"


def test_an_empty_name_does_not_turn_encryption_off() -> None:
    with pytest.raises(ConfigError, match="encryption_key_file is empty"):
        Settings.parse(POOL | {"penstock.encryption_key_file": ""})


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
    with caplog.at_level("WARNING", "vllm.penstock"):
        for _ in range(2):
            assert settings.policy_for({"penstock.load_policy": wanted}) == "auto"
    assert len(caplog.messages) == 1
    assert repr(wanted) in caplog.text
