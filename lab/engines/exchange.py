"""A running engine that goes on with a new connector, as good as one that was just started.

vLLM makes its connector when it starts, and keeps it. Most tests need an engine that knows nothing
of the test before, with a pool and settings of their own. To start one takes some seconds of a
core. Here the engine ends its connector's halves as vLLM does at its end, and makes new ones as
vLLM does at its start.

All that vLLM itself decides at its start stays as it is. See `tests.e2e.engines` for what tests
share engines by.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.engine.core import EngineCore
from vllm.v1.metrics.stats import PrefixCacheStats

from penstock.vllm.connector import PenstockConnector


def allow() -> None:
    """Lets the engines that are forked from this process exchange their connectors."""
    register = PenstockConnector.register_kv_caches

    def remembered(self: Any, kv_caches: Any) -> None:
        self.registered = kv_caches
        register(self, kv_caches)

    PenstockConnector.register_kv_caches = remembered  # type: ignore[method-assign]
    EngineCore.part = _part
    EngineCore.renew = _renew


def write_to(log: str) -> None:
    """From now on, what this process logs goes to another file."""
    sys.stderr.flush()
    with Path(log).open("ab") as file:
        os.dup2(file.fileno(), 2)


def _part(core: Any) -> None:
    """Ends both halves of the connector of an engine that has no requests."""
    assert not core.scheduler.has_requests(), "an engine with requests cannot be shared"
    core.scheduler.connector.shutdown()
    core.model_executor.collective_rpc(_worker_parts)


def _worker_parts(_worker: Any) -> None:
    kv_transfer_state.get_kv_transfer_group().shutdown()


def _renew(core: Any, extra: dict[str, Any], log: str) -> None:
    """Makes new halves, with other settings, in the order in which vLLM makes them."""
    write_to(log)
    core.model_executor.collective_rpc(_worker_renews, args=(extra, log))
    scheduler = core.scheduler
    before = scheduler.connector
    config = before._vllm_config
    config.kv_transfer_config.kv_connector_extra_config = extra
    scheduler.connector = KVConnectorFactory.create_connector(
        config=config, role=KVConnectorRole.SCHEDULER, kv_cache_config=before._kv_cache_config
    )
    scheduler.connector_prefix_cache_stats = PrefixCacheStats()
    scheduler.connector.bind_kv_cache_manager(scheduler.kv_cache_manager)
    core.model_executor.init_kv_output_aggregator(scheduler.connector)
    shares: dict[tuple[int, int], Any] = {}
    for share in core.model_executor.get_kv_connector_handshake_metadata():
        shares |= share or {}
    scheduler.connector.set_xfer_handshake_metadata_pp_aware(shares)


def _worker_renews(worker: Any, extra: dict[str, Any], log: str) -> None:
    write_to(log)
    before = kv_transfer_state.get_kv_transfer_group()
    config = before._vllm_config
    config.kv_transfer_config.kv_connector_extra_config = extra
    kv_transfer_state._KV_CONNECTOR_AGENT = None
    kv_transfer_state.ensure_kv_transfer_initialized(config, before._kv_cache_config)
    kv_transfer_state.get_kv_transfer_group().register_kv_caches(before.registered)
