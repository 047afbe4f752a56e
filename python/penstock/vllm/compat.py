"""What Penstock needs from vLLM's inside, for the versions it knows.

Every version check and every use of a name that vLLM does not document is here.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import vllm
from packaging.version import Version
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from penstock.errors import ConfigError
from penstock.plan.split import Room
from penstock.vllm.adapters import (
    Adapter,
    LoadedAdapters,
    NamedAdapters,
    content_digest,
    files_state,
)
from penstock.vllm.groups import Group, Groups

SUPPORTED = ("0.32",)
"""Minor versions of vLLM that the end-to-end tests run against."""

CONNECTOR = "PenstockConnector"
"""The connector's name in vLLM's configuration."""

_SEEDED_HASHES = ("xxhash", "xxhash_cbor")


def check_version() -> None:
    """Refuses a vLLM that Penstock was not built for.

    Raises:
        ConfigError: with the versions that are.
    """
    version = Version(vllm.__version__)
    if f"{version.major}.{version.minor}" not in SUPPORTED:
        raise ConfigError(
            f"this Penstock works with vLLM {', '.join(SUPPORTED)}, found {vllm.__version__}; "
            "install one of these, or a Penstock that knows this vLLM"
        )


_SPECS = {
    "full_attention": FullAttentionSpec,
    "mla_attention": kv_cache_interface.MLAAttentionSpec,
    "sliding_window": kv_cache_interface.SlidingWindowSpec,
}

NULL_BLOCK = 0
"""The block that stands in a block table for one that is not needed any more."""


def transfer_groups(vllm_config: Any, kv_cache_config: KVCacheConfig) -> Groups:
    """The KV-cache groups that the connector loads and stores: all that vLLM finds by prefix.

    Raises:
        ConfigError: says what the model or the options have that is not supported, and what to
            do about it.
    """
    if not kv_cache_config.kv_cache_groups:
        raise ConfigError("the model keeps no KV cache, so there is nothing to pool")
    groups = []
    for index in kv_cache_config.prefix_cacheable_group_ids:
        group = kv_cache_config.kv_cache_groups[index]
        _check_group(group)
        spec = group.kv_cache_spec
        window = spec.sliding_window if spec_kind(spec) == "sliding_window" else None
        groups.append(
            Group(
                index=index,
                kind=spec_kind(spec),
                block_size=spec.block_size,
                window=window,
                dtype=str(spec.dtype),
                layer_names=tuple(group.layer_names),
            )
        )
    if not groups:
        raise ConfigError("vLLM finds none of the model's KV cache by prefix: nothing to pool")
    parallel = vllm_config.parallel_config
    problems = {
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "KV scales calculated at run time": bool(
            getattr(vllm_config.cache_config, "calculate_kv_scales", False)
        ),
        # Either may take the KV cache's memory away under a copy that was ordered before.
        "sleep mode (--enable-sleep-mode, --enable-cumem-allocator)": bool(
            vllm_config.model_config.enable_sleep_mode
            or vllm_config.model_config.enable_cumem_allocator
        ),
        "KV caches of several precisions with vLLM's model runner V2 (VLLM_USE_V2_MODEL_RUNNER=0 "
        "has V1)": _zeroes_early(vllm_config, kv_cache_config),
    }
    _refuse(name for name, present in problems.items() if present)
    check_block_hashing(vllm_config.cache_config.prefix_caching_hash_algo)
    return Groups(groups)


def _zeroes_early(vllm_config: Any, kv_cache_config: KVCacheConfig) -> bool:
    """Whether vLLM overwrites blocks of a preempted request before the connector is told of the
    preemption: a store that still reads them would keep zeros under the hash of what they were.

    Model runner V2 zeroes new blocks first (`update_requests`, then `pre_forward`); V1 tells
    connectors first (`handle_preemptions`, then `_update_states`).
    """
    return bool(kv_cache_config.needs_kv_cache_zeroing and vllm_config.use_v2_model_runner)


def _check_group(group: Any) -> None:
    spec = group.kv_cache_spec
    kind = spec_kind(spec)
    if type(spec) is not _SPECS.get(kind):
        raise ConfigError(
            f"the model's layer {group.layer_names[0]} and {len(group.layer_names) - 1} others "
            f"keep KV of the kind {type(spec).__name__}; full attention (MHA, GQA, MQA, MLA) and "
            "sliding windows are supported. Serve this model without Penstock"
        )
    problems = {
        "a draft model (speculative decoding with its own layers)": group.is_eagle_group,
        "compressed KV states": spec.tokens_per_state != 1,
        "padded KV pages": spec.page_size_padded is not None,
        "packed heads": spec.num_head_slots is not None or spec.state_content_bytes is not None,
        "per-token KV quantization": spec.kv_quant_mode.value not in (0, 1),
        "windows longer than the sliding one": bool(getattr(spec, "extra_retained_tokens", 0)),
    }
    _refuse(name for name, present in problems.items() if present)


def _refuse(problems: Iterable[str]) -> None:
    if found := list(problems):
        raise ConfigError(
            f"not supported yet: {', '.join(found)}. Switch it off, or serve without Penstock"
        )


def continues_prefixes(vllm_config: Any) -> bool:
    """Whether the engine can compute several tokens after some that are in its KV cache.

    vLLM's CPU kernels for MLA cannot, for which reason it switches its prefix cache off there:
    what is left to compute after a load must be a single token, as in decoding.
    """
    return not (vllm_config.model_config.use_mla and is_cpu())


def check_block_hashing(algorithm: str) -> None:
    """Refuses block hashes that differ from process to process.

    Raises:
        ConfigError: the algorithm is seeded at random.
    """
    if algorithm in _SEEDED_HASHES and os.environ.get("PYTHONHASHSEED") is None:
        raise ConfigError(
            f"--prefix-caching-hash-algo {algorithm} hashes blocks with a random seed, so no "
            "other process would find them: use sha256 (the default), or set PYTHONHASHSEED to "
            "the same number on every node"
        )


def none_hash() -> bytes:
    """The hash that starts every chain of block hashes; set once the engine core is up."""
    return bytes(kv_cache_utils.NONE_HASH)


def tokens_per_step(vllm_config: Any) -> int:
    """Tokens that a step computes at most."""
    return int(vllm_config.scheduler_config.max_num_batched_tokens)


def requests_per_step(vllm_config: Any) -> int:
    """Requests that a step computes at most."""
    return min(int(vllm_config.scheduler_config.max_num_seqs), tokens_per_step(vllm_config))


def cache_probe(block_pool: Any) -> Callable[[bytes, int], bool]:
    """Tells of a block's hash and vLLM's group whether the engine's own prefix cache has it."""

    def is_cached(block_hash: bytes, group: int) -> bool:
        return block_pool.get_cached_block(block_hash, [group]) is not None

    return is_cached


