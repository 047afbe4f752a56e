"""Whatever a pool does, SGLang gets an answer in bounded time, and never a wrong page."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
import torch

from lab.waiting import LIMIT, eventually
from penstock._native import Store
from penstock.errors import ConfigError, TimedOut
from penstock.sglang.counters import COUNTERS
from tests.servers import Server
from tests.sglang.engines import (
    DEFAULT_LIMITS,
    PAGE,
    backend,
    config,
    extra_config,
    fill,
    mha_host,
    names,
    page_bytes,
)

PAGES = 8


def everything(made: Any, keys: list[str], indices: Any) -> tuple[Any, ...]:
    """What every method answers."""
    host = made.mem_pool_host
    page = host.get_dummy_flat_data_page()
    return (
        made.batch_exists(keys),
        made.batch_set_v1(keys, indices),
        made.batch_get_v1(keys, indices),
        made.batch_exists_v2(keys, []).kv_hit_pages,
        made.exists(keys[0]),
        made.get(keys[0], page),
        made.batch_get(keys[:2], [page, page.clone()]),
        made.set(keys[0], page),
        made.batch_set(keys[:1], [page]),
        made.clear(),
    )


NOTHING = (0, [False] * PAGES, [False] * PAGES, 0, False, None, [None] * 2, False, False, False)


def test_a_killed_server_costs_bounded_time(valkey_server: Server) -> None:
    in_place, copies = (
        backend(valkey_server.unix_url, mha_host(), DEFAULT_LIMITS | {"interface_v1": form})
        for form in (1, 0)
    )
    keys, indices = names(PAGES), torch.arange(PAGES * PAGE)
    assert in_place.batch_set_v1(keys, indices) == [True] * PAGES
    valkey_server.kill()
    for _ in range(20):
        for made in (in_place, copies):
            assert everything(made, keys, indices) == NOTHING
    assert in_place.counters()["failures"] > 100
    assert copies.counters()["failures"] > 100


def test_a_server_that_does_not_answer_costs_bounded_time(valkey_server: Server) -> None:
    host = mha_host()
    made = backend(valkey_server.unix_url, host, DEFAULT_LIMITS)
    keys, indices = names(PAGES), torch.arange(PAGES * PAGE)
    # It never answers: whatever had no limit would hang.
    valkey_server.freeze()
    for _ in range(10):
        assert made.batch_exists(keys) == 0
        assert made.batch_set_v1(keys, indices) == [False] * PAGES
        assert made.batch_get_v1(keys, indices) == [False] * PAGES
    valkey_server.thaw()
    eventually(lambda: made.batch_set_v1(keys, indices)[0])
    assert made.batch_exists(keys) == PAGES


class AnswersSome:
    """A backend's pool, slowed down: the time of a look-up is up after so many objects."""

    def __init__(self, made: Any, objects: int) -> None:
        self._store = made._store._store
        self._objects = objects
        self.asked: list[int] = []
        """The objects of each question."""

    def contains(self, names: list[bytes], *, timeout: float) -> list[bool]:
        self.asked.append(len(names))
        if sum(self.asked) > self._objects:
            raise TimedOut("too slow")
        found: list[bool] = self._store.contains(names, timeout=60)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_slow_pool_finds_what_it_answers_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a directory on another machine, which is asked for one file after the other."""
    made = backend("memory://?size=64MiB", mha_host())
    keys = names(300)
    assert all(made.batch_set_v1(keys, torch.arange(PAGE).repeat(300)))
    pool = AnswersSome(made, 200)
    monkeypatch.setattr(made._store, "_store", pool)
    assert 64 <= made.batch_exists(keys) <= 200
    assert made.counters()["failures"] == 1
    pool.asked.clear()
    assert made.batch_exists([*names(1, "another"), *keys]) == 0
    assert pool.asked == [64]
    assert made.counters()["failures"] == 1


def test_a_slow_pool_gets_the_pages_that_it_was_asked_for_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = backend("memory://?size=64MiB", mha_host())
    keys, indices = names(300), torch.arange(PAGE).repeat(300)
    assert all(made.batch_set_v1(keys[:100], indices[: 100 * PAGE]))
    whole = made._store._store
    pool = AnswersSome(made, 200)
    monkeypatch.setattr(made._store, "_store", pool)
    assert made.batch_set_v1(keys, indices) == [True] * 192 + [False] * 108
    assert pool.asked == [64] * 4
    monkeypatch.setattr(made._store, "_store", whole)
    assert made.batch_exists(keys) == 192
    assert made.counters()["stored_pages"] == 192
    assert made.counters()["present_pages"] == 100
    assert made.counters()["unstored_pages"] == 108


def test_a_look_up_is_bounded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pieces it has."""
    made = backend("memory://?size=64MiB", mha_host(), {"lookup_timeout": 1000})
    keys = names(300)
    assert all(made.batch_set_v1(keys, torch.arange(PAGE).repeat(300)))
    clock = itertools.count(0, 200)
    monkeypatch.setattr(
        "penstock.sglang.backend.time", SimpleNamespace(monotonic=lambda: next(clock))
    )
    left: list[float] = []

    def contains(names: list[bytes], *, timeout: float) -> list[bool]:
        left.append(timeout)
        if timeout < 1:
            raise TimedOut("too late")
        return [True] * len(names)

    monkeypatch.setattr(made._store, "_store", SimpleNamespace(contains=contains))
    assert made.batch_exists(keys) == 64 * (len(left) - 1)
    assert left == sorted(left, reverse=True)
    assert left[0] <= 1000
    assert left[-1] < 1


