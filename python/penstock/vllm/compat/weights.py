"""The models of a worker: the files that vLLM read their weights from, and their live tensors."""

from __future__ import annotations

import enum
import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.vllm.compat.configuration import has_penstock

if TYPE_CHECKING:
    import torch


@dataclass
class Loading:
    """How a model got its weights."""

    loaders: set[tuple[type, str]] = field(default_factory=set)
    """Classes of the loaders, each with the format of weights that it was told."""
    files: list[str] = field(default_factory=list)
    """The files that vLLM's default loader read, all of them, more than once if it read them so."""


_loadings: weakref.WeakKeyDictionary[Any, Loading] = weakref.WeakKeyDictionary()
_workers: weakref.WeakSet[Any] = weakref.WeakSet()
_reload_begun: list[Callable[[], None]] = []
_current: list[Loading] = []
"""The model that is being loaded, if any. vLLM loads one after the other, on one thread."""


def wrap_loading(begun: Callable[[Any, list[str]], None], reload_begun: Callable[[], None]) -> None:
    """Follows how models get their weights, once in a process, in engines with Penstock.

    `begun` is told of the files that an engine is about to read weights from. `reload_begun` is
    called before a running engine reads any: the same files may hold something else."""
    _reload_begun.append(reload_begun)
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.v1.worker.gpu_worker import Worker

    load_model, load_weights = Worker.load_model, DefaultModelLoader.load_weights
    prepare = DefaultModelLoader._prepare_weights
    if hasattr(load_model, "__wrapped__"):
        return

    @functools.wraps(load_model)
    def wrapped_load_model(self: Any, **options: Any) -> None:
        _workers.add(self)
        if has_penstock(self.vllm_config):
            self._penstock_told = list(_configurations(self.vllm_config))
        load_model(self, **options)

    @functools.wraps(load_weights)
    def wrapped_load_weights(self: Any, model: Any, model_config: Any) -> None:
        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is None or not has_penstock(vllm_config):
            load_weights(self, model, model_config)
            return
        with _loading(model, type(self), str(self.load_config.load_format)):
            load_weights(self, model, model_config)

    @functools.wraps(prepare)
    def wrapped_prepare(self: Any, *arguments: Any, **options: Any) -> Any:
        prepared = prepare(self, *arguments, **options)
        if _current:
            files = [str(file) for file in prepared[1]]
            _current[-1].files += files
            begun(get_current_vllm_config_or_none(), files)
        return prepared

    Worker.load_model = wrapped_load_model
    DefaultModelLoader.load_weights = wrapped_load_weights
    DefaultModelLoader._prepare_weights = wrapped_prepare


@contextmanager
def _loading(model: Any, loader: type, load_format: str) -> Iterator[None]:
    loading = _loadings.setdefault(model, Loading())
    loading.loaders.add((loader, load_format))
    _current.append(loading)
    try:
        yield
    finally:
        _current.pop()


@contextmanager
def reloading(model: Any, vllm_config: Any) -> Iterator[None]:
    """Notes the files that a model gets all of its weights from anew, if any."""
    from vllm.model_executor.model_loader import get_model_loader

    load_config = vllm_config.load_config
    _loadings.pop(model, None)
    for begun in _reload_begun:
        begun()
    with _loading(model, type(get_model_loader(load_config)), str(load_config.load_format)):
        yield


def models(vllm_config: Any) -> tuple[Any, Any]:
    """The model of this process's worker, and its drafter's; None in place of the latter if there
    is none."""
    runner = worker_of(vllm_config).model_runner
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    return runner.get_model(), getattr(drafter, "model", None)


def worker_of(vllm_config: Any) -> Any:
    """The worker of this process with this configuration, or with one that it is a copy of, as the
    parts of a `MultiConnector` get."""
    model = vllm_config.model_config
    for worker in _workers:
        if worker.vllm_config.model_config is model:
            return worker
    # Without the plugin, nobody saw it begin.
    from vllm.v1.worker.worker_base import WorkerBase

    return next(
        each
        for each in gc.get_objects()
        if issubclass(type(each), WorkerBase) and each.vllm_config.model_config is model
    )


