"""Mooncake's store as a pool, on its real master and a process that holds its memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from lab.mooncake import Mooncake
from penstock._native import Store, check_store, store_checks
from penstock.errors import ConfigError, NotFound, StoreError, Unsupported
from penstock.pool import namespace_digest
from penstock.pool.namespace import object_key
from tests.pool.registered import bring

pytestmark = pytest.mark.long

VALUE = b"its KV" * 50_000


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    programs = os.environ.get("PENSTOCK_TEST_MOONCAKE")
    if programs is None:
        pytest.skip("Mooncake is not here: scripts/mooncake.sh runs a command with it")
    running = Mooncake(Path(programs), tmp_path_factory.mktemp("mooncake"))
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Penstock's own distribution brings it, also where that is not installed from here."""
    registry = {one.scheme for one in penstock.pool.registered_stores()}
    if "mooncake" not in registry:
        stores = {"mooncake": "penstock.pool.mooncake:MooncakeStore"}
        monkeypatch.syspath_prepend(bring(tmp_path / "site", "penstock-test", stores))


def test_it_does_what_every_store_must_do(mooncake: Mooncake) -> None:
    mooncake.wait_until_it_stores()
    found = {check: check_store(mooncake.url, check) for check in store_checks()}
    assert found == dict.fromkeys(found)


def test_it_lists_nothing_and_says_so(mooncake: Mooncake) -> None:
    with penstock.open(mooncake.url) as pool, pytest.raises(Unsupported, match="does not list"):
        pool.list()


def test_damage_is_a_miss_and_is_mended_by_the_next_put(mooncake: Mooncake) -> None:
    with penstock.open(mooncake.url, namespace="damaged") as pool:
        mooncake.wait_until_it_stores()
        pool.put("a", VALUE)
        # Another client of Mooncake's writes over the value, in a process of its own.
        key = object_key(namespace_digest({"kind": "pool", "name": "damaged"}), pool.identity("a"))
        code = (
            "from mooncake.store import MooncakeDistributedStore as Client\n"
            "client = Client()\n"
            f"assert not client.setup('127.0.0.1', 'P2PHANDSHAKE', 0, 64 << 20, 'tcp', '', "
            f"{mooncake.master!r})\n"
            f"name = {key.hex()!r}\n"
            "value = bytearray(client.get(name))\n"
            "assert len(value) > 300_000\n"
            "value[200_000] ^= 1\n"
            "assert not client.remove(name, True)\n"
            "assert not client.put(name, bytes(value))\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        with pytest.raises(NotFound):
            pool.get("a")
        assert pool.stats()["rejected"] == 1
        assert pool.put("a", VALUE)
        assert bytes(pool.get("a")) == VALUE


def test_a_master_that_dies_costs_time_and_comes_back(mooncake: Mooncake) -> None:
    with penstock.open(mooncake.url) as pool:
        mooncake.wait_until_it_stores()
        pool.put("before", VALUE)
        mooncake.kill_master()
        for key in ("before", "other"):
            with pytest.raises(StoreError):
                pool.get(key, timeout=0.5)
        mooncake.start()
        mooncake.wait_until_it_stores()
        pool.put("after", VALUE)
        assert bytes(pool.get("after")) == VALUE


def test_urls_that_are_none_are_refused(mooncake: Mooncake) -> None:
    for url in ("mooncake://", "mooncake://host:0x1", "mooncake://host/path", "mooncake://h?x=1"):
        with pytest.raises(ConfigError, match="a Mooncake pool is"):
            Store.open(url)