def block_hashes(request: Any, hash_block_size: int | None, block_size: int) -> Sequence[bytes]:
    """The chained hashes of the request's full blocks, one per `block_size` tokens."""
    hashes: Sequence[bytes] = kv_cache_utils.resolve_block_hashes(
        request.block_hashes, hash_block_size or block_size, block_size
    )
    return hashes


def tenant(request: Any) -> bytes:
    """The request's cache salt, which is part of its first block's hash and so of all; none if it
    has none."""
    salt: str | None = request.cache_salt
    return (salt or "").encode(errors="surrogatepass")


class _Adapters:
    """What this process knows of LoRA adapters: of the engine that came up last in it."""

    named: NamedAdapters | None = None
    loaded: LoadedAdapters | None = None
    options = ""


def adapter(request: Any) -> Adapter | None:
    """The LoRA adapter that the request's blocks are named by; None if it asks for none."""
    if (asked := request.lora_request) is None:
        return None
    # A request without a full block has no hash yet.
    unknown = Adapter(asked.lora_int_id, asked.lora_path, variant="", digest="")
    return cast("Adapter", getattr(request, "penstock_adapter", unknown))


def name_adapters(vllm_config: Any, named: NamedAdapters) -> None:
    """Has the hashes of blocks hold the content of their request's LoRA adapter, in this engine
    core."""
    from vllm.v1.engine.core import EngineCore

    _Adapters.named, _Adapters.options = named, _adapter_options(vllm_config)
    keys, add = kv_cache_utils._gen_lora_extra_hash_keys, EngineCore.add_lora
    if hasattr(keys, "__wrapped__"):
        return

    @functools.wraps(keys)
    def wrapped_keys(request: Any) -> list[tuple[str, ...]]:
        found: list[tuple[str, ...]] = keys(request)
        if not found or _Adapters.named is None:
            return found
        if (adapter := getattr(request, "penstock_adapter", None)) is None:
            # Once a request: all its blocks are of one chain.
            asked = request.lora_request
            adapter = _Adapters.named.name(
                asked.lora_int_id, _adapter_folder(asked), _adapter_variant(asked)
            )
            request.penstock_adapter = adapter
        return [(*found[0], adapter.digest)] if adapter.digest else found

    @functools.wraps(add)
    def wrapped_add(self: Any, asked: Any) -> bool:
        is_added: bool = add(self, asked)
        if _Adapters.named is not None:
            _Adapters.named.on_loaded(
                asked.lora_int_id, _adapter_folder(asked), _adapter_variant(asked)
            )
        return is_added

    kv_cache_utils._gen_lora_extra_hash_keys = wrapped_keys
    EngineCore.add_lora = wrapped_add


