"""What the service finds in real pools is what an engine would load."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock.lookup
from lab.pretended import BLOCK, OPTIONS, SPANS, Engine, hashes
from lab.waiting import LIMIT, eventually
from penstock._native import Store
from penstock.errors import Closed, ConfigError, Unreachable
from penstock.lookup import Lora, Question, Refused, Service
from penstock.lookup import service as service_module
from penstock.lookup.service import Settings
from penstock.vllm.adapters import content_digest, variant
from tests.servers import Server

FOREVER = 100 * LIMIT
# What the pool says is forgotten at once.
FORGETFUL = Settings(believe_found=1e-6, believe_missing=1e-6)


@pytest.fixture
def store(pool_url: str) -> Store:
    return Store.open(pool_url)


@pytest.fixture
def memory() -> Store:
    return Store.open("memory://?size=16MiB")


@pytest.fixture
def services() -> Iterator[list[Service]]:
    made: list[Service] = []
    yield made
    for service in made:
        service.close()


def prompt(blocks: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100_000) for _ in range(blocks * BLOCK)]


def tokens(service: Service, asked: list[int], **more: Any) -> int | None:
    [pool] = service.find("llama", asked, **more).pools
    return pool.tokens


def test_the_longest_prefix_of_whole_blocks(store: Store) -> None:
    engine, asked = Engine(store), prompt(10)
    chunks = hashes(asked)
    with Service([store], FORGETFUL) as service:
        assert tokens(service, asked) == 0
        engine.put(chunks[:4])
        assert tokens(service, asked) == 4 * BLOCK
        # Half of a block is none, and what lies behind a gap is of no use.
        engine.put(chunks[4:5], SPANS[:1])
        engine.put(chunks[5:])
        assert tokens(service, asked) == 4 * BLOCK
        engine.put(chunks[4:5])
        # The last token is left to compute.
        assert tokens(service, asked) == 9 * BLOCK
        assert tokens(service, [*asked, 7]) == 10 * BLOCK
        engine.evict(chunks[2:3])
        assert tokens(service, asked) == 2 * BLOCK
        assert tokens(service, prompt(10, seed=2)) == 0
        assert tokens(service, []) == 0


def test_answers_age(memory: Store, services: list[Service]) -> None:
    engine, asked = Engine(memory), prompt(3)
    beliefs = [(FOREVER, FOREVER), (FOREVER, 0.1), (0.3, FOREVER)]
    made = [Service([memory], Settings(believe_found=f, believe_missing=m)) for f, m in beliefs]
    services += made
    lasting, missing_ages, found_ages = made
    engine.put(hashes(asked)[:1])
    assert [tokens(each, asked) for each in (lasting, missing_ages)] == [BLOCK] * 2
    engine.put(hashes(asked))
    eventually(lambda: tokens(missing_ages, asked) == 2 * BLOCK)
    assert [tokens(each, asked) for each in made] == [BLOCK, 2 * BLOCK, 2 * BLOCK]
    engine.evict(hashes(asked))
    eventually(lambda: tokens(found_ages, asked) == 0)
    assert [tokens(each, asked) for each in made] == [BLOCK, 2 * BLOCK, 0]


def test_salts_adapters_and_tenants_are_kept_apart(memory: Store, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    digest = content_digest(tmp_path, variant(OPTIONS, is_3d=False))
    engine, asked = Engine(memory), prompt(4)
    engine.put(hashes(asked)[:1])
    engine.put(hashes(asked, salt="mine")[:2])
    engine.put(hashes(asked, lora=("sql", str(tmp_path), digest))[:3])
    with Service([memory], FORGETFUL, adapters={"sql": str(tmp_path)}) as service:
        assert tokens(service, asked) == BLOCK
        assert tokens(service, asked, cache_salt="mine") == 2 * BLOCK
        assert tokens(service, asked, cache_salt="yours") == 0
        assert tokens(service, asked, lora="sql") == 3 * BLOCK
        assert tokens(service, asked, lora=Lora("sql", str(tmp_path), digest)) == 3 * BLOCK
        assert tokens(service, asked, lora=Lora("sql", str(tmp_path), "other")) == 0
        with pytest.raises(ConfigError, match="--adapter NAME=PATH"):
            tokens(service, asked, lora="unknown")
        with pytest.raises(ConfigError, match="1 to 64 letters"):
            tokens(service, asked, tenant="")
        # Another content is another adapter.
        (tmp_path / "adapter_config.json").write_text('{"r": 8}')
        service.refresh()
        assert tokens(service, asked, lora="sql") == 0
        (tmp_path / "adapter_config.json").unlink()
        service.refresh()
        with pytest.raises(ConfigError, match="cannot be read"):
            tokens(service, asked, lora="sql")


def test_a_tenants_objects_count_for_its_salted_prompts(memory: Store) -> None:
    """Only the tenant's namespace is described, as nobody else has stored."""
    asked = prompt(4)
    Engine(memory, tenant="red").put(hashes(asked, salt="mine")[:2])
    with Service([memory], FORGETFUL) as service:
        assert tokens(service, asked, cache_salt="mine", tenant="red") == 2 * BLOCK
        assert tokens(service, asked, cache_salt="mine", tenant="blue") == 0
        assert tokens(service, asked, cache_salt="mine") == 0
        # Without a salt, a prompt is of no tenant.
        assert tokens(service, asked, tenant="red") == 0
        Engine(memory).put(hashes(asked)[:1])
        assert tokens(service, asked, tenant="red") == BLOCK


