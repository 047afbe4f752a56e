"""Weights that change while an engine runs: how Penstock notices."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from penstock.vllm.compat.configuration import CONNECTOR, has_penstock, is_penstock
from penstock.vllm.compat.weights import models, parts, worker_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.penstock")

_CHUNK = 1 << 22
"""Numbers that are summed at a time."""

_HARMLESS = ("profile", "check_health", "save_sharded_state", "save_tensorized_model")
"""Calls of vLLM's own to its workers that change no weights, by the names that clients give."""


def watch_changes(
    vllm_config: Any, changed: Callable[[], None], told: Callable[[], dict[str, int]]
) -> None:
    """Has `changed` called in this worker whenever its models' weights are about to change, and
    once they have.

    Seen are: vLLM's own ways to reload weights; `load_weights` of the models, by whomever; and
    whatever a call by `collective_rpc` or `apply_model` does to them. What code in this very
    process does to a tensor on its own is not seen. `told` gives the worker's name, with how often
    it saw a change."""
    worker = worker_of(vllm_config)
    _surround(worker.model_runner, "reload_weights", changed)
    for model in filter(None, models(vllm_config)):
        _surround(model, "load_weights", changed)
    worker._penstock = changed, told


def _surround(owner: Any, name: str, changed: Callable[[], None]) -> None:
    """Has `changed` called before and after a method of one object."""
    method = getattr(owner, name, None)
    if method is None or hasattr(method, "_penstock"):
        return

    @functools.wraps(method)
    def surrounded(*arguments: Any, **options: Any) -> Any:
        changed()
        try:
            return method(*arguments, **options)
        finally:
            changed()

    surrounded._penstock = True  # type: ignore[attr-defined]
    setattr(owner, name, surrounded)


def wrap_calls() -> None:
    """Has all that clients call in workers compared before and after, once in a process, in engines
    with Penstock."""
    from vllm.v1.engine.core import EngineCore

    call = EngineCore.collective_rpc
    if hasattr(call, "__wrapped__"):
        return

    @functools.wraps(call)
    def wrapped(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not has_penstock(self.vllm_config) or method in _HARMLESS:
            return call(self, method, timeout, args, kwargs)
        try:
            returned = call(self, functools.partial(_compared, method), timeout, args, kwargs)
        except BaseException:
            # Its error is what the client hears, also if the workers tell nothing any more.
            with contextlib.suppress(Exception):
                _tell(self, call(self, _told, timeout))
            raise
        # Before the next step is ordered, and before the client goes on.
        _tell(self, call(self, _told, timeout))
        return returned

    EngineCore.collective_rpc = wrapped


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
    connector = core.scheduler.connector
    for part in [connector] if is_penstock(core.vllm_config) else connector._connectors:
        if type(part).__name__ == CONNECTOR:
            yield part.scheduler


def _tell(core: Any, told: list[dict[str, int]]) -> None:
    """Tells the scheduler halves how often each worker saw its weights change."""
    for half in _scheduler_halves(core):
        half.on_weights_changed({name: count for one in told for name, count in one.items()})


def _compared(method: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a method in a worker, and tells Penstock there if it changed weights. Runs in the
    worker."""
    inner = getattr(worker, "worker", worker)
    call = getattr(worker, method) if isinstance(method, str) else functools.partial(method, worker)
    if not hasattr(inner, "_penstock"):
        return call(*args, **kwargs)
    changed, _ = inner._penstock
    before = _sums_or_none(inner)
    try:
        return call(*args, **kwargs)
    finally:
        if before is None or _sums_or_none(inner) != before:
            changed()


def _told(worker: Any) -> dict[str, int]:
    """The worker's name, with how often it saw its weights change. Runs in the worker."""
    _, told = getattr(getattr(worker, "worker", worker), "_penstock", (None, dict))
    found: dict[str, int] = told()
    return found


def _sums_or_none(worker: Any) -> list[tuple[Any, ...]] | None:
    """Sums of the weights, see :func:`_sums`. None if they cannot be made, as of weights that some
    kernel keeps in a form of its own. Then the weights are taken for changed."""
    try:
        return _sums(worker)
    except (RuntimeError, TypeError, ValueError) as error:
        logger.warning("Penstock: cannot see whether weights changed: %s; supposing so", error)
        return None


def _sums(worker: Any) -> list[tuple[Any, ...]]:
    """Numbers that change with any weight or buffer, of all models of a worker. Made where the
    tensors are, at the speed of their memory."""
    return [
        (name, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), *_sum(tensor))
        for model in filter(None, models(worker.vllm_config))
        for named in (model.named_parameters(), model.named_buffers())
        for name, tensor in parts(named)
    ]


def _sum(tensor: torch.Tensor) -> tuple[int, int]:
    """The sum of a tensor's elements as whole numbers, and that of each times its place."""
    import torch

    if not tensor.numel():
        return 0, 0
    flat = tensor.detach().contiguous().reshape(-1)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    numbers = flat.view(kinds.get(flat.element_size(), torch.uint8))
    plain = placed = torch.zeros((), dtype=torch.int64, device=numbers.device)
    for start in range(0, numbers.numel(), _CHUNK):
        chunk = numbers[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + chunk.numel(), device=chunk.device)
        # Sums wrap around. An element that changes changes both, as its place is not zero.
        plain, placed = plain + chunk.sum(), placed + (chunk * places).sum()
    return int(plain), int(placed)
