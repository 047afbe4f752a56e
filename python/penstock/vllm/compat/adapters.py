"""LoRA adapters: puts their content into block hashes, and watches which content a model reads."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, cast

from penstock.vllm.adapters import (
    Adapter,
    LoadedAdapters,
    NamedAdapters,
    content_digest,
    files_state,
    variant,
)


class _Adapters:
    """This process's knowledge of LoRA adapters, for the engine that it started last."""

    named: NamedAdapters | None = None
    loaded: LoadedAdapters | None = None
    options = ""


def adapter(request: Any) -> Adapter | None:
    """The LoRA adapter in the request's block hashes; None if the request asks for none."""
    if (asked := request.lora_request) is None:
        return None
    # A request without a full block has no hash yet, so its adapter may be unknown.
    unknown = Adapter(asked.lora_int_id, asked.lora_path, variant="", digest="")
    return cast("Adapter", getattr(request, "penstock_adapter", unknown))


def name_adapters(vllm_config: Any, named: NamedAdapters) -> None:
    """Makes block hashes in this engine core include the content of their request's LoRA
    adapter."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine.core import EngineCore

    _Adapters.named, _Adapters.options = named, adapter_options(vllm_config)
    keys, add = kv_cache_utils._gen_lora_extra_hash_keys, EngineCore.add_lora
    if hasattr(keys, "__wrapped__"):
        return

    @functools.wraps(keys)
    def wrapped_keys(request: Any) -> list[tuple[str, ...]]:
        found: list[tuple[str, ...]] = keys(request)
        if not found or _Adapters.named is None:
            return found
        if (adapter := getattr(request, "penstock_adapter", None)) is None:
            # Once for each request, because all its blocks are in one chain.
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

    _Adapters.loaded, _Adapters.options = loaded, adapter_options(vllm_config)
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
    """The folder of a LoRA request's adapter. Downloads the files if they come from a hub."""
    from vllm.lora.utils import get_adapter_absolute_path

    try:
        return str(get_adapter_absolute_path(asked.lora_path))
    except Exception:
        # Hubs and networks raise many kinds of errors. vLLM raises the error again when it loads
        # the adapter.
        return str(asked.lora_path)


def adapter_options(vllm_config: Any) -> str:
    """The engine's options that change the result of computing with an adapter's files."""
    lora = vllm_config.lora_config
    names = ("lora_dtype", "target_modules", "enable_moe_shared_loras")
    return " ".join(f"{name}={getattr(lora, name, None)}" for name in names)


def _adapter_variant(asked: Any) -> str:
    return variant(_Adapters.options, is_3d=getattr(asked, "is_3d_lora_weight", False))
