"""Translates vLLM's configuration, requests and steps into facts for the scheduler half."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

from penstock.vllm import compat
from penstock.vllm.adapters import NamedAdapters
from penstock.vllm.agreement import Agreement
from penstock.vllm.bootstrap import Bootstrap
from penstock.vllm.families import family_of, kinds_of
from penstock.vllm.groups import Groups
from penstock.vllm.lookup_limit import LookupLimit
from penstock.vllm.model_facts import model_facts
from penstock.vllm.roles import role_named
from penstock.vllm.scheduler import Arrival, EngineFacts, SchedulerHalf, Step
from penstock.vllm.scheduler.events import Stored
from penstock.vllm.settings import Settings

logger = logging.getLogger("vllm.penstock")


def scheduler_half(
    settings: Settings, limit: LookupLimit, vllm_config: Any, kv_cache_config: Any
) -> SchedulerHalf:
    """The scheduler half of this engine, with the limit of its look-ups.

    Raises:
        ConfigError: the model or an option is not supported.
    """
    transfer = vllm_config.kv_transfer_config
    role = role_named(transfer.kv_role, consumer_stores=settings.consumer_stores)
    groups = compat.transfer_groups(vllm_config, kv_cache_config)
    _say_family(vllm_config, groups)
    adapters = NamedAdapters()
    if vllm_config.lora_config is not None:
        compat.name_adapters(vllm_config, adapters)
    hash_tokens = compat.hash_block_size(vllm_config, kv_cache_config) or groups[0].block_size
    facts = EngineFacts(
        groups=groups,
        hash_tokens=hash_tokens,
        tokens_per_step=compat.tokens_per_step(vllm_config),
        has_peers=vllm_config.parallel_config.data_parallel_size > 1,
        null_block=compat.NULL_BLOCK,
        engine_id=str(transfer.engine_id),
        tensor_parallel=vllm_config.parallel_config.tensor_parallel_size,
        ranks=vllm_config.parallel_config.world_size,
        rounding=compat.rounding(vllm_config, groups),
        names_sessions_anew=compat.names_sessions_anew(),
        holds_prompts=compat.holds_prompts(vllm_config),
        speculates=vllm_config.speculative_config is not None,
        drops_last_block=compat.drops_last_block(vllm_config),
        holds_blocks=any(group.gives_blocks_back for group in groups)
        or compat.zeroes_early(vllm_config, kv_cache_config),
        publishes_events=compat.publishes_events(vllm_config),
        hash_prompt=compat.prompt_hasher(vllm_config, hash_tokens),
    )
    model = dataclasses.replace(
        model_facts(vllm_config, groups),
        lookup=functools.partial(compat.lookup_facts, vllm_config, hash_tokens),
    )
    agreement = Agreement(settings, model, groups, compat.none_hash)
    return SchedulerHalf(settings, facts, agreement, adapters, compat.adapter, role, limit)


def _say_family(vllm_config: Any, groups: Groups) -> None:
    kinds = kinds_of(groups)
    family = family_of(kinds, in_each_layer=compat.attends_in_each_layer(vllm_config))
    if family is None:
        logger.warning("Penstock: nobody has tried a model with layers %s", ", ".join(kinds))
    else:
        logger.info("Penstock: layers: %s", family.layers)


def bootstrap(settings: Settings, vllm_config: Any) -> Bootstrap | None:
    """What answers proxies that ask for this engine's name; None if nobody shall ask, or if another
    data-parallel rank answers.

    Raises:
        ConfigError: the address cannot be listened at.
    """
    parallel = vllm_config.parallel_config
    if not settings.bootstrap or parallel.data_parallel_index:
        return None
    engine = str(vllm_config.kv_transfer_config.engine_id)
    return Bootstrap(settings.bootstrap, engine, parallel.data_parallel_size)


def arrival(request: Any) -> Arrival:
    """The facts about a new request."""
    return Arrival(
        request,
        compat.kv_params(request),
        compat.cache_salt(request),
        request.trace_headers,
        compat.kv_hints(request),
        bool(request.mm_features),
    )


def kv_events(half: SchedulerHalf) -> list[Any]:
    """The pool's events since the last call, as vLLM publishes them."""
    locality = compat.LOCAL if half.is_pool_local else compat.REMOTE
    return [
        compat.stored_event(
            event.request,
            event.group,
            event.block_hashes,
            event.parent_block_hash,
            event.first,
            locality,
            salt=event.salt,
            has_content=half.events_have_content,
        )
        if isinstance(event, Stored)
        else compat.removed_event(event.group, event.block_hashes, locality)
        for event in half.take_events()
    ]


def step(scheduler_output: Any) -> Step:
    """The facts about the next step."""
    requests, computed = compat.scheduled(scheduler_output)
    return Step(
        requests=requests,
        computed=computed,
        tokens=scheduler_output.num_scheduled_tokens,
        preempted=scheduler_output.preempted_req_ids or (),
        tables=compat.block_tables(scheduler_output),
        new_blocks=functools.partial(compat.newly_allocated, scheduler_output),
        states=functools.partial(compat.boundary_states, scheduler_output),
    )
