"""KV memory inside vLLM: splits the pipeline's total in proportion to the needs of each rank.

vLLM gives every rank the same bytes, and then as many blocks as fit on the rank that needs most.
Penstock wraps the engine core where it turns available bytes into blocks. An engine that does not
ask for a proportional split or a number of tokens is left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.plan import split, table
from penstock.plan.kv import blocks_for
from penstock.plan.split import Room, Split
from penstock.plan.wish import Wish
from penstock.vllm import compat

logger = logging.getLogger("vllm.penstock")


def wish(vllm_config: Any) -> Wish:
    """The operator's wish for the KV memory of this engine."""
    additional = vllm_config.additional_config
    return Wish.parse(additional) if isinstance(additional, Mapping) else Wish()


def decide(
    vllm_config: Any,
    specs: Sequence[Mapping[str, Any]],
    available: Sequence[int],
    rooms: Sequence[Room],
) -> list[int]:
    """Bytes for KV on each worker. They replace `available`, the bytes that vLLM would give it.

    Args:
        specs: KV-cache specs by layer, for each worker, in the order of pipeline ranks.
        rooms: the free bytes of each worker's device.

    `--kv-cache-memory-bytes` is the total for all pipeline ranks together. The tensor-parallel
    ranks of a stage get the same bytes.

    Raises:
        ConfigError: the operator's wish does not fit, or is at odds with another option.
    """
    asked, cache = wish(vllm_config), vllm_config.cache_config
    ranks = vllm_config.parallel_config.pipeline_parallel_size
    if asked.proportional and asked.tokens is None and cache.kv_cache_memory_bytes is None:
        raise ConfigError(
            "--enable-pp-prop-kv-cache requires --kv-cache-memory-bytes, the bytes that all "
            "pipeline ranks get together, or --kv-cache-tokens. Without either vLLM takes what "
            "each device has free, and nothing could be moved from one to another"
        )
    if asked.tokens is None and ranks == 1:
        logger.info("Penstock: one pipeline rank, so there is nothing to split in proportion")
        return list(available)
    _check(vllm_config, asked, len(specs))
    evenly = list(available)
    if cache.kv_cache_memory_bytes is not None:
        # vLLM makes the whole total available on every pipeline rank.
        evenly = [given // ranks for given in available]
    total = sum(evenly)
    need = compat.block_bytes(vllm_config, specs)
    per_request = compat.request_blocks(vllm_config, specs)
    length = vllm_config.model_config.max_model_len
    if asked.tokens is not None:
        after = split.of_blocks(need, blocks_for(asked.tokens, per_request, length))
        _check_fits(vllm_config, after, evenly, rooms)
    else:
        after = split.proportional(need, total, rooms)
        _say_if_less(after, need, total)
    outcomes = [
        table.Outcome.of(name, found, need, per_request, length)
        for name, found in (("uniform", split.uniform(need, evenly)), ("chosen", after))
    ]
    shown = _table(vllm_config, specs, need, outcomes)
    logger.info("Penstock: KV memory by pipeline rank\n%s", shown)
    return list(after.given)


def _check(vllm_config: Any, asked: Wish, workers: int) -> None:
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if cache.num_gpu_blocks_override is not None:
        raise ConfigError(
            "--num-gpu-blocks-override sets the blocks of every rank: leave it out, or leave out "
            "--enable-pp-prop-kv-cache and --kv-cache-tokens"
        )
    if asked.tokens is not None and vllm_config.model_config.original_max_model_len == -1:
        raise ConfigError(
            "--kv-cache-tokens needs a longest request: give --max-model-len a number, not auto"
        )
    expected = parallel.pipeline_parallel_size * parallel.tensor_parallel_size
    if workers != expected or parallel.decode_context_parallel_size > 1:
        raise ConfigError(
            f"{workers} workers for {parallel.pipeline_parallel_size} pipeline ranks of "
            f"{parallel.tensor_parallel_size}: context parallelism and elastic expert parallelism "
            "are not planned for; leave out --enable-pp-prop-kv-cache and --kv-cache-tokens"
        )


def _check_fits(
    vllm_config: Any, asked: Split, available: Sequence[int], rooms: Sequence[Room]
) -> None:
    """Refuses a number of tokens that needs more memory than there is, or than the operator
    allows."""
    split.check_rooms(asked, rooms)
    if vllm_config.cache_config.kv_cache_memory_bytes is None:
        # vLLM has measured how much memory the model leaves on each device.
        measured = [Room(worker, nbytes) for worker, nbytes in enumerate(available)]
        split.check_rooms(asked, measured)
    elif sum(asked.given) > sum(available):
        raise ConfigError(
            f"the tokens asked for need {sum(asked.given):,} bytes of KV on all ranks together, "
            f"and --kv-cache-memory-bytes allows {sum(available):,}"
        )


def _say_if_less(after: Split, need: Sequence[int], total: int) -> None:
    if after.blocks < total // sum(need):
        logger.warning(
            "Penstock: the devices have less free than the proportional split of %s bytes takes: "
            "%s blocks instead of %s",
            f"{total:,}",
            f"{after.blocks:,}",
            f"{total // sum(need):,}",
        )


def _table(
    vllm_config: Any,
    specs: Sequence[Mapping[str, Any]],
    need: Sequence[int],
    outcomes: Sequence[table.Outcome],
) -> str:
    tp = vllm_config.parallel_config.tensor_parallel_size
    ranks = [
        table.RankFacts(
            f"{worker // tp}" + (f" (tensor {worker % tp})" if tp > 1 else ""),
            str(len(layers)),
            nbytes,
        )
        for worker, (layers, nbytes) in enumerate(zip(specs, need, strict=True))
    ]
    return table.as_text(table.splits(ranks, outcomes))


def install() -> None:
    """Wraps the engine core in this process; does nothing the second time."""
    compat.wrap_kv_memory(lambda vllm_config: bool(wish(vllm_config)), decide)
