"""Facts about an engine from vLLM's configuration."""

from __future__ import annotations

from typing import Any

from penstock.vllm.compat.versions import installed

CONNECTOR = "PenstockConnector"
"""The connector's name in vLLM's configuration."""


def has_penstock(vllm_config: Any) -> bool:
    """Whether the engine's connector is Penstock's, or has it as a part (`MultiConnector`)."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or is_penstock(vllm_config):
        return transfer is not None
    parts = transfer.kv_connector_extra_config.get("connectors") or ()
    return any(part.get("kv_connector") == CONNECTOR for part in parts)


def register_connector() -> None:
    """Makes the connector known by its name, once in a process. Where it is one of several
    (`MultiConnector`), vLLM's frontend looks for it by its name alone."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "penstock.vllm.connector", CONNECTOR)


def extra_config(vllm_config: Any) -> dict[str, Any]:
    """The settings of Penstock's connector, in an engine that has it."""
    transfer = vllm_config.kv_transfer_config
    found: dict[str, Any] = transfer.kv_connector_extra_config
    if not is_penstock(vllm_config):
        parts = found["connectors"]
        found = next(part for part in parts if part.get("kv_connector") == CONNECTOR)
        found = found.get("kv_connector_extra_config") or {}
    return found


def is_penstock(vllm_config: Any) -> bool:
    """Whether the engine's one connector is Penstock's."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == CONNECTOR


def engine_config(model: str, transfer: dict[str, Any]) -> Any:
    """vLLM's configuration for serving a model, with defaults for the rest. Loads no weights."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(
        model=model, skip_tokenizer_init=True, kv_transfer_config=KVTransferConfig(**transfer)
    )
    return args.create_engine_config()


def tokens_per_step(vllm_config: Any) -> int:
    """The most tokens that a step computes."""
    return int(vllm_config.scheduler_config.max_num_batched_tokens)


def holds_prompts(vllm_config: Any) -> bool:
    """Whether only some steps compute prompts (``--prefill-schedule-interval``)."""
    if int(vllm_config.scheduler_config.prefill_schedule_interval) <= 1:
        return False
    has_peers = vllm_config.parallel_config.data_parallel_size > 1
    return has_peers or installed().HOLDS_PROMPTS_ALONE


def requests_per_step(vllm_config: Any) -> int:
    """The most requests that a step computes."""
    return min(int(vllm_config.scheduler_config.max_num_seqs), tokens_per_step(vllm_config))
