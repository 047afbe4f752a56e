"""Look-ups hash prompts as the installed vLLM does, for every algorithm that it has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.pretended import Engine, apart, hashes
from penstock._native import PrefixHasher
from penstock.errors import ConfigError
from penstock.lookup.models import models_of
from penstock.vllm import compat
from penstock.vllm.adapters import Adapter, NamedAdapters

kv_cache_utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=2, max_size=60)
PROMPTS = st.lists(st.integers(0, 200_000), max_size=200)
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


def algorithm(name: str) -> Any:
    from vllm.utils import hashing

    if name.startswith("xxhash") and hashing._xxhash is None:
        pytest.skip("xxhash is not installed")
    return hashing.get_hash_fn_by_name(name)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_as_vllm_hashes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = algorithm(name)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    kv_cache_utils.init_none_hash(function)

    @settings(max_examples=200)
    @given(PROMPTS, st.sampled_from([1, 3, 16, 64]), st.none() | TEXT, st.booleans(), TEXT, TEXT)
    def check(tokens, block, salt, has_lora, lora_name, lora_path) -> None:
        request: Any = SimpleNamespace(
            block_hashes=[],
            num_tokens=len(tokens),
            all_token_ids=tokens,
            mm_features=[],
            prompt_embeds=None,
            cache_salt=salt and apart(salt),
            lora_request=None,
        )
        if has_lora:
            request.lora_request = SimpleNamespace(
                lora_name=apart(lora_name), lora_path=apart(lora_path)
            )
        theirs = kv_cache_utils.get_request_block_hasher(block, function)(request)
        hasher = PrefixHasher(name, bytes(kv_cache_utils.NONE_HASH), block)
        lora = (lora_name, lora_path) if has_lora else ()
        ours = hasher.prefix(tokens, lora=lora, cache_salt=salt).hashes
        assert ours == [bytes(one).ljust(32, b"\0") for one in theirs]

    check()


@pytest.mark.parametrize("digest", [None, "", "the content's digest"])
def test_a_prompt_that_comes_next_is_hashed_like_its_request(digest: str | None) -> None:
    function = algorithm("sha256")
    kv_cache_utils.init_none_hash(function)
    tokens = list(range(1000, 1100))
    request: Any = SimpleNamespace(
        block_hashes=[],
        num_tokens=len(tokens),
        all_token_ids=tokens,
        mm_features=[],
        prompt_embeds=None,
        cache_salt="a salt",
        lora_request=None,
    )
    if digest is not None:
        # Adapters whose content is unknown are named by name and path alone.
        path = "/adapters/one"
        request.lora_request = SimpleNamespace(lora_name="one", lora_path=path, lora_int_id=1)
        request.penstock_adapter = Adapter(1, path, "", digest)
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"))
    ours = compat.prompt_hasher(config, 16)(request, tokens)
    with _named_adapters():
        theirs = kv_cache_utils.get_request_block_hasher(16, function)(request)
    assert ours == [bytes(one) for one in theirs]
    with pytest.raises(ConfigError, match="token ids"):
        compat.prompt_hasher(config, 16)(request, ["no token"])  # type: ignore[list-item]


@contextlib.contextmanager
def _named_adapters() -> Iterator[None]:
    """What naming adapters wraps is vLLM's own again afterwards."""
    from vllm.v1.engine.core import EngineCore

    config: Any = SimpleNamespace(lora_config=SimpleNamespace(lora_dtype="auto"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        for owner, name in (
            (kv_cache_utils, "_gen_lora_extra_hash_keys"),
            (EngineCore, "add_lora"),
        ):
            monkeypatch.setattr(owner, name, getattr(owner, name))
        compat.name_adapters(config, NamedAdapters())
        yield


@pytest.mark.parametrize("has_adapters", [False, True])
def test_an_engine_describes_how_it_hashes(
    has_adapters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.core import EngineCore

    function = algorithm("sha256_cbor")
    kv_cache_utils.init_none_hash(function)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="served"),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256_cbor"),
        lora_config=SimpleNamespace(lora_dtype="auto") if has_adapters else None,
        speculative_config=None,
    )
    if has_adapters:
        # What naming adapters wraps is vLLM's own again afterwards.
        for owner, name in (
            (kv_cache_utils, "_gen_lora_extra_hash_keys"),
            (EngineCore, "add_lora"),
        ):
            monkeypatch.setattr(owner, name, getattr(owner, name))
        compat.name_adapters(config, NamedAdapters())
    facts = compat.lookup_facts(config, 16)
    assert facts["served"] == ["served"]
    assert set(facts["samples"]) == {"plain", "salted"} | ({"lora"} if has_adapters else set())
    from penstock._native import Store

    store = Store.open("memory://?size=16MiB")
    engine = Engine(
        store,
        facts={"hash": "sha256_cbor", "hash_seed": bytes(kv_cache_utils.NONE_HASH).hex()},
        lookup={name: facts[name] for name in ("samples", "adapter_options", "served")},
    )
    from penstock.pool.namespace import read_namespace

    described = read_namespace(store, engine.namespace)
    assert described is not None
    [model] = models_of({engine.namespace: described}).known
    assert model.hashing.forms == set(facts["samples"])
    assert model.names == {"llama", "served"}


def test_the_pretended_hashes_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "seed")
    kv_cache_utils.init_none_hash(algorithm("sha256"))
    theirs = kv_cache_utils.hash_block_tokens(algorithm("sha256"), None, range(16), None)
    assert [bytes(theirs)] == hashes(range(16))
