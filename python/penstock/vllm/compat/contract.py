"""The contract with vLLM: checks Penstock's uses of a vLLM against that vLLM's sources.

The check imports nothing from that vLLM. Every name that Penstock uses must exist, and accept the
parameters that Penstock gives it. vLLM itself calls the functions that Penstock wraps and the
methods that the connector overrides. So these must have exactly the known parameters.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.vllm.compat.uses import Use

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = _Function | ast.ClassDef | ast.Assign | ast.AnnAssign

_KV_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
_BASE = f"{_KV_CONNECTOR}.v1.base"
_OURS = Path(__file__).parent.parent / "connector.py"
_OWN = ("scheduler", "worker", "_orders")
"""Members of the connector that are its own, not vLLM's."""
_NEWER = (
    "supports_sleep_mode",
    "unregister_kv_caches",
    "restore_kv_caches",
    "get_external_cache_hit_sources",
)
"""Hooks that not every version has."""


_CACHE = "vllm.v1.kv_cache_interface"
_BLOCKS = "vllm.v1.core.kv_cache_utils"
_LOADER = "vllm.model_executor.model_loader.default_loader"

USES = (
    Use(_BASE, "KVConnectorBase_V1", ("vllm_config", "role", "kv_cache_config")),
    Use(_BASE, "KVConnectorBase_V1._get_connector_metadata", ()),
    Use(_BASE, "KVConnectorHandshakeMetadata"),
    Use(_BASE, "KVConnectorMetadata"),
    Use(_BASE, "KVConnectorRole"),
    *(
        Use(_BASE, f"KVConnectorTransferResults.{name}")
        for name in ("finished_sending", "finished_recving", "failed_recving")
    ),
    Use(_BASE, "KVConnectorWorkerMetadata"),
    Use(_BASE, "SupportsHMA"),
    Use(f"{_KV_CONNECTOR}.v1.metrics", "KVConnectorPromMetrics"),
    Use(f"{_KV_CONNECTOR}.v1.metrics", "KVConnectorStats"),
    Use(f"{_KV_CONNECTOR}.utils", "get_current_attn_backends", ("vllm_config",)),
    Use(_CACHE, "FullAttentionSpec"),
    Use(_CACHE, "MLAAttentionSpec"),
    Use(_CACHE, "SlidingWindowSpec"),
    Use(_CACHE, "ChunkedLocalAttentionSpec"),
    Use(_CACHE, "CrossAttentionSpec"),
    Use(_CACHE, "UniformTypeKVCacheSpecs.from_specs", ("kv_cache_specs",)),
    Use(_CACHE, "KVCacheGroupSpec"),
    Use(_CACHE, "KVCacheConfig"),
    Use(_CACHE, "KVCacheSpec.has_layer_views"),
    Use(_CACHE, "SparseCacheRole"),
    *(
        Use(_CACHE, f"KVCacheConfig.{name}")
        for name in (
            "num_blocks",
            "kv_cache_groups",
            "needs_kv_cache_zeroing",
            "prefix_cacheable_group_ids",
        )
    ),
    *(
        Use("vllm.v1.core.sched.output", f"SchedulerOutput.{name}")
        for name in (
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "total_num_scheduled_tokens",
            "preempted_req_ids",
            "kv_connector_block_state",
        )
    ),
    *(
        Use("vllm.v1.core.sched.output", f"{owner}.{name}")
        for owner, name in (
            ("NewRequestData", "req_id"),
            ("NewRequestData", "num_computed_tokens"),
            ("NewRequestData", "block_ids"),
            ("CachedRequestData", "req_ids"),
            ("CachedRequestData", "num_computed_tokens"),
            ("CachedRequestData", "new_block_ids"),
        )
    ),
    *(
        Use("vllm.v1.request", f"Request.{name}")
        for name in (
            "request_id",
            "block_hashes",
            "num_tokens",
            "num_prompt_tokens",
            "num_computed_tokens",
            "kv_transfer_params",
            "lora_request",
            "cache_salt",
            "trace_headers",
            "skip_reading_prefix_cache",
            "resumable",
        )
    ),
    Use("vllm.v1.core.block_pool", "BlockPool.get_cached_block", ("block_hash", "group_ids")),
    Use("vllm.v1.core.block_pool", "BlockPool.blocks"),
    Use("vllm.v1.core.block_pool", "BlockPool.touch", ("blocks",)),
    Use("vllm.v1.core.block_pool", "BlockPool.free_blocks", ("ordered_blocks",)),
    Use(_CACHE, "get_kv_cache_spec_kind", ("kv_cache_spec",)),
    Use("vllm.distributed.kv_events", "BlockStored"),
    Use("vllm.distributed.kv_events", "BlockRemoved"),
    Use(_BLOCKS, "maybe_convert_block_hash", ("hash_bytes",)),
    Use(_BLOCKS, "NONE_HASH"),
    Use(
        _BLOCKS,
        "generate_block_hash_extra_keys",
        ("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
    ),
    Use(
        _BLOCKS,
        "hash_block_tokens",
        ("hash_function", "parent_block_hash", "curr_block_token_ids", "extra_keys"),
    ),
    Use("vllm.utils.hashing", "get_hash_fn_by_name", ("hash_fn_name",)),
    Use(_BLOCKS, "get_max_concurrency_for_kv_cache_config", ("vllm_config", "kv_cache_config")),
    Use(_BLOCKS, "_gen_lora_extra_hash_keys", ("request",), is_wrapped=True),
    Use("vllm.v1.engine.core", "EngineCore.add_lora", ("lora_request",), is_wrapped=True),
    Use("vllm.v1.engine.input_processor", "InputProcessor.process_inputs"),
    Use("vllm.v1.engine.input_processor", "InputProcessor.vllm_config"),
    Use("vllm.sampling_params", "SamplingParams.extra_args"),
    Use(
        "vllm.v1.engine.core",
        "resolve_kv_cache_layout",
        ("vllm_config", "supported_layouts", "kv_cache_specs"),
        is_wrapped=True,
    ),
    Use("vllm.v1.executor", "Executor.determine_available_memory", (), is_wrapped=True),
    Use("vllm.v1.executor", "Executor.collective_rpc", ("method",)),
    Use(
        "vllm.v1.engine.core",
        "EngineCore.reset_prefix_cache",
        ("reset_running_requests", "reset_connector"),
        is_wrapped=True,
    ),
    Use(
        "vllm.v1.engine.core",
        "EngineCore.collective_rpc",
        ("method", "timeout", "args", "kwargs"),
        is_wrapped=True,
    ),
    Use("vllm.v1.engine.core", "EngineCore.add_request"),
    Use(
        "vllm.v1.engine.core", "EngineCore.set_weight_version", ("weight_version",), is_wrapped=True
    ),
    Use("vllm.v1.engine.core", "EngineCore.wake_up", ("tags",), is_wrapped=True),
    Use("vllm.v1.engine.core", "EngineCore.reset_encoder_cache", (), is_wrapped=True),
    Use("vllm.v1.engine.core", "EngineCore.model_executor"),
    Use("vllm.v1.executor", "Executor.is_sleeping"),
    *(
        Use("vllm.v1.worker.gpu_worker", f"Worker.{name}", ())
        for name in ("start_weight_update", "start_draft_weight_update", "finish_weight_update")
    ),
    Use("vllm.v1.worker.gpu_worker", "Worker.update_weights", ("update_info",)),
    Use("vllm.v1.worker.gpu_worker", "Worker._weight_update_active"),
    Use(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.reload_weights",
        ("weights_iterator", "weights_path", "is_checkpoint_format"),
        is_wrapped=True,
    ),
    Use("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.reload_weights"),
    Use("vllm.model_executor.model_loader", "get_model_loader", ("load_config",)),
    Use("vllm.distributed.parallel_state", "get_pp_group", ()),
    Use("vllm.v1.core.kv_cache_manager", "KVCacheManager.free", ("request",)),
    Use("vllm.distributed.kv_transfer", "get_kv_transfer_group", ()),
    Use(
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory.register_connector",
        ("name", "module_path", "class_name"),
    ),
    Use(
        "vllm.v1.worker.worker_base",
        "WorkerBase.get_supported_kv_cache_layouts",
        (),
        is_wrapped=True,
    ),
    Use("vllm.v1.worker.worker_base", "WorkerBase"),
    Use("vllm.v1.worker.gpu_worker", "Worker.load_model", ()),
    Use("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.get_model", ()),
    Use("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.get_model", ()),
    Use(_LOADER, "DefaultModelLoader.load_weights", ("model", "model_config"), is_wrapped=True),
    Use(
        _LOADER,
        "DefaultModelLoader._prepare_weights",
        (
            "model_name_or_path",
            "subfolder",
            "revision",
            "fall_back_to_pt",
            "allow_patterns_overrides",
        ),
        is_wrapped=True,
    ),
    Use("vllm.config", "get_current_vllm_config_or_none", ()),
    Use("vllm.v1.worker.utils", "select_common_block_size", ("kv_manager_block_size", "backends")),
    Use("vllm.config", "set_current_vllm_config", ("vllm_config",)),
    Use("vllm.v1.attention.backends.utils", "get_supported_kv_cache_layouts", ("backends",)),
    Use("vllm.v1.attention.backend", "AttentionBackend.supported_kv_cache_layouts", ()),
    Use(
        "vllm.lora.worker_manager",
        "WorkerLoRAManager._load_adapter",
        ("lora_request",),
        is_wrapped=True,
    ),
    Use("vllm.lora.utils", "get_adapter_absolute_path", ("lora_path",)),
    Use("vllm.distributed.utils", "get_pp_indices", ("num_hidden_layers", "pp_rank", "pp_size")),
    Use("vllm.distributed.parallel_state", "get_tp_group", ()),
    Use(
        "vllm.distributed.device_communicators.shm_broadcast",
        "SpinCondition.wait",
        ("timeout_ms",),
        is_wrapped=True,
    ),
    Use(
        "vllm.utils.torch_utils", "kv_cache_dtype_str_to_dtype", ("kv_cache_dtype", "model_config")
    ),
    Use("vllm.utils.cpu_resource_utils", "get_allowed_cpu_list", ()),
    Use("vllm.utils.cpu_resource_utils", "get_memory_node_info", ("node_id",)),
    Use("vllm.config", "KVTransferConfig"),
    Use("vllm.config", "VllmConfig"),
    Use("vllm.config", "VllmConfig.compute_hash", ()),
    Use("vllm.config", "VllmConfig._resolve_mm_embedding_inputs", (), is_wrapped=True),
    Use("vllm.config", "get_layers_from_vllm_config", ("vllm_config", "layer_type")),
    Use("vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase"),
    Use("vllm.v1.request", "RequestStatus"),
    Use("vllm.engine.arg_utils", "EngineArgs"),
    Use("vllm.envs", "VLLM_BATCH_INVARIANT"),
    Use("vllm.envs", "VLLM_KV_CACHE_LAYOUT"),
    Use("vllm.platforms", "current_platform"),
    *(
        Use(_CACHE, f"MambaSpec.{name}")
        for name in (
            "shapes",
            "dtypes",
            "mamba_type",
            "mamba_cache_mode",
            "num_speculative_blocks",
        )
    ),
    *(
        Use("vllm.v1.core.sched.output", f"KVConnectorBlockState.{name}")
        for name in ("boundary_state_offloads", "resolve_block_ids")
    ),
    Use("vllm.model_executor.layers.mamba.mamba_utils", "get_conv_state_layout", ()),
    Use("vllm.config.speculative", "SpeculativeConfig.method"),
    Use("vllm.config.speculative", "SpeculativeConfig.kv_cache_dtype"),
    *(
        Use("vllm.model_executor.layers.mamba.mamba_utils", f"MambaStateShapeCalculator.{name}")
        for name in (
            "mamba1_state_shape",
            "mamba2_state_shape",
            "short_conv_state_shape",
            "gated_delta_net_state_shape",
            "linear_attention_state_shape",
        )
    ),
    Use("vllm.model_executor.models", "ModelRegistry"),
    Use("vllm.v1.attention.selector", "get_mamba_attn_backend", ("mamba_type",)),
    Use("vllm.v1.attention.backends.registry", "MambaAttentionBackendEnum"),
    Use("vllm.config.speculative", "SpeculativeConfig.uses_draft_model", ()),
    Use("vllm.config.speculative", "SpeculativeConfig.use_eagle", ()),
    *(
        Use(_CACHE, f"AttentionSpec.{name}")
        for name in (
            "kv_quant_mode",
            "num_head_slots",
            "num_heads",
            "state_content_bytes",
            "state_content_size_bytes",
            "tokens_per_state",
        )
    ),
    Use(_CACHE, "KVQuantMode.is_per_token_head"),
    Use(
        "vllm.v1.attention.backend", "AttentionBackend.supports_kv_cache_dtype", ("kv_cache_dtype",)
    ),
    Use("vllm.v1.attention.backend", "AttentionBackend.supported_kv_cache_dtypes"),
    Use("vllm.v1.attention.backend", "AttentionBackend.get_name", ()),
    Use(
        "vllm.v1.attention.backends.triton_attn",
        "TritonAttentionImpl._ensure_scale_caches",
        ("kv_cache",),
    ),
    Use(
        "vllm.v1.attention.backends.cpu_attn",
        "_get_attn_isa",
        ("dtype", "block_size", "head_size", "kv_cache_dtype"),
    ),
)


class Sources:
    """The package folder of a vLLM. Files are read when a name in them is looked up."""

    def __init__(self, package: Path) -> None:
        self._package = package
        self._files: dict[str, dict[str, ast.stmt]] = {}

    @property
    def version(self) -> str | None:
        """The version that vLLM's build wrote down; None in a checkout that was not built."""
        found = self.find("vllm._version", "__version__")
        value = getattr(found, "value", None)
        return str(value.value) if isinstance(value, ast.Constant) else None

    def find(self, module: str, name: str) -> _Definition | None:
        """The definition of a name, followed through imports.

        A member of a class is found only in the class that defines it, not in derived classes."""
        first, _, method = name.partition(".")
        found = self._names(module).get(first)
        if isinstance(found, ast.ImportFrom):
            for alias in found.names:
                if (alias.asname or alias.name) == first:
                    origin = _absolute(module, found, self._is_package(module))
                    return self.find(origin, f"{alias.name}.{method}".rstrip("."))
        if method and isinstance(found, ast.ClassDef):
            return _members(found).get(method)
        return found if isinstance(found, _Definition) and not method else None

    def _is_package(self, module: str) -> bool:
        return (self._folder(module) / "__init__.py").is_file()

    def _folder(self, module: str) -> Path:
        return self._package.joinpath(*module.split(".")[1:])

    def _names(self, module: str) -> dict[str, ast.stmt]:
        if module not in self._files:
            folder = self._folder(module)
            path = folder / "__init__.py" if self._is_package(module) else folder.with_suffix(".py")
            tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
            self._files[module] = dict(_defined(tree.body))
        return self._files[module]


def _defined(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Names that statements define. Names under a condition come first, so that an unconditional
    definition wins."""
    for statement in body:
        if isinstance(statement, (ast.If, ast.Try)):
            yield from _defined([*statement.body, *statement.orelse])
    for statement in body:
        if isinstance(statement, _Function | ast.ClassDef):
            yield statement.name, statement
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    yield target.id, statement
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, statement
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                yield alias.asname or alias.name, statement


def _members(node: ast.ClassDef) -> dict[str, _Definition]:
    """The names that a class defines in its body, and the attributes that its `__init__` sets."""
    found: dict[str, _Definition] = {}
    for method in node.body:
        if isinstance(method, _Function) and method.name == "__init__":
            for inner in ast.walk(method):
                if isinstance(inner, ast.Assign | ast.AnnAssign):
                    targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                    found |= {t.attr: inner for t in targets if isinstance(t, ast.Attribute)}
    for name, statement in _defined(node.body):
        if isinstance(statement, _Definition):
            found[name] = statement
    return found


def _absolute(module: str, statement: ast.ImportFrom, is_package: bool) -> str:
    if not statement.level:
        return statement.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - statement.level + is_package]
    return ".".join([*parts, *([statement.module] if statement.module else [])])


def violations(package: Path, more: tuple[Use, ...] = ()) -> list[str]:
    """All points, in words, in which the vLLM in this package folder is not as Penstock needs it.

    Args:
        more: uses of this version, in addition to :data:`USES`.
    """
    sources = Sources(package)
    return [*_of_uses(sources, (*USES, *more)), *_of_connector(sources)]


def _of_uses(sources: Sources, uses: Iterable[Use]) -> Iterator[str]:
    for use in uses:
        found = sources.find(use.module, use.name)
        if found is None:
            yield f"{use.module}.{use.name} is not there"
            continue
        if use.parameters is None:
            continue
        if isinstance(found, ast.ClassDef):
            found = sources.find(use.module, f"{use.name}.__init__")
        if not isinstance(found, _Function):
            yield f"{use.module}.{use.name} is no function"
        elif complaint := _mismatch(found, use.parameters, exactly=use.is_wrapped):
            yield f"{use.module}.{use.name} {complaint}"


def _mismatch(function: _Function, given: tuple[str, ...], *, exactly: bool) -> str | None:
    """Why a function does not accept the given parameters; None if it does. With `exactly`, it must
    take these and no others."""
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    if names[:1] in (["self"], ["cls"]):
        del names[0]
    needed = names[: len(names) - len(arguments.defaults)]
    unset = [
        a.arg
        for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    takes = f"takes ({', '.join([*names, *(a.arg for a in arguments.kwonlyargs)])})"
    if exactly:
        same = len(names) == len(given) and not arguments.kwonlyargs
        return None if same else f"{takes}; ({', '.join(given)}) is known"
    if len(given) > len(names) or len(needed) > len(given) or unset:
        return f"{takes}; it is given ({', '.join(given)})"
    return None


def _of_connector(sources: Sources) -> Iterator[str]:
    """Compares the connector with vLLM's base class: the methods that vLLM calls, and those that a
    connector must have."""
    ours = _methods(_class(ast.parse(_OURS.read_text()).body, "PenstockConnector"))
    theirs: dict[str, _Function] = {}
    for name in ("KVConnectorBase_V1", "SupportsHMA"):
        base = sources.find(_BASE, name)
        if isinstance(base, ast.ClassDef):
            theirs |= _methods(base)
    for name, method in ours.items():
        if name in _OWN:
            continue
        if name not in theirs:
            if name in _NEWER:
                continue
            yield f"{_BASE} has no {name}: vLLM does not call it"
        elif _names(method) != _names(theirs[name]):
            yield f"{_BASE}: {name} takes ({', '.join(_names(theirs[name]))})"
    for name, method in theirs.items():
        marks = {getattr(mark, "id", None) for mark in method.decorator_list}
        if "abstractmethod" in marks and name not in ours:
            yield f"{_BASE} wants {name}, which the connector does not have"


def _class(body: list[ast.stmt], name: str) -> ast.ClassDef:
    return next(n for n in body if isinstance(n, ast.ClassDef) and n.name == name)


def _methods(node: ast.ClassDef) -> dict[str, _Function]:
    return {n.name: n for n in node.body if isinstance(n, _Function)}


def _names(function: _Function) -> list[str]:
    """The names of a function's parameters, without stars."""
    arguments = function.args
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    found += [star for star in (arguments.vararg, arguments.kwarg) if star is not None]
    return [argument.arg for argument in found]


def package_in(folder: Path) -> Path | None:
    """vLLM's package folder in a source distribution, an unpacked wheel or a checkout; None if it
    is not there."""
    found = (folder / "vllm", folder)
    return next((p for p in found if (p / "__init__.py").is_file() and p.name == "vllm"), None)


def installed_package() -> Path | None:
    """The folder of the installed vLLM; None if there is none. Does not import vLLM."""
    spec = importlib.util.find_spec("vllm")
    locations = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(locations))) if locations else None