def watch_adapters(vllm_config: Any, loaded: LoadedAdapters) -> None:
    """Tells `loaded` of the content of every LoRA adapter that this worker's model reads."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    _Adapters.loaded, _Adapters.options = loaded, _adapter_options(vllm_config)
    load = WorkerLoRAManager._load_adapter
    if hasattr(load, "__wrapped__"):
        return

    @functools.wraps(load)
    def wrapped_load(self: Any, asked: Any) -> Any:
        folder = Path(_adapter_folder(asked))
        before = files_state(folder)
        found = load(self, asked)
        if _Adapters.loaded is not None:
            digest = content_digest(folder, _adapter_variant(asked))
            is_same = before == files_state(folder)
            _Adapters.loaded.on_loaded(asked.lora_int_id, digest if is_same else "")
        return found

    WorkerLoRAManager._load_adapter = wrapped_load


def _adapter_folder(asked: Any) -> str:
    """Where the files of a LoRA request's adapter are, downloaded if they come from a hub."""
    from vllm.lora.utils import get_adapter_absolute_path

    try:
        return str(get_adapter_absolute_path(asked.lora_path))
    except Exception:
        # Of many kinds, by hub and network; vLLM raises it again when it loads the adapter.
        return str(asked.lora_path)


def _adapter_options(vllm_config: Any) -> str:
    """What the engine's options make of an adapter's files."""
    lora = vllm_config.lora_config
    names = ("lora_dtype", "target_modules", "enable_moe_shared_loras")
    return " ".join(f"{name}={getattr(lora, name, None)}" for name in names)


def _adapter_variant(asked: Any) -> str:
    return f"{_Adapters.options} is_3d={getattr(asked, 'is_3d_lora_weight', False)}"


def block_table(scheduler_output: Any) -> Callable[[str], Sequence[Sequence[int]]]:
    """Request id → its present block ids by vLLM's groups, for requests scheduled in this step."""
    resolve: Callable[[str], Sequence[Sequence[int]]]
    resolve = scheduler_output.kv_connector_block_state.resolve_block_ids
    return resolve


def newly_allocated(scheduler_output: Any) -> Iterator[int]:
    """The blocks that requests scheduled in this step were given with it."""
    for request in scheduler_output.scheduled_new_reqs:
        for blocks in request.block_ids:
            yield from blocks
    for new in scheduler_output.scheduled_cached_reqs.new_block_ids:
        for blocks in new or ():
            yield from blocks


