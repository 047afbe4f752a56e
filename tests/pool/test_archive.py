"""Archives: what goes out comes back, and nothing that was changed is taken for sound."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from lab.waiting import LIMIT
from penstock._native import Store
from penstock.errors import ArchiveError, Full
from penstock.pool.archive import Archive, Exported, export_namespaces, import_archive
from penstock.pool.namespace import DESCRIPTIONS
from penstock.pool.pace import Pace
from tests.pool.test_sweep import A, Raw, keys, raw, shm_url, store

__all__ = ["raw", "shm_url", "store"]

FAST = Pace(None)


def export(store: Store) -> tuple[bytes, Exported]:
    with penstock.Pool(store.unencrypted(), DESCRIPTIONS) as pool:
        used = [one for one in pool.namespaces() if one.digest != DESCRIPTIONS]
    file = io.BytesIO()
    exported = export_namespaces(store, used, file, timeout=LIMIT, pace=FAST)
    return file.getvalue(), exported


def memory() -> Store:
    return Store.open("memory://?size=64MiB")


def small_archive() -> bytes:
    store = memory()
    for name in ("one", "two"):
        pool = penstock.Pool(store, name)
        pool.put_many({f"key {number}": bytes([number]) * 100 * number for number in range(4)})
    return export(store)[0]


ARCHIVE = small_archive()
WHOLE = list(Archive(io.BytesIO(ARCHIVE)).values())


def test_what_goes_out_comes_back(store: Store) -> None:
    pool = penstock.Pool(store, {"model": "m", "block_size": 16})
    values = {f"key {number}": bytes([number]) * (1 << number) for number in range(16)}
    pool.put_many(values)
    penstock.Pool(store, "other").put("key", b"value")
    file, exported = export(store)
    assert (exported.values, exported.damaged, exported.unreadable) == (17, 0, 0)
    archive = Archive(io.BytesIO(file))
    assert [one.description for one in archive.namespaces if one.digest == pool.namespace] == [
        {"model": "m", "block_size": 16}
    ]
    into = memory()
    advanced: list[int] = []
    imported = import_archive(archive, into, timeout=LIMIT, pace=FAST, advance=advanced.append)
    assert (imported.values, imported.stored, imported.present) == (17, 17, 0)
    assert sum(advanced) == 17
    there = penstock.Pool(into, pool.namespace)
    assert {key: bytes(there.get(key)) for key in values} == values
    described = {one.digest: one.description for one in there.namespaces()}
    assert described[pool.namespace] == {"model": "m", "block_size": 16}
    again = import_archive(Archive(io.BytesIO(file)), store, timeout=LIMIT, pace=FAST)
    assert (again.stored, again.present) == (0, 17)


def test_a_dry_run_stores_nothing(store: Store) -> None:
    imported = import_archive(
        Archive(io.BytesIO(ARCHIVE)), store, timeout=LIMIT, pace=FAST, dry_run=True
    )
    assert (imported.values, imported.stored) == (8, 8)
    assert store.usage(timeout=LIMIT) == []


def test_encrypted_values_stay_encrypted_and_need_their_key_again(tmp_path: Path) -> None:
    pair = keys(tmp_path / "keys", f"a:{A}")
    store = memory()
    penstock.Pool(store.encrypted(pair), "docs").put("key", b"very secret" * 100)
    for exporter, unreadable in ((store, 1), (store.encrypted(pair), 0)):
        file, exported = export(exporter)
        assert (exported.values, exported.unreadable) == (1, unreadable)
        assert b"very secret" not in file
        into = memory()
        imported = import_archive(Archive(io.BytesIO(file)), into, timeout=LIMIT, pace=FAST)
        assert imported.stored == 1
        assert penstock.Pool(into, "docs").get("key", default=None) is None
        assert penstock.Pool(into.encrypted(pair), "docs").get("key") == b"very secret" * 100


def test_damaged_values_are_left_out(raw: Raw) -> None:
    pool = penstock.Pool(raw.store, "docs")
    pool.put_many({"a": bytes(100), "b": bytes(100)})
    (key, _), *_ = raw.store.list(pool.namespace, timeout=LIMIT)
    raw.damage(key, lambda value: value[:-1] + b"!")
    file, exported = export(raw.store)
    assert (exported.values, exported.damaged) == (1, 1)
    assert len(list(Archive(io.BytesIO(file)).values())) == 1


def test_a_damaged_value_with_a_good_digest_is_refused() -> None:
    """As a program could write it that does not verify what it writes."""
    store, lying = memory(), memory()
    penstock.Pool(store, "docs").put("key", bytes(100))

    class Lying:
        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def examine(self, items: list[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
            return [("sound", "")] * len(items)

        def get_whole(self, items: list[tuple[bytes, int]], *, timeout: float) -> list[bytes]:
            values = store.get_whole(items, timeout=timeout)
            return [value[:-1] + b"!" for value in values if isinstance(value, bytes)]

    with penstock.Pool(store, DESCRIPTIONS) as pool:
        used = [one for one in pool.namespaces() if one.digest != DESCRIPTIONS]
    file = io.BytesIO()
    export_namespaces(Lying(), used, file, timeout=LIMIT, pace=FAST)  # type: ignore[arg-type]
    for dry_run in (True, False):
        imported = import_archive(
            Archive(io.BytesIO(file.getvalue())), lying, timeout=LIMIT, pace=FAST, dry_run=dry_run
        )
        assert (imported.values, imported.stored, imported.damaged) == (1, 0, 1)


@given(data=st.data())
@settings(max_examples=300)
def test_a_cut_archive_gives_what_lies_before_the_cut(data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(ARCHIVE) - 1))
    found: list[tuple[bytes, bytes]] = []
    with pytest.raises(ArchiveError):
        found.extend(Archive(io.BytesIO(ARCHIVE[:end])).values())
    got = given_up(ARCHIVE[:end])
    assert got == WHOLE[: len(got)]


@given(at=st.integers(0, len(ARCHIVE) - 1), change=st.integers(1, 255))
@settings(max_examples=500)
def test_a_changed_archive_gives_nothing_that_was_not_in_it(at: int, change: int) -> None:
    changed = bytearray(ARCHIVE)
    changed[at] ^= change
    got = given_up(bytes(changed))
    assert got == WHOLE[: len(got)]


@given(
    first=st.integers(0, len(ARCHIVE)),
    second=st.integers(0, len(ARCHIVE)),
    third=st.integers(0, len(ARCHIVE)),
    new=st.binary(max_size=100),
)
@settings(max_examples=500)
def test_a_spliced_archive_gives_nothing_that_was_not_in_it(
    first: int, second: int, third: int, new: bytes
) -> None:
    """Parts left out, repeated, moved or made up."""
    spliced = ARCHIVE[:first] + new + ARCHIVE[second:third] + ARCHIVE[second:]
    if spliced != ARCHIVE:
        got = given_up(spliced)
        assert got == WHOLE[: len(got)]


@given(st.binary(max_size=4096))
def test_any_bytes_are_refused(data: bytes) -> None:
    for file in (data, b"PNSKPOOL\1\0" + data, b"PNSKPOOL" + data):
        assert given_up(file) == []


def given_up(file: bytes) -> list[tuple[bytes, bytes]]:
    """The values before the error, which there must be."""
    found = []
    try:
        for one in Archive(io.BytesIO(file)).values():
            found.append(one)
    except ArchiveError:
        return found
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (b"", "does not begin like one"),
        (b"something else", "does not begin like one"),
        (ARCHIVE[:10], "cut off in its head"),
        (ARCHIVE[:8] + b"\2" + ARCHIVE[9:], "format version 2, and this Penstock reads 1"),
        (ARCHIVE[:14] + b"!" + ARCHIVE[15:], "damaged after 0 values"),
        (ARCHIVE[:-1], "cut off after 8 values"),
        (ARCHIVE + b"!", "damaged at its end"),
    ],
)
def test_errors_say_what_is_wrong(file: bytes, words: str) -> None:
    with pytest.raises(ArchiveError, match=words):
        list(Archive(io.BytesIO(file)).values())


def test_a_length_that_is_wrong_takes_no_memory() -> None:
    head = b"PNSKPOOL\1\0" + (200 << 20).to_bytes(4, "little")
    with pytest.raises(ArchiveError, match="cut off"):
        Archive(io.BytesIO(head + bytes(100)))


def test_the_sound_part_of_a_damaged_archive_is_stored(store: Store) -> None:
    with pytest.raises(ArchiveError, match=r"cut off after 7 values; 7 values before were stored"):
        import_archive(Archive(io.BytesIO(ARCHIVE[:-60])), store, timeout=LIMIT, pace=FAST)
    keys = [key for key, _ in WHOLE]
    assert store.contains(keys, timeout=LIMIT) == [True] * 7 + [False]


def test_a_pool_that_does_not_take_a_value_is_an_error() -> None:
    store = memory()
    penstock.Pool(store, "docs").put("key", bytes(1 << 20))
    small = Store.open("memory://?size=64KiB")
    with pytest.raises((ArchiveError, Full), match="larger than the store takes"):
        import_archive(Archive(io.BytesIO(export(store)[0])), small, timeout=LIMIT, pace=FAST)