def test_several_pools_and_several_ways_to_serve_a_model(memory: Store, tmp_path: Path) -> None:
    other = Store.open(f"file://{tmp_path}/pool?size=16MiB")
    asked = prompt(4)
    Engine(memory).put(hashes(asked)[:1])
    narrow = Engine(other, facts={"kv_dtype": "fp8"})
    narrow.put(hashes(asked)[:2])
    Engine(other).put(hashes(asked)[:3])
    with Service([memory, other], aliases={"my-llama": "llama-served"}) as service:
        for name in ("llama", "llama-served", "my-llama"):
            found = service.find(name, asked)
            assert sorted((pool.url, pool.tokens) for pool in found.pools) == sorted(
                [
                    (memory.url, BLOCK),
                    (other.url, 2 * BLOCK),
                    (other.url, 3 * BLOCK),
                ]
            )
            assert found.prompt_tokens == len(asked)
        by_namespace = {pool.namespace: pool.tokens for pool in found.pools}
        assert by_namespace[narrow.namespace.hex()] == 2 * BLOCK


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"without": ["lookup"]}, "an older version of Penstock"),
        ({"facts": {"hash": "blake"}}, '"blake", which is not known'),
        ({"facts": {"hash": "sha256_cbor"}}, "'sha256_cbor' in a way that is not known"),
        ({"facts": {"hash_seed": "00"}}, "has 1 bytes, not 32"),
        ({"lookup": {"samples": {}}}, "in a way that is not known"),
        (
            {"facts": {"group": {"index": 0, "kind": "chunked", "window": None}}},
            "layers of the kind 'chunked'",
        ),
        ({"facts": {"spans": []}}, "must have its spans"),
        ({"facts": {"block_size": 24}}, "multiple of the tokens"),
        ({"facts": {"spans": "all"}}, "cannot be read"),
        ({"lookup": {"hash_tokens": 0}}, "multiple of the tokens"),
        ({"facts": {"block_size": 9000}, "lookup": {"hash_tokens": 9000}}, "1 to 8192 tokens"),
    ],
)
def test_what_is_not_known_is_refused(changes: dict[str, Any], says: str, memory: Store) -> None:
    Engine(memory, **changes)
    with Service([memory]) as service:
        with pytest.raises(Refused, match="llama") as refused:
            service.find("llama", [1])
        assert says in str(refused.value)
        assert not refused.value.is_unknown


def test_a_salt_that_is_hashed_in_another_way_is_refused(memory: Store) -> None:
    from lab.pretended import samples

    Engine(memory, lookup={"samples": {"plain": samples()["plain"]}})
    with Service([memory]) as service:
        assert tokens(service, [1]) == 0
        with pytest.raises(Refused, match="hashes the cache salt"):
            tokens(service, [1], cache_salt="mine")
        with pytest.raises(Refused, match="hashes LoRA adapters"):
            tokens(service, [1], lora=Lora("a", "b", "c"))


def test_an_older_description_is_replaced(memory: Store) -> None:
    asked = prompt(2)
    Engine(memory, without=["lookup"]).put(hashes(asked))
    with Service([memory]) as service:
        with pytest.raises(Refused, match="older version"):
            service.find("llama", asked)
        Engine(memory)
        service.refresh()
        assert tokens(service, asked) == BLOCK


def test_an_unknown_model_is_found_once_it_is_described(memory: Store) -> None:
    with Service([memory], Settings(refresh=1000)) as service:
        with pytest.raises(Refused, match="none is described yet") as refused:
            service.find("llama", [1])
        assert refused.value.is_unknown
        Engine(memory)
        service._read_at = -math.inf

        def is_known() -> bool:
            with contextlib.suppress(Refused):
                return tokens(service, [1]) == 0
            return False

        eventually(is_known)


def test_two_groups_with_a_window(memory: Store) -> None:
    """What a sliding window has left behind may be gone."""
    asked = [*prompt(8), 1]
    sliding = {"index": 1, "kind": "sliding_window", "window": 2 * BLOCK}
    groups = ({"n": 1}, {"n": 2, "group": sliding})
    # Each description names both namespaces.
    scratch = Store.open("memory://?size=1MiB")
    named = [Engine(scratch, facts=facts).namespace.hex() for facts in groups]
    first, second = (Engine(memory, facts=facts, lookup={"namespaces": named}) for facts in groups)
    chunks = hashes(asked)
    first.put(chunks)
    with Service([memory], FORGETFUL) as service:
        assert tokens(service, asked) == 0
        second.put(chunks[6:])
        assert tokens(service, asked) == 8 * BLOCK


