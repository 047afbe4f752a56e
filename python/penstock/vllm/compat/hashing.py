"""What whoever looks for an engine's blocks has to know: names, and how the engine hashes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from penstock._native import PrefixHasher
from penstock.vllm.adapters import Adapter
from penstock.vllm.compat.adapters import adapter, adapter_options
from penstock.vllm.compat.drafts import drops_last_block
from penstock.vllm.compat.requests import none_hash
from penstock.vllm.samples import SAMPLE_BLOCKS, SAMPLE_LORA, SAMPLE_SALT

logger = logging.getLogger("vllm.penstock")


def lookup_facts(vllm_config: Any, hash_tokens: int) -> dict[str, Any]:
    """Plain JSON: the names that the model is served under, the tokens of a block hash, whether
    vLLM takes a block less than it finds, samples of hashes by vLLM's own functions, and the
    options that go into an adapter's digest.

    Whoever computes hashes without this vLLM can tell by the samples whether they are the same.
    """
    served = vllm_config.model_config.served_model_name
    return {
        "served": [served] if isinstance(served, str) else list(served or ()),
        "hash_tokens": hash_tokens,
        "drops_last": drops_last_block(vllm_config),
        "samples": _samples(vllm_config),
        "adapter_options": (
            None if vllm_config.lora_config is None else adapter_options(vllm_config)
        ),
    }


def prompt_hasher(vllm_config: Any, hash_tokens: int) -> Callable[[Any, list[int]], list[bytes]]:
    """A function: a request and the tokens of another prompt → the hashes of that prompt's blocks,
    as this vLLM computes them under the request's adapter and cache salt. It does not hold the GIL
    while it hashes. It raises ConfigError if these are no tokens, or if the algorithm is unknown.
    """

    @functools.cache
    def hasher() -> PrefixHasher:
        # The seed is set once the engine core is up.
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        return PrefixHasher(algorithm, none_hash(), hash_tokens)

    def hashes(request: Any, tokens: list[int]) -> list[bytes]:
        lora: list[str] = []
        if (asked := request.lora_request) is not None:
            known = adapter(request)
            digest = "" if known is None else known.digest
            lora = [asked.lora_name, asked.lora_path, *([digest] if digest else [])]
        return hasher().prefix(tokens, lora=lora, cache_salt=request.cache_salt).hashes

    return hashes


def _samples(vllm_config: Any) -> dict[str, str]:
    try:
        samples = {"plain": _sample(vllm_config), "salted": _sample(vllm_config, SAMPLE_SALT)}
        if vllm_config.lora_config is not None:
            samples["lora"] = _sample(vllm_config, lora=SAMPLE_LORA)
    except Exception as error:
        # A vLLM that hashes in another way is served all the same; routers are told nothing.
        logger.warning("Penstock: cannot tell routers how blocks are hashed: %r", error)
        return {}
    return samples


def _sample(
    vllm_config: Any, salt: str | None = None, lora: tuple[str, str, str] | None = None
) -> str:
    """The hash of the second of two blocks, as vLLM computes it for a request."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    algorithm = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    request: Any = SimpleNamespace(
        mm_features=[], prompt_embeds=None, cache_salt=salt, lora_request=None
    )
    if lora is not None:
        name, path, digest = lora
        request.lora_request = SimpleNamespace(lora_name=name, lora_path=path)
        request.penstock_adapter = Adapter(1, path, "", digest)
    hashed: Any = None
    for number, tokens in enumerate(SAMPLE_BLOCKS):
        at = number * len(tokens)
        extra, _ = kv_cache_utils.generate_block_hash_extra_keys(request, at, at + len(tokens), 0)
        hashed = kv_cache_utils.hash_block_tokens(algorithm, hashed, tokens, extra)
    return bytes(hashed).hex()
