"""What must agree before two SGLang engines share pages.

Penstock makes a namespace of it for each host pool. SGLang's own storage configuration has neither
the type of KV nor the weights. They come from the host pool and from the checkpoint's files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.identity import config_digest, model_folder, weights_digest, weights_identity
from penstock.sglang import compat
from penstock.sglang.settings import Settings

KV = "kv"
"""SGLang's name of the host pool that holds a model's KV."""

_FORMAT = 1
"""Version of the descriptions. Raised when the same description gets another meaning."""

_COMPUTATION = (
    "dtype",
    "quantization",
    "json_model_override_args",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
)
"""Options of SGLang that change what is in a page, or in which order."""

_READS_SAFETENSORS = ("None", "auto", "safetensors")
"""Formats for which SGLang reads the safetensors files, if there are any."""

_GEOMETRY = (
    "head_dim",
    "v_head_dim",
    "layer_num",
    "target_layer_num",
    "start_layer",
    "end_layer",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "dsa_kv_cache_store_fp8",
    "index_head_dim",
    "head_group_num",
    "num_mamba_layers",
    "conv_state_shapes",
    "temporal_state_shape",
    "conv_dtype",
    "temporal_dtype",
    "storage_format_tag",
    "stores_page_envelope",
)
"""Attributes of host pools that say how a page is made up, where a pool has them."""

_RAW = ("torch.uint8", "torch.int8")
"""Types that stand for bytes of any other type: SGLang stores fp8 in them."""

_RANK_SHARDED = frozenset({"mamba"})
"""Side pools that each rank has a part of, also in models whose KV all ranks hold whole."""


def engine_facts(settings: Settings) -> dict[str, Any]:
    """What must agree between engines, whatever the host pool. Plain JSON.

    Raises:
        ConfigError: the weights, or those of an adapter, cannot be told from others.
    """
    model = settings.model_path or compat.published("model_path") or ""
    revision = None if settings.model_path else compat.published("revision")
    scales = compat.published("quantization_param_path")
    return {
        "format": _FORMAT,
        "engine": "sglang",
        # A version may order the bytes of a page anew under the same layout's name.
        "version": compat.version(),
        "weights": _weights(settings, model, revision),
        "config": _configuration(model, revision),
        "adapters": _adapters(),
        "computation": {name: _plain(compat.published(name)) for name in _COMPUTATION},
        "scales": None if scales is None else _content(Path(scales)),
        "salt": settings.salt,
    }


def _weights(settings: Settings, model: str, revision: str | None) -> str:
    if settings.model_id:
        return f"id:{settings.model_id}"
    load_format = str(compat.published("load_format"))
    if load_format == "dummy":
        return f"dummy:{compat.published('random_seed')}"
    found = None
    if model and load_format in _READS_SAFETENSORS:
        found = weights_identity(model, revision)
    elif model and (every := weights_identity(model, revision, all_formats=True)):
        # Which of the folder's files it reads is SGLang's to know.
        found = f"{load_format}:{every}"
    if found is None:
        raise ConfigError(
            f"cannot read the weights of {model or 'the model'!r} to tell its revisions apart: set "
            '"model_path" in --hicache-storage-backend-extra-config to their folder, or "model_id" '
            "to a name that changes with them"
        )
    return found


def _configuration(model: str, revision: str | None) -> str | None:
    """The digest of the model's configuration; None if there is none to read."""
    folder = model_folder(model, revision) if model else None
    try:
        text = (folder / "config.json").read_text() if folder is not None else ""
    except OSError:
        return None
    return config_digest(json.loads(text)) if text else None


def _adapters() -> dict[str, str] | None:
    """Number → content of the LoRA adapters that SGLang was started with.

    SGLang makes the number from name and path, so it stays the same when the files change. An
    adapter that is loaded later gets a random number, which no other engine has.
    """
    if not compat.published("enable_lora"):
        return None
    found = {}
    for adapter in compat.published("lora_paths") or ():
        folder = model_folder(adapter.lora_path, None)
        weights = None if folder is None else weights_digest(folder)
        if folder is None or weights is None:
            raise ConfigError(
                f"cannot read the LoRA adapter {adapter.lora_name!r} to tell its versions apart: "
                "give --lora-paths a folder that has its files"
            )
        found[str(adapter.lora_id)] = f"{weights} {_content(folder / 'adapter_config.json')}"
    return found