def _configurations(vllm_config: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    speculation = vllm_config.speculative_config
    drafter = speculation and speculation.draft_model_config
    for config in filter(None, (vllm_config.model_config, drafter)):
        yield config, config.hf_config.to_dict()


def configuration(model_config: Any) -> dict[str, Any]:
    """A model's configuration by Hugging Face, as it was before the model was made.

    Models write into it what they worked out. Without the plugin, that is in it if the worker runs
    in this process."""
    for worker in _workers:
        for config, told in getattr(worker, "_penstock_told", ()):
            if config is model_config:
                return dict(told)
    found: dict[str, Any] = model_config.hf_config.to_dict()
    return found


def weight_files(model: Any) -> list[str] | None:
    """The files that hold all of a model's weights as vLLM loaded them; None if they came, or may
    have come, from elsewhere."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loading = _loadings.get(model)
    # A model may read on its own, and ask the loader for nothing.
    if loading is None or not loading.files:
        return None
    if any(
        loader is not DefaultModelLoader or load_format in _COPIES_OF_FILES
        for loader, load_format in loading.loaders
    ):
        return None
    return sorted(set(loading.files))


def hides_weights(model: Any) -> bool:
    """Whether some of a model's weights are not among its tensors.

    For a CPU's kernels, vLLM packs weights into objects of its own, and leaves tensors without
    elements. So do some kernels of GPUs, as those of Triton for MXFP4 (not confirmed on a
    device)."""
    return any(_hides(module) for module in model.modules())


def _hides(module: Any) -> bool:
    import torch

    known = (torch.Tensor, torch.dtype, torch.Size, dict, set, enum.Enum)
    for name, value in vars(module).items():
        if type(value).__name__.endswith("GEMMHandler"):
            return True
        # What a kernel has made of a weight, in a class of its own.
        known = (torch.Tensor, torch.dtype, torch.Size, dict, set, enum.Enum)
        if "weight" in name and not (
            _is_plain(value) or callable(value) or isinstance(value, known)
        ):
            return True
    # Kernels for GPTQ leave indices and zero points empty that they do without.
    return any(
        not tensor.numel() and (tensor.is_cpu or _is_weight(name))
        for name, tensor in module.named_parameters(recurse=False)
    )


def _is_weight(name: str) -> bool:
    return "weight" in name and "g_idx" not in name and "zero" not in name


def weight_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's weights, as they are in memory."""
    return parts(model.named_parameters())


def parts(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors with memory of their own. One that is made of others, as torchao's are, is given as
    those. One without memory is left out: it is of a part that the engine does not use, as that for
    images in an engine for text alone."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    for name, tensor in named:
        if is_traceable_wrapper_subclass(tensor):
            inner, _ = tensor.__tensor_flatten__()
            yield from parts((f"{name}.{each}", getattr(tensor, each)) for each in inner)
        elif not tensor.is_meta:
            yield name, tensor


_COPIES_OF_FILES = ("npcache",)
"""Formats that vLLM reads from copies it has made of the files, perhaps of older ones."""

_COPIES = ("_bf16x3_weight", "cos_sin_cache_bf16")
"""Buffers that some kernels get in a second form."""

_PLACEMENT = ("_expert_map", "expert_mask", "expert_placement", "expert_load")
"""Buffers that tell which rank computes which expert, or that count."""


def buffers(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's tensors that are not weights, but that it computes with: rotary caches, scales.
    Each with its name in every layer that uses it."""
    places = {tensor.untyped_storage().data_ptr() for _, tensor in weight_tensors(model)}
    for name, tensor in parts(model.named_buffers(remove_duplicate=False)):
        last = name.rpartition(".")[2]
        if last in _COPIES or any(part in last for part in _PLACEMENT):
            continue
        # Another view of a weight, which is digested with the weights.
        if tensor.numel() and tensor.untyped_storage().data_ptr() in places:
            continue
        if last == "cos_sin_cache":
            # Some kernels keep it as it was before it was rounded to the model's type.
            tensor = tensor.to(dtype)
        yield name.replace(".base_layer.", "."), tensor


_KERNELS = ("use_flashinfer", "use_aiter", "_enforce_enable", "training")
"""Settings of a rotary embedding that choose the kernel."""


def position_settings(model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The settings of a model's rotary embeddings, each with its name in every layer.

    An embedding may have several caches, and choose by an option that is nowhere else."""
    for name, module in model.named_modules(remove_duplicate=False):
        if ".rotary_embedding" not in type(module).__module__:
            continue
        told = {
            key: value
            for key, value in vars(module).items()
            if key not in _KERNELS and _is_plain(value)
        }
        yield name.replace(".base_layer.", "."), {"kind": type(module).__name__, **told}


def attention_settings(model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the modules around a model's attention hold of switches and factors, each with its name.

    Options that are nowhere else may decide them: by the longest prompt, Llama 4 scales queries."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    for name, module in model.named_modules(remove_duplicate=False):
        if any(isinstance(each, AttentionLayerBase) for each in module.children()):
            told = {
                key: value
                for key, value in sorted(vars(module).items())
                if isinstance(value, (bool, float)) and not key.startswith(_HOW)
            }
            yield name.replace(".base_layer.", "."), told


_HOW = ("training", "use_", "enable_", "is_sequence_parallel", "_")
"""What switches are called that choose the kernel, or the parallelism."""


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, (bool, int, float, str))
