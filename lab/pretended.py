"""Pools with blocks that no engine computed, named and described as engines do it.

Hashes are computed here with Python's own pickle and hashlib, as vLLM computes them.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

from lab.waiting import LIMIT
from penstock._native import Store
from penstock.pool.namespace import namespace_digest, publish_namespace
from penstock.vllm.samples import SAMPLE_BLOCKS, SAMPLE_LORA, SAMPLE_SALT

BLOCK = 16
NONE_HASH = hashlib.sha256(pickle.dumps("seed", protocol=5)).digest()
SPANS = [[0, 2, 0, 1], [2, 4, 0, 1]]
OPTIONS = "lora_dtype=auto"


def apart(text: str) -> str:
    """An equal text that is another object, as texts are that come over a socket. Pickle writes the
    same object once."""
    return "".join(list(text))


def hashes(
    tokens: Sequence[int],
    block: int = BLOCK,
    *,
    salt: str | None = None,
    lora: tuple[str, str, str] | None = None,
) -> list[bytes]:
    """Hashes of a prompt's full blocks, as vLLM's default computes them."""
    found: list[bytes] = []
    lora = lora and (apart(lora[0]), apart(lora[1]), apart(lora[2]))
    salt = salt and apart(salt)
    for at in range(0, len(tokens) // block * block, block):
        keys: list[Any] = [("lora", *lora)] if lora else []
        if salt and at == 0:
            keys.append(("cache_salt", salt))
        parent = found[-1] if found else NONE_HASH
        value = (parent, tuple(tokens[at : at + block]), tuple(keys) if keys else None)
        found.append(hashlib.sha256(pickle.dumps(value, protocol=5)).digest())
    return found


def samples() -> dict[str, str]:
    tokens = [token for block in SAMPLE_BLOCKS for token in block]
    size = len(SAMPLE_BLOCKS[0])
    return {
        "plain": hashes(tokens, size)[1].hex(),
        "salted": hashes(tokens, size, salt=SAMPLE_SALT)[1].hex(),
        "lora": hashes(tokens, size, lora=SAMPLE_LORA)[1].hex(),
    }


class Engine:
    """What an engine leaves in a pool: its description, and objects."""

    def __init__(self, store: Store, model: str = "llama", **changes: Any) -> None:
        self.store = store
        facts: dict[str, Any] = {
            "format": 2,
            "config": model,
            "hash": "sha256",
            "hash_seed": NONE_HASH.hex(),
            "block_size": BLOCK,
            "group": {"index": 0, "kind": "full_attention", "window": None},
            "spans": SPANS,
        }
        facts |= changes.pop("facts", {})
        self.namespace = namespace_digest(facts)
        lookup: dict[str, Any] = {
            "served": [f"{model}-served"],
            "hash_tokens": BLOCK,
            "samples": samples(),
            "adapter_options": OPTIONS,
            "namespaces": [self.namespace.hex()],
            "position": facts["group"]["index"],
        }
        lookup |= changes.pop("lookup", {})
        description = {"model": model, "lookup": lookup, **facts}
        for name in changes.pop("without", ()):
            del description[name]
        tenant: str | None = changes.pop("tenant", None)
        assert not changes
        if tenant is not None:
            description["tenant"] = tenant
            digest = hashlib.sha256(b"penstock tenant 1\n" + tenant.encode()).digest()
            self.namespace = self.namespace[:8] + bytes.fromhex("7e4a07") + digest[:5]
        self.description = description
        publish_namespace(store, self.namespace, description)

    def put(self, chunks: Iterable[bytes], spans: Sequence[Sequence[int]] = SPANS) -> None:
        """Stores blocks: all their spans, or these."""
        for chunk in chunks:
            for span in spans:
                self.store.put(self._key(chunk, span), b"KV", timeout=LIMIT)

    def evict(self, chunks: Iterable[bytes]) -> None:
        """Removes blocks."""
        keys = [self._key(chunk, span) for chunk in chunks for span in SPANS]
        self.store.remove(keys, timeout=LIMIT)

    def _key(self, chunk: bytes, span: Sequence[int]) -> bytes:
        edges = b"".join(edge.to_bytes(2, "little") for edge in span)
        return self.namespace + chunk.ljust(32, b"\0") + edges