def layer_index(layer_name: str) -> int:
    """The layer's index in the whole model, from a name like ``model.layers.3.self_attn.attn``.

    Raises:
        ConfigError: the name does not hold exactly one index.
    """
    numbers = [part for part in layer_name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise ConfigError(f"cannot tell the index of layer {layer_name!r}")
    return int(numbers[0])


def model_extent(vllm_config: Any) -> tuple[int, int]:
    """Layers and KV heads of the whole model; MLA has one latent, which counts as a head."""
    model = vllm_config.model_config
    heads = 1 if model.use_mla else int(model.get_total_num_kv_heads())
    return int(model.get_total_num_hidden_layers()), heads


def stages(vllm_config: Any) -> list[tuple[int, int]]:
    """The layers of each pipeline stage, as half-open ranges."""
    from vllm.distributed.utils import get_pp_indices

    size = vllm_config.parallel_config.pipeline_parallel_size
    layers, _ = model_extent(vllm_config)
    return [get_pp_indices(layers, rank, size) for rank in range(size)]


def kv_head_range(vllm_config: Any, tp_rank: int) -> tuple[int, int]:
    """The KV heads that a tensor-parallel rank holds, as a half-open range.

    With fewer KV heads than ranks, vLLM gives `tp / heads` consecutive ranks the same head.
    """
    _, total = model_extent(vllm_config)
    size = vllm_config.parallel_config.tensor_parallel_size
    if total >= size:
        heads = total // size
        return tp_rank * heads, (tp_rank + 1) * heads
    head = tp_rank * total // size
    return head, head + 1


def kv_replica(vllm_config: Any, tp_rank: int) -> tuple[int, int]:
    """The rank's number among the ranks that hold the same KV heads, and how many they are."""
    _, total = model_extent(vllm_config)
    count = max(1, vllm_config.parallel_config.tensor_parallel_size // total)
    return tp_rank % count, count


def tp_rank() -> int:
    """This worker's rank in its tensor-parallel group."""
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)


def cuda_device(devices: AbstractSet[Any]) -> int | None:
    """The ordinal of the CUDA device that the KV cache's tensors are on, given all their devices;
    None for host memory.

    Raises:
        ConfigError: they are on several, or on one of a kind that nothing here copies from.
    """
    kinds = {device.type for device in devices}
    if len(devices) > 1 or not kinds <= {"cpu", "cuda"}:
        raise ConfigError(
            f"the KV cache is on {', '.join(map(str, sorted(devices, key=str)))}; Penstock "
            "copies from host memory or from one CUDA device. Serve without Penstock"
        )
    return next((device.index or 0 for device in devices if device.type == "cuda"), None)


def current_stream(cuda_device: int) -> int:
    """The handle of the stream that this thread gives the device its work on."""
    import torch

    return int(torch.cuda.current_stream(cuda_device).cuda_stream)


@contextmanager
def operators_cores() -> Iterator[None]:
    """On a CPU, threads started inside may run on every core that the operator gave to the engine.

    vLLM's CPU worker is bound to the cores that the model computes on, and threads inherit that:
    copies and transfers would take the model's time while other cores idle. The process that
    started the worker has the cores as the operator set them. Beside a GPU the model needs few, and
    a worker's cores are those near its device (``--numa-bind``): threads stay on them, and the
    memory that they bring into being is near it too.
    """
    if not is_cpu():
        yield
        return
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


def has_penstock(vllm_config: Any) -> bool:
    """Whether the engine's connector is Penstock's."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == CONNECTOR


def attention_backends(vllm_config: Any) -> list[Any]:
    """The attention backend classes of the model; of the default one where none is loaded."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

    return cast("list[Any]", get_current_attn_backends(vllm_config))


def listed_layouts(backends: Sequence[Any]) -> list[str]:
    """The KV layouts that vLLM lists for these backends together, most preferred first."""
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts

    return [layout.name for layout in get_supported_kv_cache_layouts(backends)]


def kernel_block_size(block_size: int, backends: Sequence[Any]) -> int:
    """Tokens of the blocks that the kernels take; vLLM splits its own where they are larger."""
    from vllm.v1.worker.utils import select_common_block_size

    try:
        return int(select_common_block_size(block_size, list(backends)))
    except ValueError:
        # There is no such size: vLLM refuses to start, and says so itself.
        return block_size


def forced_layout() -> str | None:
    """The layout that the environment variable VLLM_KV_CACHE_LAYOUT asks for."""
    import vllm.envs

    name: str | None = vllm.envs.VLLM_KV_CACHE_LAYOUT
    return {"NHD": "LBNHC", "HND": "LBHNC"}.get(name, name) if name else None


def is_cpu() -> bool:
    """Whether this is vLLM's CPU build."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def spec_kind(spec: Any) -> str:
    """vLLM's name for a KV-cache spec's kind, like ``full_attention``."""
    return str(kv_cache_interface.get_kv_cache_spec_kind(spec).value)


def engine_config(model: str, transfer: dict[str, Any]) -> Any:
    """vLLM's configuration for serving a model, with defaults for all else; loads no weights."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(
        model=model, skip_tokenizer_init=True, kv_transfer_config=KVTransferConfig(**transfer)
    )
    return args.create_engine_config()


