"""The connector that vLLM loads: a facade over the two halves.

Configure it with ``{"kv_connector": "PenstockConnector", "kv_connector_module_path":
"penstock.vllm.connector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}``;
`penstock serve` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from penstock.errors import ConfigError
from penstock.vllm import compat, layouts
from penstock.vllm.bootstrap import Bootstrap
from penstock.vllm.messages import RankShare, StepOrders, WorkerReport
from penstock.vllm.model_share import starting_models
from penstock.vllm.scheduler import SchedulerHalf
from penstock.vllm.scheduler_facts import arrival, bootstrap, kv_events, scheduler_half, step
from penstock.vllm.settings import Settings
from penstock.vllm.stats import PenstockPromMetrics, PenstockStats
from penstock.vllm.worker import WorkerHalf
from penstock.vllm.worker_facts import kv_memory, services, worker_facts

if TYPE_CHECKING:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults


class Orders(KVConnectorMetadata):  # type: ignore[misc]
    """vLLM's envelope for the scheduler half's orders."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


class Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """vLLM's envelope for the reports of worker halves."""

    def __init__(self, report: WorkerReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        """Merges another rank's report into this one."""
        self.report.merge(other.report)
        return self


class Share(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """vLLM's envelope for a rank's share, sent at start-up."""

    def __init__(self, share: RankShare) -> None:
        self.share = share


class PenstockConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads a request's KV blocks from a pool before the request is scheduled, and stores every new
    block."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        compat.check_version()
        super().__init__(vllm_config, role, kv_cache_config)
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            raise ConfigError(
                'set "kv_load_failure_policy": "recompute" in --kv-transfer-config: a block that '
                "does not come from the pool must be recomputed, not fail its request"
            )
        extra = self._kv_transfer_config.kv_connector_extra_config
        settings = Settings.parse(extra)
        self._bootstrap: Bootstrap | None = None
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            compat.wrap_calls()
            compat.wrap_encoder_resets()
            compat.wrap_resets()
            limit = settings.lookup_limit(extra)
            self._scheduler = scheduler_half(settings, limit, vllm_config, kv_cache_config)
            self._bootstrap = bootstrap(settings, vllm_config)
        else:
            self._facts = worker_facts(vllm_config, kv_cache_config)
            self._worker = WorkerHalf(settings, self._facts, services(vllm_config))

    @property
    def scheduler(self) -> SchedulerHalf:
        """The scheduler half; only in the scheduler's process."""
        assert self._scheduler is not None
        return self._scheduler

    @property
    def worker(self) -> WorkerHalf:
        """The worker half; only in a worker."""
        assert self._worker is not None
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """False, because the pool is a best-effort cache: a dropped store is only a later miss."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """The layout to ask for if the plugin is not loaded. (The plugin knows more.) If the
        workers' backends do not list this layout, vLLM drops the wish with a warning."""
        return layouts.required(vllm_config)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """True: no copy reads or writes memory that sleep mode takes away. vLLM asks since 0.33,
        and tells before it does so."""
        return True

    # --- worker ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Called once, with every layer's view of the KV cache."""
        compat.make_scales(self._vllm_config, kv_caches)
        self.worker.register(kv_memory(self._facts.groups, self._facts.layers, kv_caches))
        compat.watch_changes(self._vllm_config, self.worker.weights)

    def unregister_kv_caches(self) -> None:
        """Called before sleep mode takes the KV cache's memory away. vLLM calls it since 0.33."""
        self.worker.fall_asleep()

    def restore_kv_caches(self) -> None:
        """Called when the KV cache's memory is there again. vLLM calls it since 0.33."""
        self.worker.wake_up()

    def get_handshake_metadata(self) -> Share | None:
        """This rank's share. The scheduler half checks it against the other ranks' shares. Since
        vLLM 0.33 called again after sleep, when the weights may be others: what the rank holds is
        the same then."""
        share = self.worker.share
        if share is None:
            return None
        if share.models is None:
            share = self.worker.begin(starting_models(self._vllm_config))
        return Share(share)

    def handle_preemptions(self, kv_connector_metadata: Orders) -> None:
        """Called on every model runner before its forward pass, and so before a step that may
        overwrite the blocks of preempted requests."""
        self.worker.begin_step(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Submits this step's loads. This step's forward pass needs none of them."""
        self.worker.start_loads(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: a load ends before its request is scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Does nothing: whole blocks are stored after the forward pass, not single layers."""

    def wait_for_save(self) -> None:
        """Submits this step's stores, after the forward pass has filled the blocks."""
        self.worker.start_stores(self._orders())

    def _orders(self) -> StepOrders:
        orders: StepOrders = self._get_connector_metadata().orders
        return orders

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Three sets of requests: those whose blocks may be freed, those whose load ended, and
        those whose load failed as a whole."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        free, loaded = self.worker.poll()
        return KVConnectorTransferResults(free, loaded, self.worker.take_failed_requests())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that must be recomputed."""
        return self.worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> Report | None:
        """The results of jobs, for the scheduler half."""
        report = self.worker.take_report()
        return None if report is None else Report(report)

    # --- scheduler ------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Called with every rank's share. Refuses shares that do not fit together."""
        self.scheduler.accept_shares({rank: envelope.share for rank, envelope in metadata.items()})

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Called once, with the engine's own block pool. It tells which blocks the engine's prefix
        cache has, and holds blocks."""
        if self._scheduler is not None:
            self._scheduler.bind(compat.BlockPool(gpu_block_pool))

    def on_new_request(self, request: Any) -> None:
        """Starts the look-up of the request's blocks."""
        self.scheduler.on_new_request(arrival(request))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens the pool adds to the computed ones; None while this is not known."""
        tokens = self.scheduler.match(request.request_id, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The engine allocated blocks: for the tokens that `get_num_new_matched_tokens` offered, or
        to compute the request in this step."""
        if num_external_tokens:
            self.scheduler.on_allocated(
                request.request_id, blocks.get_block_ids(), num_external_tokens
            )
        else:
            self.scheduler.on_scheduled()

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        """The tokens of the load that begins, by the tier that they come from. vLLM asks since
        0.32."""
        split = self.scheduler.hit_sources(request.request_id, num_external_tokens)
        return {compat.hit_source(tier): tokens for tier, tokens in split.items()}

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        """The orders that go to the workers with this step."""
        orders = self.scheduler.build_orders(step(scheduler_output))
        compat.rest(orders.idle_until > 0)
        return Orders(orders)

    def update_connector_output(self, connector_output: Any) -> None:
        """Takes in the workers' reports."""
        envelope = connector_output.kv_connector_worker_meta
        self.scheduler.on_worker_output(
            report=None if envelope is None else envelope.report,
            loaded=connector_output.finished_recving or (),
            freed=connector_output.finished_sending or (),
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's blocks must be kept until its stores have read them, and what the
        answer tells the engine that goes on with the request."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Answers what :meth:`request_finished` answers. vLLM asks this way if the hybrid memory
        allocator is on."""
        # Asked first: a request without stores is forgotten at its end.
        promise = self.scheduler.promise(request.request_id)
        return self.scheduler.on_finished(request.request_id, block_ids), promise

    def take_events(self) -> list[Any]:
        """KV events of the pool: blocks that this engine stored, and blocks that are gone."""
        return kv_events(self.scheduler)

    def reset_cache(self) -> bool:
        """Forgets what is known about the pool's content. Does not touch the pool itself."""
        self.scheduler.forget_presence()
        return True

    # --- both -----------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> PenstockStats | None:
        """Counters since the last call."""
        half = self._scheduler if self._scheduler is not None else self.worker
        counts = half.take_counts()
        return None if counts is None else PenstockStats(data=counts)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PenstockStats:
        """Counters rebuilt from their serialized form."""
        return PenstockStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PenstockPromMetrics:
        """The counters as Prometheus series."""
        return PenstockPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Ends this half's threads within a bounded time."""
        for part in (self._bootstrap, self._scheduler, self._worker):
            if part is not None:
                part.shutdown()
