"""Tenants over one pool: each finds what is its own, and the pool says whose its objects are."""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from lab.engines.node import Node
from penstock._native import tenant_namespace
from penstock.cli import main
from penstock.pool import NamespaceUsage
from tests.e2e.conftest import BLOCK, KV_BYTES_PER_BLOCK, tokens

pytestmark = pytest.mark.e2e

BLOCKS = 4
LENGTH = BLOCKS * BLOCK + 20


def of(tenant: str | None, salt: str | None) -> dict[str, Any]:
    """Options of a request that gives this name and this salt."""
    params = {} if tenant is None else {"penstock.tenant": tenant}
    return {"cache_salt": salt, "extra_args": {"kv_transfer_params": params}}


RED, BLUE = of("red", "red's salt"), of("blue", "blue's salt")
EVERYBODY = of(None, None)


def by_tenant(pool: str) -> dict[str, NamespaceUsage]:
    """The namespaces of vLLM's engines by their tenants. That of everybody has no name."""
    with penstock.open(pool) as opened:
        used = opened.namespaces()
    found = {}
    for one in used:
        if one.description and "model" in one.description:
            name = one.description.get("tenant", "")
            assert name not in found
            found[name] = one
    return found


def wait_described(node: Node, pool: str, *tenants: str) -> dict[str, NamespaceUsage]:
    """The namespaces, once those of `tenants` have all blocks of a prompt and are described."""
    for _ in range(100):
        found = by_tenant(pool)
        if all(name in found and found[name].objects >= BLOCKS for name in tenants):
            return found
        node.ask([7, 8, 9], max_tokens=2)
    raise AssertionError(found)


@pytest.mark.parametrize(
    "any_pool", ["file", "valkey-unix", pytest.param("shm", marks=pytest.mark.full)], indirect=True
)
def test_each_tenant_loads_what_it_stored_and_nothing_else(
    any_pool: str, llama: Path, plain: Node, start: Callable[..., Node]
) -> None:
    prompt = tokens(LENGTH, seed=zlib.crc32(any_pool.encode()))
    cold, own_hit = plain.ask(prompt), plain.ask(prompt)
    with start(llama, pool=any_pool) as first:
        for options in (RED, BLUE):
            answer = first.ask(prompt, **options)
            assert (answer.cached, answer.tokens) == (0, cold.tokens)
        first.wait_for("stored_blocks", 2 * BLOCKS)
        # Nobody else finds it: neither with a name alone nor with a salt alone.
        assert first.ask(prompt, **EVERYBODY).cached == 0
        first.wait_for("stored_blocks", 3 * BLOCKS)
        used = wait_described(first, any_pool, "", "red", "blue")
        assert {name: one.objects for name, one in used.items()} == dict.fromkeys(
            ("", "red", "blue"), BLOCKS
        )
        for name in ("red", "blue"):
            assert used[name].digest == tenant_namespace(used[""].digest, name)
            assert used[name].description == (used[""].description or {}) | {"tenant": name}

    with start(llama, pool=any_pool) as second:
        # A name alone owns nothing: its request shares with everybody, as before.
        for options in (RED, BLUE, of("red", None)):
            answer = second.ask(prompt, **options)
            assert answer.cached == own_hit.cached == BLOCKS * BLOCK
            assert answer.text == own_hit.text
        for options in (of("red", "guessed"), of(None, "salt alone"), of("green", "green's")):
            answer = second.ask(prompt, **options)
            assert (answer.cached, answer.tokens) == (0, cold.tokens)
        counters = second.counters()
        assert counters["loaded_tokens"] == 3 * BLOCKS * BLOCK
        assert counters.get("load_failed_blocks", 0) == 0


