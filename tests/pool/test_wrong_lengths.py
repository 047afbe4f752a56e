"""Values of a wrong length: a miss, and removed. All other values are got as before."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import Pool
from penstock.errors import TooSmall

GOOD = b"g" * 1000
CAPACITY = 8 << 40
"""More than all wrong lengths: the directory has no reason to evict."""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with penstock.open(f"file://{tmp_path}/pool?size={CAPACITY}") as pool:
        pool.put("good", GOOD)
        pool.put("bad", b"b" * 1000)
        yield pool


def stretch(tmp_path: Path, key: str, nbytes: int) -> Path:
    """Makes a value's file so long, without taking any room for it."""
    name = hashlib.sha256(key.encode()).hexdigest()
    (path,) = [path for path in (tmp_path / "pool").rglob("*") if name in path.name]
    os.truncate(path, nbytes)
    return path


@pytest.mark.parametrize("nbytes", [1 << 42, 17 << 30, 64 << 20, 1065, 1063, 63, 0])
def test_a_wrong_length_is_a_miss_and_harms_no_other_value(
    pool: Pool, tmp_path: Path, nbytes: int
) -> None:
    path = stretch(tmp_path, "bad", nbytes)
    for _ in range(3):
        assert pool.get("bad", default=None) is None
        assert pool.get("good") == GOOD
        assert pool.get_many(["good", "bad", "good"]) == [GOOD, None, GOOD]
        # Only what was verified makes the guess at the next value's length.
        assert pool._guess == len(GOOD)
    assert not path.exists()
    # Its key is free again.
    pool.put("bad", b"better")
    assert pool.get("bad") == b"better"


def test_a_wrong_length_is_a_miss_for_a_destination_too(pool: Pool, tmp_path: Path) -> None:
    path = stretch(tmp_path, "bad", 1 << 42)
    room = bytearray(2000)
    assert pool.get_many(["bad", "good"], into=[bytearray(10), room]) == [None, len(GOOD)]
    assert room[: len(GOOD)] == GOOD
    assert not path.exists()


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("room", [None, 10])
def test_a_value_that_is_longer_than_any_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_encrypted: bool, room: int | None
) -> None:
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"a:{base64.b64encode(bytes(32)).decode()}\n")
    url = f"file://{tmp_path}/pool?size={CAPACITY}"
    with penstock.open(url, encryption_key_file=keys if is_encrypted else None) as pool:
        pool._guess = 10
        pool.put("bad", b"b" * 1000)
        monkeypatch.setattr("penstock.pool.pool._MOST_BYTES", 999)
        assert pool.get_many(["bad"], into=room and [bytearray(room)]) == [None]
        assert "bad" not in pool


class Late:
    """A store that tells the length of a value that was there before."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get_many(self, *arguments: Any, **options: Any) -> Any:
        return [TooSmall("it had so many bytes", 1 << 42)]


@pytest.mark.parametrize("room", [None, 10])
def test_a_value_that_was_put_meanwhile_stays(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, room: int | None
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(pool, "_store", Late(pool._store))
        assert pool.get_many(["good"], into=room and [bytearray(room)]) == [None]
    assert pool.get("good") == GOOD