def pool_facts(
    settings: Settings, config: Any, name: str, pool: Any, page: Mapping[str, Any], shares: int
) -> dict[str, Any]:
    """What must agree for the pages of one host pool, beside :func:`engine_facts`. Plain JSON.

    `page` says how the bytes of an object are made up. `shares` is the number of objects of a page,
    if it is cut by heads, else 0.

    Raises:
        ConfigError: the type of the KV cannot be known, or SGLang would not store all ranks' pages.
    """
    _check_all_ranks_store(config, name, pool)
    facts = {
        "pool": name,
        "kind": type(pool).__name__,
        "layout": str(pool.layout),
        "kv_dtype": _kv_dtype(settings, name, pool),
        "block_size": int(pool.page_size),
        "object": dict(page),
        "geometry": {key: _plain(getattr(pool, key, None)) for key in _GEOMETRY},
        "heads": int(getattr(pool, "head_num", 0)) // max(1, shares),
        "share": _share(config, name, pool, shares),
    }
    if name.startswith("draft") or _holds_draft_layers(pool):
        facts["draft"] = _draft(settings)
    return facts


def _kv_dtype(settings: Settings, name: str, pool: Any) -> str:
    stored = str(pool.dtype)
    if stored not in _RAW:
        return stored
    said = _said_dtype(settings, name)
    if name == KV and said is None:
        raise ConfigError(
            f"SGLang keeps this model's KV as {stored} and does not tell what type it is: give "
            'SGLang a --kv-cache-dtype, or set "kv_dtype" in '
            "--hicache-storage-backend-extra-config"
        )
    return f"{said} in {stored}, {_device_kind()}"


def _said_dtype(settings: Settings, name: str) -> str | None:
    """The name of a pool's type, as SGLang or else the settings tell it. None if neither does."""
    own = compat.published("speculative_draft_kv_cache_dtype") if name.startswith("draft") else None
    if own is not None:
        # The setting is of the model's KV, not of the drafter's.
        return _given(own)
    told, set_here = _given(compat.published("kv_cache_dtype")), _given(settings.kv_dtype)
    # The settings may be older than the server's options. Under a wrong name, KV of one type would
    # be found as KV of another.
    if told and set_here and told != set_here:
        raise ConfigError(
            f'"kv_dtype" in --hicache-storage-backend-extra-config is {set_here!r}, but SGLang\'s '
            f'--kv-cache-dtype is {told!r}: remove "kv_dtype". It is only needed where SGLang does '
            "not tell the type"
        )
    return told or set_here


def _given(dtype: Any) -> str | None:
    return None if dtype in (None, "", "auto") else str(dtype)


def _device_kind() -> str:
    # The types of one name differ between makers: fp8_e4m3 has other values on ROCm.
    import torch

    return "ROCm" if torch.version.hip else "not ROCm"


def _share(config: Any, name: str, pool: Any, shares: int) -> dict[str, Any]:
    """Which part of the model's pages this rank has."""
    share: dict[str, Any] = {
        "pipeline": [config.pp_rank, config.pp_size],
        "context": [config.attn_cp_rank, config.attn_cp_size],
    }
    if shares:
        # Each object's own name says which heads it has.
        return share | {"cut": config.tp_lcm_size}
    if is_replicated(config, name, pool):
        # All ranks hold the same, and one of them writes it.
        return share | {"decode_context": [config.dcp_rank, config.dcp_size]}
    return share | {"tensor": [config.tp_rank, config.tp_size]}


def is_replicated(config: Any, name: str, pool: Any) -> bool:
    """Whether all tensor-parallel ranks hold the same pages of this host pool. In doubt, no."""
    return bool(config.is_mla_model) and name not in _RANK_SHARDED and not hasattr(pool, "head_num")


def _check_all_ranks_store(config: Any, name: str, pool: Any) -> None:
    # With latent attention, SGLang's `should_backup` has one rank store all side pools but states,
    # also those of which each rank has its own heads. A prompt is found only if all ranks find it.
    is_stored_once = config.is_mla_model and config.tp_size > 1 and name not in _RANK_SHARDED
    if name == KV or not is_stored_once or is_replicated(config, name, pool):
        return
    raise ConfigError(
        f"each of the {config.tp_size} tensor-parallel ranks has its own heads of SGLang's host "
        f"pool {name!r}, but beside latent attention SGLang has only one rank store it: no prompt "
        "would ever be found. Use a drafter with latent attention, or data-parallel attention with "
        "one rank each (--enable-dp-attention, --dp-size as large as --tp-size), or start without "
        "the drafter, or without --hicache-storage-backend"
    )


def _holds_draft_layers(pool: Any) -> bool:
    layers, target = getattr(pool, "layer_num", 0), getattr(pool, "target_layer_num", None)
    return target is not None and layers != target


def _draft(settings: Settings) -> dict[str, Any]:
    model = compat.published("speculative_draft_model_path")
    revision = compat.published("speculative_draft_model_revision")
    weights = None
    if model and not settings.model_id:
        weights = weights_identity(model, revision)
        if weights is None:
            raise ConfigError(
                f"cannot read the weights of the draft model {model!r} to tell its revisions "
                'apart: set "model_id" in --hicache-storage-backend-extra-config to a name that '
                "changes with those of both models"
            )
    return {"method": _plain(compat.published("speculative_algorithm")), "weights": weights}


def _content(path: Path) -> str:
    """SHA-256 of a small file; empty if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value)
