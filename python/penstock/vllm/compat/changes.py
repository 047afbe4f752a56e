"""Weights that change while an engine runs: how Penstock notices."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.vllm.compat.configuration import CONNECTOR, has_penstock, is_penstock
from penstock.vllm.compat.topology import rank
from penstock.vllm.compat.weights import models, reloading, worker_of

if TYPE_CHECKING:
    from penstock.vllm.messages import RankWeights
    from penstock.vllm.worker import Weights

_HARMLESS = (
    "profile",
    "check_health",
    "save_sharded_state",
    "save_tensorized_model",
    "init_weight_transfer_engine",
    "shutdown_weight_transfer_engine",
)
"""Calls of vLLM's own to its workers that change no weights, by the names that clients give."""

_CHANGING = (
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
    "sleep",
    "wake_up",
    "discard",
)
"""Calls of vLLM's own to its workers that change weights or take them away, see above.
`reload_weights` tells so by itself."""


def watch_changes(vllm_config: Any, weights: Weights) -> None:
    """Has `weights` told in this worker whenever its models' weights are about to change, and once
    they have.

    Seen are: vLLM's own ways to reload and to update weights; `load_weights` of the models, by
    whomever; and whatever a call by `collective_rpc` or `apply_model` does to them. What code in
    this very process does to a tensor on its own is seen with the next reset of the connector, if
    it changes a sample of the tensors."""
    worker = worker_of(vllm_config)
    if not hasattr(worker, "_penstock"):
        _watch_reloads(worker)
        for model in filter(None, models(vllm_config)):
            _watch_loads(model, worker)
    worker._penstock = weights


def _watch_loads(model: Any, worker: Any) -> None:
    load = getattr(model, "load_weights", None)
    if load is None:
        return

    @functools.wraps(load)
    def watched(*arguments: Any, **options: Any) -> Any:
        worker._penstock.note_change()
        worker._penstock_loaded = None
        try:
            loaded = worker._penstock_loaded = load(*arguments, **options)
        finally:
            worker._penstock.note_change()
        return loaded

    model.load_weights = watched


