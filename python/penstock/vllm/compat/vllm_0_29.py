"""vLLM 0.29."""

from __future__ import annotations

import functools
from typing import Any

from penstock.vllm.compat.planning import Planning
from penstock.vllm.compat.uses import Use

_SCHEDULER = "vllm.v1.core.sched.scheduler"
_UTILITIES = "vllm.v1.core.kv_cache_utils"

BLOCK_SIZES = Use(_UTILITIES, "resolve_kv_cache_block_sizes", ("kv_cache_config", "vllm_config"))


class Vllm029:
    """What differs between versions of vLLM, as it is in 0.29.

    The class of each later version inherits from that of the version before.
    """

    PLANNING = Planning(
        _UTILITIES,
        pool_bytes_takes=("kv_cache_groups",),
        configs_take=("vllm_config", "kv_cache_specs", "available_memory"),
    )

    USES: tuple[Use, ...] = (
        *PLANNING.uses,
        BLOCK_SIZES,
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
    """All of vLLM that Penstock uses in this version only."""

    UNASKED: tuple[str, ...] = ("get_transfer_results",)
    """Methods of the connector that this version does not call."""

    CARRIES_DRAFTS = False
    """Whether the layers of drafters were tried with this version."""

    def hash_block_size(self, vllm_config: Any, kv_cache_config: Any) -> int | None:
        """Tokens of the blocks that hashes are computed over; None for the only group's block
        size."""
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])

    def prefix_cacheable_groups(self, kv_cache_config: Any) -> tuple[int, ...]:
        """Numbers of the KV-cache groups that vLLM finds by prefix."""
        groups = enumerate(kv_cache_config.kv_cache_groups)
        return tuple(i for i, group in groups if group.kv_cache_spec.prefix_cacheable)

    def has_layer_views(self, spec: Any) -> bool:
        """Whether vLLM makes a view of the KV cache for each layer of this kind: all kinds have
        one."""
        return True

    def adapt_scheduler(self) -> None:
        """Makes vLLM's scheduler do two things that later versions do by themselves.

        First, the scheduler shows the connector the block tables of all requests of a step, not
        only of requests that got a block with the step. A block may become full in a step that gave
        the request no block. And a block in an older table may have been given away since.

        Second, the scheduler recomputes requests for which a block did not come. This version
        learns only block ids, and cannot tell which of several groups a block belongs to. So such
        requests travel with the workers' reports.
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
