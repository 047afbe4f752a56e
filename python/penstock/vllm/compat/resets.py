"""Resets of vLLM's prefix cache that take all requests' blocks away.

vLLM preempts the requests that run, and raises an error if a block is still in use. Blocks of
requests that wait for a load are, and so are those that a store still reads, and those that a step
under way may still write. Here nothing uses a block any more when vLLM looks.
"""

from __future__ import annotations

import functools
from typing import Any

from penstock.vllm.compat.changes import look_at_weights, name_weights
from penstock.vllm.compat.configuration import has_penstock, is_penstock


def wrap_resets() -> None:
    """Has loads and stores ended before a reset that preempts running requests, in engines whose
    one connector is Penstock's; and has weights looked at before a reset of Penstock's knowledge.
    Once in a process."""
    from vllm.v1.engine.core import EngineCore

    reset = EngineCore.reset_prefix_cache
    if hasattr(reset, "__wrapped__"):
        return

    @functools.wraps(reset)
    def wrapped(
        self: Any, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        if reset_connector and has_penstock(self.vllm_config):
            look_at_weights(self)
        if not (reset_running_requests and is_penstock(self.vllm_config)):
            done: bool = reset(self, reset_running_requests, reset_connector)
            if has_penstock(self.vllm_config):
                name_weights(self)
            return done
        scheduler = self.scheduler
        # Raises if any rank cannot. Then vLLM hears of all loads that were given up, and no block
        # is taken away.
        self.model_executor.collective_rpc(_end_transfers)
        self.model_executor.collective_rpc(_forget_failures)
        scheduler.connector.scheduler.on_transfers_ended()
        _free_blocks(scheduler)
        # All workers are past the steps that they had, so no block needs to wait for a step's end.
        deferred, scheduler.defer_block_free = scheduler.defer_block_free, False
        try:
            done = reset(self, reset_running_requests, reset_connector)
        finally:
            scheduler.defer_block_free = deferred
        # Requests begin anew, and look for blocks of the weights of now.
        name_weights(self)
        return done

    EngineCore.reset_prefix_cache = wrapped


def _end_transfers(worker: Any) -> None:
    """Returns when neither a step nor Penstock uses blocks of the KV cache. Runs in the worker."""
    import torch
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    get_kv_transfer_group().worker.end_transfers()


def _forget_failures(worker: Any) -> None:
    """Runs in the worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    get_kv_transfer_group().worker.forget_failures()


def _free_blocks(scheduler: Any) -> None:
    """Takes the blocks of all requests that do not run. What workers report of them later finds
    none, and changes nothing."""
    from vllm.v1.request import RequestStatus

    manager = scheduler.kv_cache_manager
    while scheduler.deferred_frees:
        _, blocks = scheduler.deferred_frees.popleft()
        manager.block_pool.free_blocks(reversed(blocks))
    for request in scheduler.requests.values():
        if request.is_finished():
            manager.free(request)
        elif request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            # As if nothing of the load had come. vLLM waits for the load's end, and then has the
            # request begin anew.
            scheduler.failed_recving_kv_req_ids.add(request.request_id)
            _begin_anew(manager, request)
        elif request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            # It may have blocks of a load that has ended.
            _begin_anew(manager, request)


def _begin_anew(manager: Any, request: Any) -> None:
    manager.free(request)
    request.num_computed_tokens = 0