def expected_specs(vllm_config: Any) -> list[Any]:
    """The KV-cache specs of the model's layers, a spec a kind, from its configuration alone.

    Raises:
        ConfigError: the model keeps state that only the loaded model can describe.
    """
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    model, cache = vllm_config.model_config, vllm_config.cache_config
    if model.is_hybrid or model.is_attention_free:
        raise ConfigError(
            f"{model.model} has layers that keep state other than attention's: only the loaded "
            "model tells their sizes; the server's log names the layout that it gets"
        )
    sizes = {
        "block_size": cache.block_size,
        "num_kv_heads": model.get_num_kv_heads(vllm_config.parallel_config),
        "head_size": model.get_head_size(),
        "dtype": kv_cache_dtype_str_to_dtype(cache.cache_dtype, model),
    }
    if model.use_mla:
        return [kv_cache_interface.MLAAttentionSpec(**sizes)]
    window = model.get_sliding_window()
    windowed = (
        [kv_cache_interface.SlidingWindowSpec(**sizes, sliding_window=window)] if window else []
    )
    return [FullAttentionSpec(**sizes), *windowed]


def wrap_layout_resolution(
    report: Callable[[Any, Callable[[], list[str]]], list[str]],
    decide: Callable[[Any, Sequence[Sequence[str]], Sequence[Any]], None],
) -> None:
    """Has `report` say which layouts this process's worker supports, given its configuration and
    vLLM's own answer, and `decide` called before the engine core resolves the layout, with its
    configuration, all workers' answers and all specs. Wraps once in a process."""
    from vllm.v1.engine import core
    from vllm.v1.worker.worker_base import WorkerBase

    supported, resolve = WorkerBase.get_supported_kv_cache_layouts, core.resolve_kv_cache_layout
    if hasattr(supported, "__wrapped__"):
        return

    @functools.wraps(supported)
    def wrapped_supported(self: Any) -> list[str]:
        return report(self.vllm_config, lambda: cast("list[str]", supported(self)))

    @functools.wraps(resolve)
    def wrapped_resolve(vllm_config: Any, layouts: list[list[str]], specs: Any = None) -> Any:
        found = list(specs or ())
        decide(vllm_config, layouts, found)
        return resolve(vllm_config, layouts, found)

    WorkerBase.get_supported_kv_cache_layouts = wrapped_supported
    core.resolve_kv_cache_layout = wrapped_resolve


def block_bytes(vllm_config: Any, specs: Sequence[Mapping[str, Any]]) -> list[int]:
    """Bytes that a block takes on each worker, given its layers' KV-cache specs."""
    groups = kv_cache_utils.get_kv_cache_groups(vllm_config, _merged(specs))
    return [
        kv_cache_utils._pool_bytes_per_block(
            vllm_config, kv_cache_utils._project_kv_cache_groups_to_worker(groups, own)
        )
        if own
        else 0
        for own in specs
    ]


def request_blocks(vllm_config: Any, specs: Sequence[Mapping[str, Any]]) -> int:
    """Blocks that a request of the greatest length takes."""
    groups = kv_cache_utils.get_kv_cache_groups(vllm_config, _merged(specs))
    many = 1 << 20
    config = KVCacheConfig(num_blocks=many, kv_cache_tensors=[], kv_cache_groups=groups)
    requests: float = kv_cache_utils.get_max_concurrency_for_kv_cache_config(vllm_config, config)
    return round(many / requests)


