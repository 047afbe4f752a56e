"""Whose pages are found: never those of other KV."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from penstock.errors import ConfigError
from penstock.pool import Pool, namespace_digest
from penstock.sglang import compat
from penstock.sglang.settings import Settings
from penstock.vllm.groups import Group
from tests.connector.engine import PlainEngine
from tests.sglang.engines import (
    LAYOUTS,
    PAGE,
    backend,
    config,
    extra_config,
    fill,
    mha_host,
    mla_host,
    names,
    page_bytes,
    serving,
    write_model,
)

PAGES = 4


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/pool?size=64MiB"


def store(made: Any, host: Any) -> None:
    fill(host)
    assert made.batch_set_v1(names(PAGES), torch.arange(PAGES * PAGE)) == [True] * PAGES


def finds(made: Any) -> int:
    """Pages found; what is not found must not be loaded either."""
    found: int = made.batch_exists(names(PAGES))
    loaded = made.batch_get_v1(names(PAGES), torch.arange(PAGES * PAGE))
    assert loaded == [place < found for place in range(PAGES)]
    return found


def test_two_engines_of_one_kind_share(url: str) -> None:
    host = mha_host()
    store(backend(url, host), host)
    assert finds(backend(url, mha_host(), model_name="under another name")) == PAGES


def test_pages_are_found_under_another_path(url: str, model: Path, tmp_path: Path) -> None:
    host = mha_host()
    store(backend(url, host), host)
    with serving(write_model(tmp_path / "the same weights")):
        assert finds(backend(url, mha_host())) == PAGES
    with serving(model):
        assert finds(backend(url, mha_host())) == PAGES


HOSTS: dict[str, Callable[[], Any]] = {
    "type of the KV": lambda: mha_host(dtype=torch.float16),
    "number of heads": lambda: mha_host(heads=4),
    "number of layers": lambda: mha_host(layers=2),
    **{layout: lambda layout=layout: mha_host(layout) for layout in LAYOUTS[1:]},
}


@pytest.mark.parametrize("other", HOSTS)
def test_other_kv_is_never_found(url: str, other: str) -> None:
    host = mha_host()
    store(backend(url, host), host)
    assert finds(backend(url, HOSTS[other]())) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"attention_backend": "triton"},
        {"json_model_override_args": '{"rope_theta": 1}'},
    ],
    ids=lambda options: next(iter(options)),
)
def test_pages_of_another_computation_are_never_found(
    url: str, model: Path, options: dict[str, Any]
) -> None:
    host = mha_host()
    store(backend(url, host), host)
    with serving(model, **options):
        assert finds(backend(url, mha_host())) == 0


def test_pages_of_other_weights_are_never_found(url: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", seed=1)
    with serving(folder):
        host = mha_host()
        store(backend(url, host), host)
        write_model(folder, seed=2)
        assert finds(backend(url, mha_host())) == 0
        write_model(folder, seed=1)
        assert finds(backend(url, mha_host())) == PAGES
        (folder / "config.json").write_text('{"rope_theta": 5}')
        assert finds(backend(url, mha_host())) == 0


def test_weights_of_another_format_in_the_folder_are_others(url: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", seed=1)
    (folder / "model.pt").write_bytes(b"other weights")
    host = mha_host()
    with serving(folder):
        store(backend(url, host), host)
    with serving(folder, load_format="pt"):
        assert finds(backend(url, mha_host())) == 0
    with serving(folder, load_format="safetensors"):
        assert finds(backend(url, mha_host())) == PAGES


def test_a_version_of_sglang_shares_with_itself_only(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = mha_host()
    store(backend(url, host), host)
    monkeypatch.setattr(compat, "installed_version", lambda name: "0.5.24")
    assert finds(backend(url, mha_host())) == 0


def test_salts_and_names_of_models_keep_apart(url: str) -> None:
    host = mha_host()
    store(backend(url, host, {"salt": "a"}), host)
    assert finds(backend(url, mha_host())) == 0
    assert finds(backend(url, mha_host(), {"salt": "a"})) == PAGES
    assert finds(backend(url, mha_host(), {"salt": "a", "model_id": "mine"})) == 0


def test_an_adapter_trained_again_under_its_path_never_hits(
    url: str, model: Path, tmp_path: Path
) -> None:
    """SGLang's number of an adapter, which is in its pages' hashes, is made of name and path."""
    folder = write_model(tmp_path / "adapter", seed=1)
    options = {"enable_lora": True, "lora_paths": [f"a={folder}"]}
    with serving(model, **_resolved(options)):
        host = mha_host()
        store(backend(url, host), host)
        assert finds(backend(url, mha_host())) == PAGES
    write_model(folder, seed=2)
    with serving(model, **_resolved(options)):
        assert finds(backend(url, mha_host())) == 0


def _resolved(options: dict[str, Any]) -> dict[str, Any]:
    """As SGLang resolves --lora-paths."""
    from sglang.srt.lora.lora_registry import LoRARef

    name, _, path = options["lora_paths"][0].partition("=")
    number = LoRARef.deterministic_id(name, path)
    return options | {"lora_paths": [LoRARef(lora_id=number, lora_name=name, lora_path=path)]}


def test_ranks_keep_apart(url: str) -> None:
    first = mha_host()
    store(backend(url, first, tp_rank=0, tp_size=2), first)
    assert finds(backend(url, mha_host(), tp_rank=0, tp_size=2)) == PAGES
    assert finds(backend(url, mha_host(), tp_rank=1, tp_size=2)) == 0
    assert finds(backend(url, mha_host(), tp_rank=0, tp_size=4)) == 0
    assert finds(backend(url, mha_host(), pp_rank=1, pp_size=2)) == 0
    assert finds(backend(url, mha_host(), attn_cp_rank=1, attn_cp_size=2)) == 0


def test_ranks_share_what_all_of_them_hold(url: str) -> None:
    """Latent attention: one rank writes, all ranks read."""
    host = mla_host()
    writing = backend(url, host, is_mla_model=True, tp_rank=0, tp_size=2)
    store(writing, host)
    reading = backend(url, mla_host(), is_mla_model=True, tp_rank=1, tp_size=2)
    assert finds(reading) == PAGES
    for made in (writing, reading):
        made.register_mem_host_pool_v2(mla_host(), "draft")
    assert writing._pools["draft"].namespace.digest == reading._pools["draft"].namespace.digest


@pytest.mark.parametrize("name", ["draft", "draft_swa"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_drafter_that_not_all_ranks_store_is_refused(url: str, rank: int, name: str) -> None:
    """Each rank has its own heads; beside latent attention SGLang has one rank store a drafter."""
    made = backend(url, mla_host(), is_mla_model=True, tp_rank=rank, tp_size=2)
    with pytest.raises(ConfigError, match=f"'{name}'.* SGLang has only one rank store it"):
        made.register_mem_host_pool_v2(mha_host(), name)
    alone = backend(url, mla_host(), is_mla_model=True)
    alone.register_mem_host_pool_v2(mha_host(), name)
    with_heads = backend(url, mha_host(), tp_rank=rank, tp_size=2)
    with_heads.register_mem_host_pool_v2(mha_host(), name)


def test_sglang_has_one_rank_store_a_drafter() -> None:
    """What the refusal rests on. If this fails, SGLang may have all ranks store it."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    reader = SimpleNamespace(backup_skip=True, storage_backend_type="dynamic")
    stored = {
        name: HybridCacheController.should_backup(reader, PoolTransfer(name))
        for name in (PoolName.DRAFT, PoolName.DRAFT_SWA, PoolName.MAMBA)
    }
    assert stored == {PoolName.DRAFT: False, PoolName.DRAFT_SWA: False, PoolName.MAMBA: True}


