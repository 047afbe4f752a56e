"""vLLM 0.29."""

from __future__ import annotations

import functools
from typing import Any

from penstock.vllm.compat import vllm_0_30
from penstock.vllm.compat.uses import Use

PLANNING = vllm_0_30.PLANNING

_SCHEDULER = "vllm.v1.core.sched.scheduler"

USES = (
    *PLANNING.uses,
    vllm_0_30.BLOCK_SIZES,
    Use("vllm.config", "VllmConfig._resolve_allow_missing_mm_embeddings", (), is_wrapped=True),
    Use("vllm.v1.core.sched.output", "KVConnectorBlockState"),
    Use("vllm.v1.kv_cache_interface", "KVCacheSpec.prefix_cacheable"),
    Use(
        _SCHEDULER,
        "Scheduler._build_kv_connector_meta",
        ("connector", "scheduler_output"),
        is_wrapped=True,
    ),
    Use(
        _SCHEDULER,
        "Scheduler._update_from_kv_xfer_finished",
        ("kv_connector_output",),
        is_wrapped=True,
    ),
    Use("vllm.v1.core.kv_cache_manager", "KVCacheManager.get_block_ids", ("request_id",)),
    Use(_SCHEDULER, "Scheduler.kv_cache_manager"),
    Use(_SCHEDULER, "Scheduler.requests"),
    Use(_SCHEDULER, "Scheduler.failed_recving_kv_req_ids"),
)

UNASKED = ("get_transfer_results",)

CARRIES_DRAFTS = vllm_0_30.CARRIES_DRAFTS

hash_block_size = vllm_0_30.hash_block_size


def prefix_cacheable_groups(kv_cache_config: Any) -> tuple[int, ...]:
    """Numbers of the KV-cache groups that vLLM finds by prefix."""
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return tuple(i for i, group in groups if group.kv_cache_spec.prefix_cacheable)


def has_layer_views(spec: Any) -> bool:
    """Whether vLLM makes a view of the KV cache for each layer of this kind: all kinds have one."""
    return True


def adapt_scheduler() -> None:
    """Makes vLLM's scheduler in this process do two things that later versions do by themselves.

    First, the scheduler shows the connector the block tables of all requests of a step, not only of
    requests that got a block with the step. A block may become full in a step that gave the request
    no block. And a block in an older table may have been given away since.

    Second, the scheduler recomputes requests for which a block did not come. This version learns
    only block ids, and cannot tell which of several groups a block belongs to. So such requests
    travel with the workers' reports.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    build, update = Scheduler._build_kv_connector_meta, Scheduler._update_from_kv_xfer_finished
    if hasattr(update, "__wrapped__"):
        return

    @functools.wraps(build)
    def wrapped_build(self: Any, connector: Any, scheduler_output: Any) -> Any:
        state = scheduler_output.kv_connector_block_state
        state.resolve_block_ids = self.kv_cache_manager.get_block_ids
        return build(self, connector, scheduler_output)

    @functools.wraps(update)
    def wrapped_update(self: Any, kv_connector_output: Any) -> None:
        report = kv_connector_output.kv_connector_worker_meta
        for request_id in getattr(report, "failed_requests", ()):
            request = self.requests.get(request_id)
            if request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                request.num_computed_tokens = 0
                self.failed_recving_kv_req_ids.add(request_id)
        update(self, kv_connector_output)

    Scheduler._build_kv_connector_meta = wrapped_build
    Scheduler._update_from_kv_xfer_finished = wrapped_update