def _watch_reloads(worker: Any) -> None:
    runner = worker.model_runner
    reload = runner.reload_weights

    @functools.wraps(reload)
    def watched(
        weights_iterator: Any = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        weights: Weights = worker._penstock
        weights.note_change()
        model = runner.get_model()
        # Files may hold some of them only: then vLLM keeps the others as they were.
        wanted = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        worker._penstock_loaded = None
        try:
            with reloading(model, worker.vllm_config):
                reload(weights_iterator, weights_path, is_checkpoint_format)
        finally:
            weights.note_change()
        if weights_iterator is None and wanted <= set(worker._penstock_loaded or ()):
            weights.note_reload()

    runner.reload_weights = watched


def wrap_calls() -> None:
    """Follows, once in a process, which weights engines with Penstock compute with: by what clients
    call in workers, and by the names that they give to weights."""
    from vllm.v1.engine.core import EngineCore

    call, add = EngineCore.collective_rpc, EngineCore.add_request
    name, wake = EngineCore.set_weight_version, EngineCore.wake_up
    if hasattr(call, "__wrapped__"):
        return

    @functools.wraps(call)
    def wrapped_call(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not has_penstock(self.vllm_config) or method in _HARMLESS:
            return call(self, method, timeout, args, kwargs)
        watched = functools.partial(_watched, method, not self.model_executor.is_sleeping)
        try:
            returned = call(self, watched, timeout, args, kwargs)
        except BaseException:
            # Its error is what the client hears, also if the workers tell nothing any more.
            with contextlib.suppress(Exception):
                _take_changes(self, self.model_executor.collective_rpc(_changes, timeout))
            raise
        # Before the next step is ordered, and before the client goes on.
        _take_changes(self, self.model_executor.collective_rpc(_changes, timeout))
        return returned

    @functools.wraps(name)
    def wrapped_name(self: Any, weight_version: str) -> None:
        name(self, weight_version)
        if has_penstock(self.vllm_config):
            # A name may be all that somebody says of a change.
            look_at_weights(self)
            for half in _scheduler_halves(self):
                half.versions.on_named(weight_version)
            name_weights(self)

    @functools.wraps(add)
    def wrapped_add(self: Any, *arguments: Any, **options: Any) -> None:
        if has_penstock(self.vllm_config):
            name_weights(self)
        add(self, *arguments, **options)

    @functools.wraps(wake)
    def wrapped_wake(self: Any, tags: list[str] | None = None) -> bool:
        is_awake: bool = wake(self, tags)
        if has_penstock(self.vllm_config):
            _take_changes(self, self.model_executor.collective_rpc(_changes))
            name_weights(self)
        return is_awake

    EngineCore.collective_rpc, EngineCore.set_weight_version = wrapped_call, wrapped_name
    EngineCore.add_request, EngineCore.wake_up = wrapped_add, wrapped_wake


def look_at_weights(core: Any) -> None:
    """Has all workers look whether their weights are those that they were. Not while the engine
    sleeps: then they are not there."""
    if not core.model_executor.is_sleeping:
        _take_changes(core, core.model_executor.collective_rpc(_looked))


def name_weights(core: Any) -> None:
    """Asks the workers which weights they compute with, if a scheduler half needs to know. Not
    while the engine sleeps: then they are not there."""
    for half in _scheduler_halves(core):
        versions = half.versions
        if versions.asks and not core.model_executor.is_sleeping:
            told = functools.partial(_told, versions.name)
            versions.on_told(core.model_executor.collective_rpc(told))


def _take_changes(core: Any, told: list[tuple[dict[str, int], bool]]) -> None:
    """Tells the scheduler halves how often each worker saw its weights change, and whether an
    update goes on in one."""
    changes = {name: count for one, _ in told for name, count in one.items()}
    for half in _scheduler_halves(core):
        half.versions.on_changed(changes)
        half.versions.on_update(is_under_way=any(is_updating for _, is_updating in told))


def wrap_encoder_resets() -> None:
    """Tells the scheduler halves when vLLM forgets what encoders made of images, once in a process,
    in engines with Penstock."""
    from vllm.v1.engine.core import EngineCore

    reset = EngineCore.reset_encoder_cache
    if hasattr(reset, "__wrapped__"):
        return

    @functools.wraps(reset)
    def wrapped(self: Any) -> None:
        reset(self)
        if has_penstock(self.vllm_config):
            for half in _scheduler_halves(self):
                half.on_encoder_reset()

    EngineCore.reset_encoder_cache = wrapped


def _scheduler_halves(core: Any) -> Iterator[Any]:
    if not hasattr(core, "scheduler"):
        # vLLM calls workers before it has one.
        return
    connector = core.scheduler.connector
    for part in [connector] if is_penstock(core.vllm_config) else connector._connectors:
        if type(part).__name__ == CONNECTOR:
            yield part.scheduler


# --- in the worker ----------------------------------------------------------------------------


def _watched(method: Any, is_awake: bool, worker: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a method in a worker, and tells Penstock there if it changed weights."""
    inner = getattr(worker, "worker", worker)
    call = getattr(worker, method) if isinstance(method, str) else functools.partial(method, worker)
    call = functools.partial(call, *args, **kwargs)
    weights: Weights | None = getattr(inner, "_penstock", None)
    if weights is None or method == "reload_weights":
        return call()
    if is_awake and method not in _CHANGING and not _is_updating(inner):
        return weights.compare(call)
    weights.note_change()
    try:
        return call()
    finally:
        weights.note_change()


def _changes(worker: Any) -> tuple[dict[str, int], bool]:
    """How often the worker saw its weights change, and whether an update goes on in it."""
    inner = getattr(worker, "worker", worker)
    weights: Weights | None = getattr(inner, "_penstock", None)
    return ({} if weights is None else weights.changes), _is_updating(inner)


def _looked(worker: Any) -> tuple[dict[str, int], bool]:
    """What :func:`_changes` tells, after a look at the weights themselves."""
    inner = getattr(worker, "worker", worker)
    if hasattr(inner, "_penstock") and not _is_updating(inner):
        inner._penstock.look()
    return _changes(worker)


def _told(version: str, worker: Any) -> RankWeights | None:
    """Which weights the worker computes with."""
    inner = getattr(worker, "worker", worker)
    if not hasattr(inner, "_penstock"):
        return None
    told: RankWeights = inner._penstock.tell(version, rank(), is_updating=_is_updating(inner))
    return told


def _is_updating(worker: Any) -> bool:
    """Whether a trainer has begun to update the weights, and has not finished."""
    return bool(getattr(worker, "_weight_update_active", False))
