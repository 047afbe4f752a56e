"""Quotas in a pool's URL: what they do, and what the commands show of them."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from lab.waiting import LIMIT, eventually
from penstock._native import Store
from penstock.cli import main, quotas
from penstock.errors import ConfigError, Full, Unavailable
from penstock.pool import Pool
from penstock.pool.namespace import publish_namespace

VALUE = bytes(20_000)
QUOTA = 1 << 20


def digest_of(tenant: str) -> bytes:
    """The end of a tenant's namespaces."""
    return hashlib.sha256(b"penstock tenant 1\n" + tenant.encode()).digest()[:5]


def namespace_of(tenant: str) -> bytes:
    return b"shared  " + bytes.fromhex("7e4a07") + digest_of(tenant)


@pytest.fixture(params=("memory", "file", "shm"))
def bounded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a pool that Penstock bounds."""
    name = f"test-quotas-{uuid.uuid4().hex}"
    place = {"memory": "", "file": str(tmp_path / "pool"), "shm": name}[request.param]
    yield f"{request.param}://{place}?size=64MiB"
    Path(f"/dev/shm/penstock-{name}").unlink(missing_ok=True)


def put_in_time(pool: Pool, key: str, value: bytes) -> None:
    """Puts a value, again and again while room is being made."""

    def has_room() -> bool:
        try:
            pool.put(key, value)
        except (Full, Unavailable):
            return False
        return True

    eventually(has_room)


def fill(url: str) -> Store:
    """Puts 60 values for each of three tenants, of which two have quotas."""
    store = Store.open(url)
    for tenant in ("red", "blue", "green"):
        with Pool(store, namespace_of(tenant), timeout=LIMIT) as pool:
            for number in range(60):
                put_in_time(pool, f"key {number}", VALUE)
    return store


def accounts_of(store: Store) -> dict[str, quotas.Account]:
    with Pool(store, b"any namespace   ", timeout=LIMIT) as pool:
        found = quotas.accounts(pool.describe(), pool.namespaces())
    return {one.account: one for one in found}


def test_a_tenant_keeps_within_its_quota_and_others_keep_all(bounded: str) -> None:
    store = fill(f"{bounded}&quota=tenant/red:1MiB&quota=tenant/blue:16MiB")

    def account_has_all_that_is_held() -> bool:
        held = {digest: nbytes for digest, _, nbytes, _ in store.usage(timeout=LIMIT)}
        assert QUOTA // 2 < held[namespace_of("red")] <= QUOTA
        for tenant in ("blue", "green"):
            assert held[namespace_of(tenant)] == 60 * (len(VALUE) + 64)
        accounts = accounts_of(store)
        assert set(accounts) == {"tenant/red", "tenant/blue"}
        used = accounts["tenant/red"].used_bytes
        assert used is not None
        assert used <= QUOTA
        return held[namespace_of("red")] <= used

    # Room is still being made after the last put, between the two readings too.
    eventually(account_has_all_that_is_held)
    assert store.stats()["evictions"] > 0


def test_a_value_larger_than_the_quota_is_refused(bounded: str) -> None:
    url = f"{bounded}&quota=namespace/{namespace_of('red').hex()}:1MiB"
    with penstock.open(url, namespace=namespace_of("red")) as pool:
        with pytest.raises(ConfigError, match="larger than its quota of 1048576"):
            pool.put("key", bytes(2 << 20))
        pool.put("key", VALUE)


def as_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_pool_stats_shows_who_has_how_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/pool?size=64MiB&quota=tenant/*:1MiB&quota=tenant/blue:16MiB"
    store = fill(url)
    publish_namespace(store, namespace_of("red"), {"kind": "pool", "tenant": "red"})
    monkeypatch.setenv("PENSTOCK_POOL", url)
    assert main(["pool", "stats", "--json"]) == 0
    stats = as_json(capsys)
    assert stats["url"].endswith("&quota=tenant/blue:16777216&quota=tenant/*:1048576")
    accounts = {one["account"]: one for one in stats["quotas"]}
    red, green = (f"tenant/*/{digest_of(tenant).hex()}" for tenant in ("red", "green"))
    assert set(accounts) == {"tenant/*", "tenant/blue", red, green}
    # Whole blocks of a directory, as its own bound counts them.
    blue = {"account": "tenant/blue", "tenant": "blue", "quota_bytes": 16 << 20}
    assert accounts["tenant/blue"] == blue | {"used_bytes": 60 * 20480, "tier": None}
    assert QUOTA // 2 < accounts[red]["used_bytes"] <= QUOTA
    assert (accounts[red]["tenant"], accounts[green]["tenant"]) == ("red", None)
    assert accounts["tenant/*"]["used_bytes"] is None
    assert main(["pool", "stats"]) == 0
    shown = capsys.readouterr().out
    assert "tenant/red (*)" in shown
    assert green in shown
    assert "1.172 MiB" in shown


def test_each_tier_has_quotas_of_its_own(tmp_path: Path) -> None:
    namespace = f"namespace/{namespace_of('red').hex()}"
    store = Store.open(
        f"memory://?size=64MiB&quota={namespace}:1MiB "
        f"file://{tmp_path}/pool?size=64MiB&quota={namespace}:2MiB"
    )
    with Pool(store, namespace_of("red"), timeout=LIMIT) as pool:
        found = quotas.accounts(pool.describe(), [])
    assert [(one.tier, one.quota_bytes) for one in found] == [(1, 1 << 20), (2, 2 << 20)]
    assert {one.account for one in found} == {namespace}


def test_commands_take_and_show_quotas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"file://{tmp_path}/pool?size=64MiB&quota=tenant/red:1GiB"
    assert main(["doctor", url]) == 0
    assert "quota=tenant/red:1073741824" in capsys.readouterr().out
    assert main(["serve", "model", "--pool", url, "--dry-run"]) == 0
    assert url in capsys.readouterr().out
    for command in ("ls", "stats", "verify"):
        assert main(["pool", command, url]) == 0


@pytest.mark.parametrize("command", ["doctor", "pool stats", "pool ls", "serve model --pool"])
def test_a_wrong_quota_is_said_plainly(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for url, said in (
        ("memory://?size=1MiB&quota=red:1MiB", "not a quota"),
        ("valkey://127.0.0.1:1?quota=tenant/red:1MiB", "a server's pool takes no quotas"),
    ):
        assert main([*command.split(), url]) == 2
        assert said in capsys.readouterr().err