@pytest.mark.parametrize("host_tier", [False, True])
def test_with_one_salt_each_name_has_its_own(
    host_tier: bool, llama: Path, plain: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    pool = f"file://{tmp_path}/pool?size=1GiB"
    prompt = tokens(LENGTH, seed=16_05 + host_tier)
    cold, own_hit = plain.ask(prompt), plain.ask(prompt)
    names = [of("red", "one salt"), of("blue", "one salt")]
    with start(llama, pool=pool, settings={"penstock.host_tier": host_tier}) as node:
        for options in names:
            assert node.ask(prompt, **options).tokens == cold.tokens
            node.forget()
        node.wait_for("stored_blocks", 2 * BLOCKS)
        used = wait_described(node, pool, "red", "blue")
        assert used["red"].objects == used["blue"].objects == BLOCKS
        for options in (*names, *names):
            node.forget()
            answer = node.ask(prompt, **options)
            assert answer.cached == own_hit.cached
            assert answer.text == own_hit.text
        counters = node.counters()
        assert counters["loaded_tokens"] == 4 * BLOCKS * BLOCK
        assert (counters.get("kept_bytes", 0) > 0) == host_tier
        # Side by side, again and again.
        for number in range(8):
            node.forget()
            fresh = prompt[: -number - 1] + tokens(3 * BLOCK, seed=number)
            expected = plain.ask(fresh).tokens
            asked = [node.start(fresh, **options) for options in (*names, *names)]
            assert [node.answer(number).tokens for number in asked] == [expected] * 4
        assert node.counters().get("load_failed_blocks", 0) == 0


@pytest.mark.parametrize("kind", ["file", pytest.param("shm", marks=pytest.mark.full)])
def test_a_tenant_stays_within_its_quota_and_others_lose_nothing(
    kind: str, llama: Path, plain: Node, start: Callable[..., Node], tmp_path: Path
) -> None:
    name = f"test-{uuid.uuid4().hex}"
    base = f"file://{tmp_path}/pool" if kind == "file" else f"shm://{name}"
    quota = 6 * KV_BYTES_PER_BLOCK
    pool = f"{base}?size=256MiB&quota=tenant/red:{quota}"
    prompts = [tokens(LENGTH, seed=16_20 + number) for number in range(5)]
    cold = [plain.ask(prompt).tokens for prompt in prompts]
    try:
        with start(llama, pool=pool) as first:
            for options in (BLUE, RED):
                for prompt, expected in zip(prompts, cold, strict=True):
                    assert first.ask(prompt, **options).tokens == expected
                if options is BLUE:
                    first.wait_for("stored_blocks", len(prompts) * BLOCKS)
        used = by_tenant(pool)
        assert used["blue"].objects == len(prompts) * BLOCKS
        assert 0 < used["red"].nbytes <= quota
        with start(llama, pool=pool) as second:
            for prompt, expected in zip(prompts, cold, strict=True):
                answer = second.ask(prompt, **BLUE)
                assert (answer.cached, answer.tokens) == (BLOCKS * BLOCK, expected)
                assert second.ask(prompt, **RED).tokens == expected
        assert 0 < by_tenant(pool)["red"].nbytes <= quota
    finally:
        Path(f"/dev/shm/penstock-{name}").unlink(missing_ok=True)


def test_the_commands_work_on_a_tenants_namespace(
    llama: Path,
    start: Callable[..., Node],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pool = f"file://{tmp_path}/pool?size=1GiB"
    prompt = tokens(LENGTH, seed=16_07)

    def ran(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["pool", *arguments]) == 0
        return capsys.readouterr().out

    with start(llama, pool=pool) as node:
        node.ask(prompt, **RED)
        node.ask(prompt, **EVERYBODY)
        node.wait_for("stored_blocks", 2 * BLOCKS)
        red = wait_described(node, pool, "", "red")["red"].digest.hex()
        assert "tenant red" in ran("ls", pool)
        stats = json.loads(ran("stats", pool, "--namespace", red, "--json"))
        assert (stats["namespaces"], stats["objects"]) == (1, BLOCKS)
        ran("verify", pool, "--namespace", red)
        archive = str(tmp_path / "red.penstock")
        ran("export", pool, archive, "--namespace", red)
        assert json.loads(ran("purge", pool, "--namespace", red, "--yes", "--json")) == {
            # The description goes with its objects.
            "removed": BLOCKS + 1
        }
        assert list(by_tenant(pool)) == [""]
        node.forget()
        assert node.ask(prompt, **EVERYBODY).cached == BLOCKS * BLOCK
        ran("import", archive, pool)
        assert by_tenant(pool)["red"].objects == BLOCKS
        node.forget()
        assert node.ask(prompt, **RED).cached == BLOCKS * BLOCK