def test_engines_of_other_sizes_share_pages_cut_by_heads(url: str) -> None:
    """SGLang's `tp_lcm_size`, in the layout that has heads outermost."""
    cut = {"tp_lcm_size": 4}
    whole = mha_host("page_head", heads=4)
    storing = backend(url, whole, tp_size=1, should_split_heads=True, **cut)
    store(storing, whole)
    heads = whole.get_data_page(0).view(torch.int16).view(2, 4, PAGE, 3, 8)
    for size in (2, 4):
        for rank in range(size):
            host = mha_host("page_head", heads=4 // size)
            split = {"tp_size": size, "tp_rank": rank, "should_split_heads": size < 4}
            assert finds(backend(url, host, **split, **cut)) == PAGES
            mine = heads[:, rank * 4 // size : (rank + 1) * 4 // size]
            loaded = host.get_data_page(0).view(torch.int16)
            assert torch.equal(loaded.view(mine.shape), mine)
    assert finds(backend(url, mha_host("page_head", heads=4))) == 0


def test_types_that_sglang_stores_as_bytes(url: str, model: Path) -> None:
    """fp8 in two forms: the same bytes stand for other numbers."""
    with pytest.raises(ConfigError, match="does not tell what type it is"):
        backend(url, mha_host(dtype=torch.float8_e4m3fn))
    with serving(model, kv_cache_dtype="fp8_e4m3"):
        host = mha_host(dtype=torch.float8_e4m3fn)
        assert host.dtype == torch.uint8
        store(backend(url, host), host)
        assert finds(backend(url, mha_host(dtype=torch.float8_e4m3fn))) == PAGES
    with serving(model, kv_cache_dtype="fp8_e5m2"):
        assert finds(backend(url, mha_host(dtype=torch.float8_e5m2))) == 0


def test_what_sglang_tells_of_the_type_counts(url: str, model: Path) -> None:
    """A setting that others left behind does not make one type of two."""
    stale = {"kv_dtype": "fp8_e4m3"}
    with serving(model, kv_cache_dtype="fp8_e4m3"):
        host = mha_host(dtype=torch.float8_e4m3fn)
        store(backend(url, host, stale), host)
        assert finds(backend(url, mha_host(dtype=torch.float8_e4m3fn))) == PAGES
    with (
        serving(model, kv_cache_dtype="fp8_e5m2"),
        pytest.raises(ConfigError, match="'fp8_e4m3', but SGLang's --kv-cache-dtype is 'fp8_e5m2'"),
    ):
        backend(url, mha_host(dtype=torch.float8_e5m2), stale)
    with serving(model, kv_cache_dtype="auto"):
        assert finds(backend(url, mha_host(dtype=torch.float8_e4m3fn), stale)) == PAGES
        other = {"kv_dtype": "fp8_e5m2"}
        assert finds(backend(url, mha_host(dtype=torch.float8_e5m2), other)) == 0
        with pytest.raises(ConfigError, match="does not tell what type it is"):
            backend(url, mha_host(dtype=torch.float8_e4m3fn), {"kv_dtype": "auto"})


def test_a_drafter_may_have_a_type_of_its_own(url: str, model: Path) -> None:
    digests = []
    for dtype in ("fp8_e4m3", "fp8_e5m2"):
        options = {"kv_cache_dtype": "fp8_e4m3", "speculative_draft_kv_cache_dtype": dtype}
        with serving(model, **options):
            made = backend(url, mha_host(dtype=torch.float8_e4m3fn), {"kv_dtype": "fp8_e4m3"})
            made.register_mem_host_pool_v2(mha_host(dtype=torch.float8_e4m3fn), "draft")
            digests.append([made._pools[name].namespace.digest for name in ("kv", "draft")])
    (kv, draft), (same_kv, other_draft) = digests
    assert kv == same_kv
    assert draft != other_draft


def test_unknown_weights_are_refused(url: str, tmp_path: Path) -> None:
    with serving(tmp_path), pytest.raises(ConfigError, match="model_id"):
        backend(url, mha_host())
    with serving(tmp_path):
        host = mha_host()
        store(backend(url, host, {"model_id": "revision 7"}), host)
        assert finds(backend(url, mha_host(), {"model_id": "revision 8"})) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pool": ""}, "no pool"),
        ({"salts": "a"}, "unknown key 'salts'"),
        ({"lookup_timeout": 0}, "lookup_timeout"),
        ({"pool": "valkey://user:secret@[", "x": 1}, "unknown key 'x'"),
    ],
)
def test_wrong_settings_are_refused(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_POOL", raising=False)
    with pytest.raises(ConfigError, match=message) as raised:
        Settings.parse(extra_config("memory://?size=1MiB") | settings)
    assert "secret" not in str(raised.value)


def test_a_sglang_whose_hashes_ignore_salts_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache import utils

    monkeypatch.setattr(utils, "storage_namespace_seed", lambda extra_key, cache_salt: None)
    with pytest.raises(ConfigError, match="would share pages"):
        backend(url, mha_host())


def test_vllm_never_has_such_a_namespace(url: str) -> None:
    """A description of vLLM's names no engine, and always has what SGLang's never has."""
    host = mha_host()
    made = backend(url, host)
    [pool] = made._pools.values()
    ours = {key: value for key, value in pool.namespace.facts.items() if key != "model"}
    assert namespace_digest(ours) == pool.namespace.digest
    assert ours["engine"] == "sglang"
    group = Group(0, "full_attention", PAGE, None, "torch.bfloat16", ())
    [(digest, theirs)] = PlainEngine([group]).agreement.describe()
    assert digest != pool.namespace.digest
    assert "engine" not in theirs
    always = {"hash_seed", "spans", "page_tokens", "interior", "group"}
    assert always <= theirs.keys()
    assert not always & ours.keys()


def test_operators_see_what_lies_in_the_pool(url: str) -> None:
    from penstock._native import Store

    host = mha_host()
    store(backend(url, host), host)
    used = Pool(Store.open(url), "any").namespaces()
    [shown] = [one for one in used if one.description and "engine" in one.description]
    assert shown.objects == PAGES
    assert shown.description is not None
    assert shown.description["model"] == "served"
    assert shown.nbytes > PAGES * len(page_bytes(host, 0))


def test_the_factory_takes_the_backend_as_it_is_configured(url: str) -> None:
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    extra = extra_config(url)
    made = StorageBackendFactory.create_backend("dynamic", config(extra), None)
    assert type(made).__module__ == "penstock.sglang.backend"
