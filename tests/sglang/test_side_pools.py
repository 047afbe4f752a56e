"""Models whose pages have parts in several host pools: the second version of SGLang's interface."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)

from tests.sglang.engines import (
    PAGE,
    Engine,
    backend,
    config,
    fill,
    mamba_host,
    mha_host,
    names,
    page_bytes,
    prompt,
)
from tests.sglang.test_faults import AnswersSome
from tests.sglang.test_threads import hashes

PAGES = 6


def hybrid(url: str, side_state: bool = False) -> tuple[Any, Any, Any]:
    """A backend with KV and recurrent states, and both host pools."""
    kv, states = mha_host(), mamba_host(side_state=side_state)
    made = backend(url, kv)
    made.register_mem_host_pool_v2(kv, PoolName.KV)
    made.register_mem_host_pool_v2(states, PoolName.MAMBA)
    return made, kv, states


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize("side_state", [False, True], ids=["in place", "copied"])
def test_states_come_back(layout: str, side_state: bool, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?size=64MiB"
    keys = names(PAGES)
    source, target = (mamba_host(layout, side_state) for _ in range(2))
    storing, loading = (backend(url, mha_host()) for _ in range(2))
    for made, host in ((storing, source), (loading, target)):
        made.register_mem_host_pool_v2(host, PoolName.MAMBA)
    form = storing._pools["mamba"].pages.description["form"]
    assert form == ("flat" if side_state else "pieces")
    fill(source, seed=1)
    fill(target, seed=2)
    places = torch.tensor([9, 3, 7, 1, 12, 20])
    stored = PoolTransfer(PoolName.MAMBA, host_indices=torch.arange(PAGES), keys=keys)
    assert storing.batch_set_v2([stored]) == {"mamba": [True] * PAGES}
    wanted = PoolTransfer(PoolName.MAMBA, host_indices=places, keys=keys)
    assert loading.batch_get_v2([wanted]) == {"mamba": [True] * PAGES}
    for n, place in enumerate(places.tolist()):
        assert page_bytes(target, place) == page_bytes(source, n)


def test_states_of_ranks_keep_apart_where_kv_does_not(tmp_path: Path) -> None:
    """Latent attention with recurrent states: SGLang has every rank store its own states."""
    url = f"file://{tmp_path}/pool?size=64MiB"
    ranks = []
    for rank in range(2):
        made, _, _ = hybrid(url)
        config_of_rank = made._known
        config_of_rank._config.is_mla_model = True
        config_of_rank._config.tp_rank, config_of_rank._config.tp_size = rank, 2
        made.register_mem_host_pool_v2(mamba_host(), PoolName.MAMBA)
        ranks.append(made._pools["mamba"].namespace.digest)
    assert ranks[0] != ranks[1]


@pytest.mark.parametrize("objects", [1, 4, 64])
def test_hits_are_those_of_sglangs_own_backend(
    objects: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same pages in both; then every question has the same answer, whatever the pieces of a
    look-up."""
    monkeypatch.setattr("penstock.sglang.backend.LOOKUP_OBJECTS", objects)
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "file"))
    rng = random.Random(5)
    for case in range(40):
        made, kv, states = hybrid("memory://?size=16MiB")
        own = HiCacheFile(config({}))
        own.clear()
        own.register_mem_pool_host(kv)
        own.register_mem_host_pool_v2(states, PoolName.MAMBA)
        keys = names(PAGES, f"{case} ")
        for place, key in enumerate(keys):
            if rng.random() < 0.8:
                indices = torch.arange(place * PAGE, (place + 1) * PAGE)
                assert made.batch_set_v1([key], indices) == [True]
                own.set(key, kv.get_data_page(place * PAGE))
            if rng.random() < 0.6:
                transfer = PoolTransfer(
                    PoolName.MAMBA, host_indices=torch.tensor([place]), keys=[key]
                )
                assert made.batch_set_v2([transfer]) == own.batch_set_v2([transfer])
        for policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
            for window in (0, 1, 2, 3):
                asked = PoolTransfer(PoolName.MAMBA, keys=keys[:window] or None, hit_policy=policy)
                mine, theirs = (each.batch_exists_v2(keys, [asked]) for each in (made, own))
                assert mine.kv_hit_pages == theirs.kv_hit_pages
                assert mine.restorable_prefix_pages == theirs.restorable_prefix_pages
                assert mine.extra_pool_hit_pages == theirs.extra_pool_hit_pages


