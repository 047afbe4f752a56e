"""The connector's settings."""

from __future__ import annotations

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
