"""Engines with encryption keys over one pool: same tokens, nothing readable, nothing destroyed."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.engines.node import Node
from tests.e2e.conftest import BLOCK, KV_BYTES_PER_BLOCK, tokens
from tests.e2e.test_corruption import objects

pytestmark = pytest.mark.e2e

PROMPT = tokens(4 * BLOCK + 20, seed=1207)
SALTED = tokens(3 * BLOCK + 20, seed=1208)
PLAIN_HEADER, HEADER = 64, 128
A, B = (base64.b64encode(bytes(range(start, start + 32))).decode() for start in (0, 100))


def digests(folder: Path) -> dict[Path, str]:
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in objects(folder)}


def pieces(payload: bytes) -> set[bytes]:
    """32 bytes of every 16 KiB: of KV in float32, which repeats by accident nowhere."""
    cut = {payload[at : at + 32] for at in range(0, len(payload), 16 << 10)}
    return {piece for piece in cut if len(set(piece)) > 8}


def test_only_engines_with_the_key_share(
    llama: Path, plain: Node, tmp_path: Path, start: Callable[..., Node]
) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text(f"a:{A}\n")
    key_file.chmod(0o600)
    folder, other_folder = tmp_path / "pool", tmp_path / "plaintext"
    pool = f"file://{folder}?size=1GiB"
    cold, own_hit = plain.ask(PROMPT), plain.ask(PROMPT)
    salted = plain.ask(SALTED)

    settings = {"penstock.encryption_key_file": str(key_file)}
    with start(llama, pool=pool, settings=settings) as first:
        assert first.ask(PROMPT).tokens == cold.tokens
        first.ask(SALTED, cache_salt="a tenant's")
        first.wait_for("stored_blocks", 7)
        assert "encrypted with key a" in first.log.read_text()
        assert A[:8] not in first.log.read_text()
    stored = digests(folder)
    assert len(stored) == 7

    with start(llama, pool=pool, env={"PENSTOCK_ENCRYPTION_KEYS": f"b:{B}\na:{A}"}) as second:
        answer = second.ask(PROMPT)
        assert answer.cached == own_hit.cached == 4 * BLOCK
        assert answer.text == own_hit.text
        # A tenant's blocks are found and opened with its salt, and without it not found at all.
        answer = second.ask(SALTED, cache_salt="a tenant's")
        assert (answer.cached, answer.tokens) == (3 * BLOCK, salted.tokens)
        counters = second.counters()
        assert counters["loaded_tokens"] == 7 * BLOCK
        assert counters.get("load_failed_blocks", 0) == 0
        assert second.ask(SALTED, cache_salt="another's").cached == 0
        second.wait_for("stored_blocks", 3)
    seen = digests(folder)
    assert seen.items() >= stored.items()

    with start(llama, pool=pool) as stranger:
        for _ in range(2):
            answer = stranger.ask(PROMPT)
            assert answer.tokens == cold.tokens
            stranger.forget()
        counters = stranger.counters()
        assert counters.get("loaded_tokens", 0) == 0
        # Met once; then it is known that they cannot be read.
        assert counters["foreign_objects"] >= 1
        assert counters["loads"] == 1
        assert counters.get("rejected_objects", 0) == 0
        assert "penstock.encryption_key_file" in stranger.log.read_text()
    assert digests(folder) == seen

    # What an engine without keys stores is the plaintext to look for.
    with start(llama, pool=f"file://{other_folder}?size=1GiB") as other:
        other.ask(PROMPT)
        other.ask(SALTED, cache_salt="a tenant's")
        other.wait_for("stored_blocks", 7)
    readable = [path.read_bytes() for path in objects(other_folder)]
    assert all(len(value) == PLAIN_HEADER + KV_BYTES_PER_BLOCK for value in readable)
    wanted = set().union(*(pieces(value[PLAIN_HEADER:]) for value in readable))
    assert len(wanted) > 100
    everything = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert not any(piece in everything for piece in wanted)
    assert all(path.stat().st_size == HEADER + KV_BYTES_PER_BLOCK for path in stored)