@pytest.mark.parametrize("drops", [True, False])
def test_engines_with_a_drafter_and_without_share_the_models_blocks(
    memory: Store, drops: bool
) -> None:
    """Both are known. With an EAGLE or MTP head, an engine loads a block less than it finds."""
    asked = [*prompt(6), 1]
    scratch = Store.open("memory://?size=1MiB")
    # Its layers are on the block table of the model's.
    draft = {"draft": {"method": "eagle"}}
    named = [Engine(scratch, facts=facts).namespace.hex() for facts in ({}, draft)]
    # The engine without a drafter was the first to describe the namespace that they share.
    plain = Engine(memory)
    plain.put(hashes(asked))
    drafting = {"namespaces": named, "drops_last": drops}
    Engine(memory, lookup=drafting)
    drafter = Engine(memory, facts=draft, lookup=drafting | {"position": 1})
    drafter.put(hashes(asked)[:4])
    with Service([memory], FORGETFUL) as service:
        found = {pool.namespace: pool.tokens for pool in service.find("llama", asked).pools}
        assert found == {
            plain.namespace.hex(): 6 * BLOCK,
            drafter.namespace.hex(): (3 if drops else 4) * BLOCK,
        }


def test_a_pool_that_fails_says_so(tmp_path: Path) -> None:
    asked = prompt(4)
    with Server("valkey", tmp_path) as server:
        store = Store.open(server.unix_url)
        memory = Store.open("memory://?size=16MiB")
        for each in (store, memory):
            Engine(each).put(hashes(asked))
        with Service([store, memory], replace(FORGETFUL, timeout=LIMIT)) as service:
            assert [pool.tokens for pool in service.find("llama", asked).pools] == [48, 48]
            server.kill()
            failed, sound = service.find("llama", asked).pools
            assert (failed.tokens, failed.error) == (None, "unreachable")
            assert sound.tokens == 48
            service.refresh()
            assert service.failures == {store.url: "unreachable"}
    with pytest.raises(Unreachable):
        penstock.lookup.open([f"unix://{tmp_path}/valkey.sock"])


def test_a_pool_that_does_not_answer_in_time_says_so(valkey_server: Server) -> None:
    store, asked = Store.open(valkey_server.unix_url), prompt(4)
    Engine(store).put(hashes(asked))
    with Service([store], replace(FORGETFUL, timeout=0.3)) as service:
        valkey_server.freeze()
        [pool] = service.find("llama", asked).pools
        assert pool.tokens is None
        assert pool.error in {"timed_out", "unavailable", "unreachable"}
        valkey_server.thaw()


def test_a_frozen_pool_holds_up_nobody_else(tmp_path: Path) -> None:
    asked = prompt(4)
    with Server("valkey", tmp_path) as server:
        store = Store.open(server.unix_url)
        Engine(store).put(hashes(asked))
        memory = Store.open("memory://?size=16MiB")
        Engine(memory, "other").put(hashes(asked))
        with Service([store, memory], replace(FORGETFUL, timeout=FOREVER)) as service:
            assert tokens(service, asked) == 3 * BLOCK
            server.freeze()
            pending = [service.begin(Question("llama", asked)) for _ in range(3)]
            # All three wait, and this thread does not.
            assert all(not future.done() for one in pending for future in one.waits_for)
            [other] = service.find("other", asked).pools
            assert other.tokens == 3 * BLOCK
            server.kill()
            wait([future for one in pending for future in one.waits_for], LIMIT)
            errors = [one.found().pools[0].error for one in pending]
            assert set(errors) <= {"unavailable", "unreachable"}


def test_threads_agree_while_blocks_come(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine may take longer. Three late answers in a row would count as a failing pool.
    monkeypatch.setattr(service_module, "_IN_PLACE_SECONDS", LIMIT)
    settings = replace(FORGETFUL, timeout=LIMIT)
    engine, asked = Engine(store), prompt(60)
    chunks = hashes(asked)
    with Service([store], settings) as service, ThreadPoolExecutor(8) as threads:

        def ask(_: int) -> int:
            found = tokens(service, asked)
            assert found is not None
            return found

        answers = threads.map(ask, range(100))
        for chunk in chunks:
            engine.put([chunk])
        assert all(found % BLOCK == 0 for found in answers)
        assert tokens(service, asked) == 59 * BLOCK


def test_a_closed_service_says_so(memory: Store) -> None:
    Engine(memory)
    service = Service([memory])
    service.close()
    with pytest.raises(Closed):
        service.find("llama", [1])


def test_a_pool_is_needed() -> None:
    with pytest.raises(ConfigError, match="no pool"):
        penstock.lookup.open([])