def test_damaged_values_are_misses(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?size=64MiB"
    host = mha_host()
    fill(host)
    made = backend(url, host)
    keys, indices = names(PAGES), torch.arange(PAGES * PAGE)
    wanted = [page_bytes(host, n * PAGE) for n in range(PAGES)]
    assert made.batch_set_v1(keys, indices) == [True] * PAGES
    [damaged] = made._pools["kv"].names(keys[3:4])
    [path] = (p for p in (tmp_path / "pool").rglob("*") if damaged[16:48].hex() in p.name)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    fill(host, seed=2)
    got = made.batch_get_v1(keys, indices)
    assert not got[3]
    # Whatever else was loaded is right.
    for place, is_loaded in enumerate(got):
        assert not is_loaded or page_bytes(host, place * PAGE) == wanted[place]
    assert got[:3] == [True] * 3
    assert made.counters()["rejected_objects"] == 1
    assert made.batch_exists(keys) == 3, "it was removed"


def test_a_value_of_another_size_is_a_miss(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?size=64MiB"
    host = mha_host()
    made = backend(url, host)
    store = Store.open(url)
    for key, value in zip(names(2), (b"short", bytes(1 << 20)), strict=True):
        [name] = made._pools["kv"].names([key])
        store.put(name, value, timeout=LIMIT)
        assert made.batch_get_v1([key], torch.arange(PAGE)) == [False]


def test_a_full_server_refuses_pages_and_nothing_else(tmp_path: Path) -> None:
    options = ("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    with Server("valkey", tmp_path, *options) as server:
        host = mha_host(layers=64)
        made = backend(server.unix_url, host)
        fill(host)
        stored = [
            made.batch_set_v1(names(8, f"{batch} "), torch.arange(8 * PAGE)) for batch in range(40)
        ]
        assert all(stored[0])
        assert not any(stored[-1])
        assert made.batch_get_v1(names(8, "0 "), torch.arange(8 * PAGE)) == [True] * 8
        counts = made.counters()
        assert counts["unstored_pages"] > 0
        assert counts["stored_pages"] + counts["unstored_pages"] == 8 * 40


def test_a_bounded_directory_keeps_its_bound(tmp_path: Path) -> None:
    host = mha_host(layers=64)
    fill(host)
    made = backend(f"file://{tmp_path}/pool?size=4MiB", host)
    for batch in range(40):
        keys = names(8, f"{batch} ")
        assert made.batch_set_v1(keys, torch.arange(8 * PAGE)) == [True] * 8
        assert made.batch_get_v1(keys, torch.arange(8 * PAGE)) == [True] * 8
    held = sum(path.stat().st_size for path in (tmp_path / "pool").rglob("*") if path.is_file())
    assert held <= 5 << 20


def test_wrong_calls_are_answered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    host = mha_host()
    made = backend(f"file://{tmp_path}/pool?size=4MiB", host)
    for _ in range(5):
        assert made.batch_set_v1(names(2), torch.arange(PAGE)) == [False] * 2
        assert made.batch_get_v1(names(1), None) == [False]
        assert made.batch_set_v1(names(1), torch.arange(PAGE) + (1 << 40)) == [False]
    assert made.batch_set(names(1), [None]) is False
    assert made.batch_get_v1([], torch.arange(0)) == []
    said = [record.getMessage() for record in caplog.records if "failed with" in record.message]
    # A store, a load: each once, and not for every call.
    assert 2 <= len(said) <= 4
    assert made.counters()["failures"] == 16


def test_a_backend_without_host_pools_finds_nothing(tmp_path: Path) -> None:
    from penstock.sglang import PenstockStorage

    made = PenstockStorage(config(extra_config(f"file://{tmp_path}/pool?size=4MiB")), {})
    assert made.batch_exists(names(2)) == 0
    assert made.batch_get_v1(names(1), torch.arange(PAGE)) == [False]
    assert made.get("a") is None
    assert made.counters().keys() == COUNTERS.keys()


def test_a_directory_that_cannot_be_used_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((ConfigError, OSError)):
        backend(f"file://{tmp_path}/file?size=4MiB", mha_host())


def test_clearing_leaves_others(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?size=64MiB"
    made, other = (backend(url, mha_host(layout)) for layout in ("page_first", "layer_first"))
    keys, indices = names(PAGES), torch.arange(PAGES * PAGE)
    for each in (made, other):
        assert each.batch_set_v1(keys, indices) == [True] * PAGES
    assert made.clear()
    assert made.batch_exists(keys) == 0
    assert other.batch_exists(keys) == PAGES


def test_detached_and_attached_again(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?size=64MiB"
    host = mha_host()
    made = backend(url, host, enable_storage_metrics=True)
    keys, indices = names(PAGES), torch.arange(PAGES * PAGE)
    assert made.batch_set_v1(keys, indices) == [True] * PAGES
    assert _shown("stored_pages") >= PAGES
    made.close()
    assert made.batch_get_v1(keys, indices) == [False] * PAGES
    again = backend(url, host, enable_storage_metrics=True)
    before = _shown("loaded_pages")
    assert again.batch_get_v1(keys, indices) == [True] * PAGES
    assert _shown("loaded_pages") == before + PAGES
    assert again.get_stats().prefetch_pgs == [PAGES]


def _shown(name: str) -> float:
    """A counter as SGLang's `/metrics` shows it."""
    labels = {"tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}
    shown = prometheus_client.REGISTRY.get_sample_value(f"sglang:penstock_{name}_total", labels)
    assert shown is not None
    return shown


def test_a_metric_that_cannot_be_counted_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = backend(f"file://{tmp_path}/pool?size=4MiB", mha_host(), enable_storage_metrics=True)

    def full(name: str, amount: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(made._counters, "_sink", full)
    assert made.batch_set_v1(names(2), torch.arange(2 * PAGE)) == [True] * 2
    assert made.batch_get_v1(names(2), None) == [False] * 2
