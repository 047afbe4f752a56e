"""Scrubs: what they find in every kind of pool, what they remove, and what they leave alone."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

import penstock
from lab.waiting import LIMIT
from penstock._native import EncryptionKeys, Store
from penstock.pool import sweep as module
from penstock.pool.namespace import DESCRIPTIONS, namespace_digest, object_key
from penstock.pool.pace import Pace
from penstock.pool.sweep import Finding, Scrubbed, batches, scrub
from tests.clock import Clock
from tests.pool.test_verification import DAMAGES
from tests.servers import Server

NAMESPACE = namespace_digest({"kind": "pool", "name": "docs"})
VALUE = bytes(range(200)) * 3
A, B = (base64.b64encode(bytes(range(start, start + 32))).decode() for start in (0, 100))


def keys(path: Path, *lines: str) -> EncryptionKeys:
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    found = EncryptionKeys.load(path)
    assert found is not None
    return found


def fill(store: Store, count: int, nbytes: int = 1000) -> list[bytes]:
    names = [object_key(NAMESPACE, bytes([number] * 32)) for number in range(count)]
    for number, name in enumerate(names):
        store.put(name, bytes([number]) * nbytes, timeout=LIMIT)
    return names


def scrubbed(store: Store, digest: bytes = NAMESPACE, **options: object) -> Scrubbed:
    return scrub(store, digest, timeout=LIMIT, pace=Pace(None), **options)  # type: ignore[arg-type]


@pytest.fixture
def shm_url() -> Iterator[str]:
    name = f"penstock-test-{uuid4().hex[:12]}"
    yield f"shm://{name}?size=64MiB"
    Path(f"/dev/shm/penstock-{name}").unlink(missing_ok=True)


@pytest.fixture(params=["memory", "file", "shm", "redis", "valkey"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return Store.open("memory://?size=64MiB")
    if request.param == "file":
        return Store.open(f"file://{tmp_path}/pool?size=64MiB")
    if request.param == "shm":
        return Store.open(request.getfixturevalue("shm_url"))
    server: Server = request.getfixturevalue(f"{request.param}_server")
    return Store.open(server.unix_url)


class Raw:
    """A Redis pool, and a hand on its raw values."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.store = Store.open(server.unix_url)

    def name(self, key: bytes) -> str:
        return f"penstock:{key[:16].hex()}:{key[16:48].hex()}:l0-1.h0-1"

    def damage(self, key: bytes, how: Callable[[bytes], bytes]) -> None:
        (value,) = self.store.get_whole([(key, 10_000)], timeout=LIMIT)
        assert isinstance(value, bytes)
        assert self.server.command("SET", self.name(key), how(value)) == b"+OK\r\n"


@pytest.fixture
def raw(redis_server: Server) -> Raw:
    return Raw(redis_server)


def test_sound_values_are_counted_and_stay(store: Store) -> None:
    names = fill(store, 20)
    advanced: list[int] = []
    found = scrubbed(store, remove=True, advance=advanced.append)
    assert found.found == {Finding.SOUND: 20}
    assert (found.objects, found.nbytes, found.removed) == (20, 20 * 1064, 0)
    assert sum(advanced) == 20
    assert all(store.contains(names, timeout=LIMIT))
    assert store.stats()["rejected"] == 0


def test_a_namespace_that_is_not_there_has_nothing(store: Store) -> None:
    assert scrubbed(store) == Scrubbed(NAMESPACE, objects=0)


def test_values_of_others_keys_are_unreadable_and_stay(store: Store, tmp_path: Path) -> None:
    ours = store.encrypted(keys(tmp_path / "ours", f"a:{A}"))
    theirs = store.encrypted(keys(tmp_path / "theirs", f"b:{B}"))
    names = fill(theirs, 3)
    plain = object_key(NAMESPACE, b"p" * 32)
    store.put(plain, VALUE, timeout=LIMIT)
    for reader, reasons in [
        (ours, {"unknown_key": 3, "unencrypted": 1}),
        (store, {"encrypted": 3}),
        (theirs, {"unencrypted": 1}),
    ]:
        found = scrubbed(reader, remove=True, has_cache_salts=False)
        assert found.reasons == reasons
        assert found.found[Finding.UNREADABLE] == sum(reasons.values())
        assert found.found[Finding.SOUND] == 4 - sum(reasons.values())
    assert all(store.contains([*names, plain], timeout=LIMIT))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_every_kind_is_found_and_removed(raw: Raw, damage: str) -> None:
    names = fill(raw.store, 3)
    raw.damage(names[1], DAMAGES[damage])
    found = scrubbed(raw.store)
    is_other_version = found.reasons == {"version": 1}
    assert found.found[Finding.SOUND] == 2
    assert found.left_damaged == (0 if is_other_version else 1)
    assert raw.store.contains(names, timeout=LIMIT) == [True, True, True]
    found = scrubbed(raw.store, remove=True)
    assert (found.removed, found.left_damaged) == (0 if is_other_version else 1, 0)
    assert raw.store.contains(names, timeout=LIMIT) == [True, is_other_version, True]


