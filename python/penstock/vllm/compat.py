"""What Penstock needs from vLLM's inside, for the versions it knows.

Every version check and every use of a name that vLLM does not document is here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import vllm
from packaging.version import Version
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from penstock.errors import ConfigError

SUPPORTED = ("0.32",)
"""Minor versions of vLLM that the end-to-end tests run against."""

_SEEDED_HASHES = ("xxhash", "xxhash_cbor")


def check_version() -> None:
    """Refuses a vLLM that Penstock was not built for.

    Raises:
        ConfigError: with the versions that are.
    """
    version = Version(vllm.__version__)
    if f"{version.major}.{version.minor}" not in SUPPORTED:
        raise ConfigError(
            f"this Penstock works with vLLM {', '.join(SUPPORTED)}, found {vllm.__version__}; "
            "install one of these, or a Penstock that knows this vLLM"
        )


def check_supported(vllm_config: Any, kv_cache_config: KVCacheConfig) -> FullAttentionSpec:
    """The spec of the model's only KV-cache group, if the connector can serve it.

    Raises:
        ConfigError: says what the model or the options have that is not supported, and what to
            do about it.
    """
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise ConfigError("the model keeps no KV cache, so there is nothing to pool")
    if len(groups) > 1:
        kinds = ", ".join(sorted({type(g.kv_cache_spec).__name__ for g in groups}))
        raise ConfigError(
            f"the model has {len(groups)} KV-cache groups ({kinds}); hybrid models are not "
            "supported yet. If all its layers are attention, start vLLM with "
            "--disable-hybrid-kv-cache-manager, which keeps them in one group; otherwise serve "
            "it without Penstock"
        )
    spec = groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec:
        raise ConfigError(
            f"the model's KV cache is of the kind {type(spec).__name__}; only full attention "
            "(MHA, GQA, MQA) is supported yet. Serve this model without Penstock"
        )
    parallel = vllm_config.parallel_config
    problems = {
        "a draft model (speculative decoding with its own layers)": groups[0].is_eagle_group,
        "compressed KV states": spec.tokens_per_state != 1,
        "padded KV pages": spec.page_size_padded is not None,
        "packed heads": spec.num_head_slots is not None or spec.state_content_bytes is not None,
        "per-token KV quantization": spec.kv_quant_mode.value not in (0, 1),
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "KV scales calculated at run time": bool(
            getattr(vllm_config.cache_config, "calculate_kv_scales", False)
        ),
    }
    found = [name for name, present in problems.items() if present]
    if found:
        raise ConfigError(
            f"not supported yet: {', '.join(found)}. Switch it off, or serve without Penstock"
        )
    check_block_hashing(vllm_config.cache_config.prefix_caching_hash_algo)
    return spec


def check_block_hashing(algorithm: str) -> None:
    """Refuses block hashes that differ from process to process.

    Raises:
        ConfigError: the algorithm is seeded at random.
    """
    if algorithm in _SEEDED_HASHES and os.environ.get("PYTHONHASHSEED") is None:
        raise ConfigError(
            f"--prefix-caching-hash-algo {algorithm} hashes blocks with a random seed, so no "
            "other process would find them: use sha256 (the default), or set PYTHONHASHSEED to "
            "the same number on every node"
        )


def none_hash() -> bytes:
    """The hash that starts every chain of block hashes; set once the engine core is up."""
    return bytes(kv_cache_utils.NONE_HASH)


def block_hashes(request: Any, hash_block_size: int | None, block_size: int) -> Sequence[bytes]:
    """The chained hashes of the request's full blocks, one per `block_size` tokens."""
    hashes: Sequence[bytes] = kv_cache_utils.resolve_block_hashes(
        request.block_hashes, hash_block_size or block_size, block_size
    )
    return hashes


def block_table(scheduler_output: Any) -> Callable[[str], Sequence[int]]:
    """Request id → its present block ids, for requests scheduled in this step."""
    resolve = scheduler_output.kv_connector_block_state.resolve_block_ids
    return lambda request_id: resolve(request_id)[0]


def layer_index(layer_name: str) -> int:
    """The layer's index in the whole model, from a name like ``model.layers.3.self_attn.attn``.

    Raises:
        ConfigError: the name does not hold exactly one index.
    """
    numbers = [part for part in layer_name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise ConfigError(f"cannot tell the index of layer {layer_name!r}")
    return int(numbers[0])


def kv_head_range(vllm_config: Any, tp_rank: int) -> tuple[int, int]:
    """The KV heads that a tensor-parallel rank holds, as a half-open range.

    With fewer KV heads than ranks, vLLM gives `tp / heads` consecutive ranks the same head.
    """
    total = vllm_config.model_config.get_total_num_kv_heads()
    size = vllm_config.parallel_config.tensor_parallel_size
    if total >= size:
        heads = total // size
        return tp_rank * heads, (tp_rank + 1) * heads
    head = tp_rank * total // size
    return head, head + 1


def kv_replica(vllm_config: Any, tp_rank: int) -> tuple[int, int]:
    """The rank's number among the ranks that hold the same KV heads, and how many they are."""
    total = vllm_config.model_config.get_total_num_kv_heads()
    count = max(1, vllm_config.parallel_config.tensor_parallel_size // total)
    return tp_rank % count, count


def tp_rank() -> int:
    """This worker's rank in its tensor-parallel group."""
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)


@contextmanager
def operators_cores() -> Iterator[None]:
    """Threads started inside may run on every core that the operator gave to the engine.

    vLLM's CPU worker is bound to the cores that the model computes on, and threads inherit that:
    copies and transfers would take the model's time while other cores idle. The process that
    started the worker has the cores as the operator set them.
    """
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


def metric_per_engine(metric: Any, labels: dict[int, list[object]]) -> dict[int, Any]:
    """One labelled child of a Prometheus metric per engine index."""
    return {index: metric.labels(*values) for index, values in labels.items()}