def _merged(specs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A new dictionary each time: vLLM changes the one that it groups."""
    return {name: spec for own in specs for name, spec in own.items()}


def wrap_kv_memory(
    asks: Callable[[Any], bool],
    decide: Callable[[Any, Sequence[Mapping[str, Any]], Sequence[int], Sequence[Room]], list[int]],
) -> None:
    """Has `decide` say how many bytes of KV each worker gets, in engines whose configuration
    `asks` for it. Wraps once in a process."""
    from vllm.v1.engine import core
    from vllm.v1.executor import Executor

    measure, configure = Executor.determine_available_memory, core.get_kv_cache_configs
    if hasattr(configure, "__wrapped__"):
        return
    rooms: list[Room] = []

    @functools.wraps(measure)
    def wrapped_measure(self: Any) -> list[int]:
        available: list[int] = measure(self)
        if asks(self.vllm_config):
            rooms[:] = self.collective_rpc(_room)
        return available

    @functools.wraps(configure)
    def wrapped_configure(vllm_config: Any, specs: list[Any], available: list[int]) -> Any:
        if not (asks(vllm_config) and any(specs)):
            return configure(vllm_config, specs, available)
        available = decide(vllm_config, specs, available, rooms)
        # vLLM divides by the bytes of a block, which on a rank without attention layers are none.
        own = iter(configure(vllm_config, *_with_layers(specs, available)))
        configs = [next(own) if layers else None for layers in specs]
        return [config or _without_layers(configs) for config in configs]

    Executor.determine_available_memory = wrapped_measure
    core.get_kv_cache_configs = wrapped_configure


def _with_layers(specs: list[Any], available: list[int]) -> tuple[list[Any], list[int]]:
    kept = [(layers, given) for layers, given in zip(specs, available, strict=True) if layers]
    return [layers for layers, _ in kept], [given for _, given in kept]


def _without_layers(configs: Sequence[Any]) -> Any:
    """The configuration of a worker that has no layer in any group, beside those of the others."""
    other = next(config for config in configs if config is not None)
    return KVCacheConfig(
        num_blocks=other.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            dataclasses.replace(group, layer_names=[]) for group in other.kv_cache_groups
        ],
    )


def _room(worker: Any) -> Room:
    """Run in each worker after it has measured what the model takes: what its device has free, less
    what --gpu-memory-utilization keeps back for buffers that are made later, and what the graphs
    will take that are captured later. vLLM estimates that only where it measures the KV memory
    itself: with --kv-cache-memory-bytes what is kept back has to do."""
    import socket

    host = socket.gethostname()
    if is_cpu():
        from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

        node = get_allowed_cpu_list()[0].numa_node
        return Room((host, node), int(get_memory_node_info(node).available_memory))
    import torch

    device = worker.device
    free, total = torch.cuda.mem_get_info(device)
    kept = (1 - worker.cache_config.gpu_memory_utilization) * total
    kept += getattr(worker, "cudagraph_memory_estimate", 0)
    uuid = torch.cuda.get_device_properties(device).uuid
    return Room((host, str(uuid)), max(0, int(free - kept)))


_REST_MILLISECONDS = 5


class _Rest:
    """Whether this process has nothing to hurry for."""

    on = False


def rest(on: bool) -> None:
    """Has this process sleep until the next message between engine core and workers, while `on`,
    instead of asking its queue over and over.

    vLLM's processes spin on their queues for a second after each message, which saves some
    microseconds a step. While all requests wait for loads that takes a core from the loads and
    saves nothing.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    _Rest.on = on
    wait = SpinCondition.wait
    if hasattr(wait, "__wrapped__"):
        return

    @functools.wraps(wait)
    def wrapped_wait(self: Any, timeout_ms: int | None = None) -> None:
        if _Rest.on:
            # As if the last message had come long ago: the queue then waits for its socket.
            self.last_read = float("-inf")
            timeout_ms = min(_REST_MILLISECONDS, timeout_ms or _REST_MILLISECONDS)
        wait(self, timeout_ms)

    SpinCondition.wait = wrapped_wait


def metric_per_engine(metric: Any, labels: dict[int, list[object]]) -> dict[int, Any]:
    """One labelled child of a Prometheus metric per engine index."""
    return {index: metric.labels(*values) for index, values in labels.items()}