def test_an_encrypted_value_that_does_not_authenticate_may_be_a_tenants(
    raw: Raw, tmp_path: Path
) -> None:
    store = raw.store.encrypted(keys(tmp_path / "keys", f"a:{A}"))
    names = fill(store, 2)
    raw.damage(names[0], lambda value: value[:-1] + bytes([value[-1] ^ 1]))
    found = scrubbed(store, remove=True)
    assert (found.found[Finding.UNREADABLE], found.removed) == (1, 0)
    assert found.reasons == {"authentication": 1}
    found = scrubbed(store, remove=True, has_cache_salts=False)
    assert (found.found[Finding.DAMAGED], found.removed) == (1, 1)
    assert store.contains(names, timeout=LIMIT) == [False, True]


def test_descriptions_are_read_without_keys(store: Store, tmp_path: Path) -> None:
    encrypted = store.encrypted(keys(tmp_path / "keys", f"a:{A}"))
    penstock.Pool(encrypted, {"model": "m"}).put("key", VALUE)
    assert scrubbed(encrypted, DESCRIPTIONS).found == {Finding.SOUND: 1}


def test_what_goes_away_meanwhile_is_gone(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    names = fill(raw.store, 6)
    monkeypatch.setattr(module, "AT_ONCE", 2)

    def evict(_: int) -> None:
        for name in names:
            raw.server.command("DEL", raw.name(name))

    found = scrubbed(raw.store, advance=evict)
    assert found.found == {Finding.SOUND: 2, Finding.GONE: 4}


@pytest.mark.parametrize(("share", "looked_at"), [(0.001, 1), (0.5, 10), (1.0, 20)])
def test_a_sample_is_a_share_of_the_objects(share: float, looked_at: int) -> None:
    store = Store.open("memory://?size=64MiB")
    fill(store, 20)
    found = scrubbed(store, share=share)
    assert (found.objects, found.found.total()) == (20, looked_at)


def test_what_the_file_system_cannot_read_is_unreadable(tmp_path: Path) -> None:
    store = Store.open(f"file://{tmp_path}/pool?size=64MiB")
    fill(store, 2)
    file = next(path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 99)
    # A file in the place of the folder that it is in.
    shutil.rmtree(file.parent)
    file.parent.write_text("")
    listed = [(object_key(NAMESPACE, bytes([number] * 32)), 1064) for number in range(2)]
    looks = [
        look
        for some in module.sweep(store, listed, timeout=LIMIT, pace=Pace(None))
        for look in some
    ]
    assert sorted(look.finding.value for look in looks) == ["sound", "unreadable"]
    assert {look.reason for look in looks} == {"", "io"}


def test_a_store_that_fails_is_an_error(raw: Raw) -> None:
    fill(raw.store, 2)
    listed = raw.store.list(NAMESPACE, timeout=LIMIT)
    raw.server.kill()
    with pytest.raises(penstock.errors.StoreError):
        list(module.sweep(raw.store, listed, timeout=1.0, pace=Pace(None)))


def test_batches_are_bounded() -> None:
    sizes = [5 << 20, 12 << 20, 3 << 20, 20 << 20, 1, *([1] * 600)]
    cut = list(batches(sizes, lambda size: size))
    assert [size for batch in cut for size in batch] == sizes
    assert all(len(batch) == 1 or sum(batch) <= module.IN_FLIGHT_BYTES for batch in cut)
    assert max(map(len, cut)) == module.AT_ONCE


def test_a_pace_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, "penstock.pool.pace")
    begin = clock.now
    pace = Pace(1000)
    for _ in range(4):
        pace.spend(50)
    assert clock.now - begin == pytest.approx(0.2)