@pytest.mark.parametrize("policy", [PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES])
def test_a_slow_pool_finds_what_it_answers_in_time(
    policy: PoolHitPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _, _ = hybrid("memory://?size=64MiB")
    keys = names(300)
    assert all(made.batch_set_v1(keys, torch.arange(PAGE).repeat(300)))
    # A state at every third page.
    kept = keys if policy == PoolHitPolicy.ALL_PAGES else keys[2::3]
    states = PoolTransfer(PoolName.MAMBA, host_indices=torch.zeros(len(kept)).long(), keys=kept)
    assert all(made.batch_set_v2([states])["mamba"])
    asked = PoolTransfer(PoolName.MAMBA, hit_policy=policy)
    everything = made.batch_exists_v2(keys, [asked]).restorable_prefix_pages
    assert everything[-1] == 300
    pool = AnswersSome(made, 200)
    monkeypatch.setattr(made._store, "_store", pool)
    found = made.batch_exists_v2(keys, [asked])
    in_time = found.extra_pool_hit_pages[PoolName.KV]
    assert 0 < in_time <= 100
    assert found.restorable_prefix_pages == [pages for pages in everything if pages <= in_time]
    assert found.kv_hit_pages == found.restorable_prefix_pages[-1]
    # Both parts of the first page are missing: no other piece is asked for.
    pool.asked.clear()
    assert made.batch_exists_v2([*names(1, "another"), *keys], [asked]).kv_hit_pages == 0
    assert pool.asked == [64]


def test_a_policy_that_does_not_shorten_hits(tmp_path: Path) -> None:
    made, _, _ = hybrid(f"file://{tmp_path}/pool?size=64MiB")
    keys = names(PAGES)
    assert made.batch_set_v1(keys, torch.arange(PAGES * PAGE)) == [True] * PAGES
    asked = PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    found = made.batch_exists_v2(keys, [asked])
    assert found.kv_hit_pages == PAGES
    assert PoolName.MAMBA not in found.extra_pool_hit_pages
    unknown = PoolTransfer(PoolName.SWA)
    assert made.batch_exists_v2(keys, [unknown]).kv_hit_pages == 0
    assert made.batch_get_v2([PoolTransfer(PoolName.SWA, keys=keys)]) == {"swa": [False] * PAGES}


def test_a_model_whose_kv_is_in_side_pools_only(tmp_path: Path) -> None:
    """Its own host pool only counts pages."""
    made, kv, _ = hybrid(f"file://{tmp_path}/pool?size=64MiB")
    kv.kv_buffer = None
    made = backend(f"file://{tmp_path}/pool?size=64MiB", kv)
    made.register_mem_host_pool_v2(mamba_host(), PoolName.MAMBA)
    keys = names(PAGES)
    assert made.batch_set_v1(keys, torch.arange(PAGES * PAGE)) == [True] * PAGES
    assert made.batch_exists(keys) == PAGES
    states = PoolTransfer(PoolName.MAMBA, keys=keys[:4], host_indices=torch.arange(4))
    assert made.batch_exists_v2(keys, [states]).kv_hit_pages == 0
    assert made.batch_set_v2([states]) == {"mamba": [True] * 4}
    assert made.batch_exists_v2(keys, [states]).kv_hit_pages == 4


def test_sglangs_threads_carry_states(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?size=64MiB"
    key = prompt(PAGES * PAGE)
    with Engine(url, states=True) as first, Engine(url, states=True) as second:
        pages, stored = first.back_up(key, hashes(key))
        assert stored == PAGES * PAGE
        assert len(pages) == PAGES + 1
        assert second.prefetch(key) == pages
        # A prompt without its own state: as far as there is one.
        assert second.prefetch(prompt((PAGES + 2) * PAGE)) == pages
