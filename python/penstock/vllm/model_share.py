"""What this rank's models are: digests of weights, of other tensors, and of code of their own.

Files are digested while vLLM loads them, compiles and warms up. What did not come from files is
digested once all is in place.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.identity import WeightFiles, digest_threads
from penstock.vllm import compat
from penstock.vllm.messages import ModelShare
from penstock.vllm.settings import Settings
from penstock.vllm.tensors import digest_tensors, one_digest

logger = logging.getLogger("vllm.penstock")

_under_way: dict[tuple[str, ...], WeightFiles] = {}
"""Files → their digests. A start reads the same files once for each model that they hold."""


def install() -> None:
    """Follows in this process how models get their weights; does nothing the second time."""
    compat.wrap_loading(_begin)


def _begin(vllm_config: Any, files: list[str]) -> None:
    if not _settings(vllm_config).model_id:
        _digests_of(files)


def _digests_of(files: list[str]) -> WeightFiles:
    names = tuple(sorted(set(files)))
    if names not in _under_way:
        with compat.operators_cores():
            _under_way[names] = WeightFiles(names)
    return _under_way[names]


def _settings(vllm_config: Any) -> Settings:
    return Settings.parse(compat.extra_config(vllm_config))


def model_shares(vllm_config: Any) -> tuple[ModelShare, ModelShare | None]:
    """This rank's part of the model, and of a drafter that keeps KV of its own.

    Raises:
        IoError: a file of weights cannot be read.
        ConfigError: a file of weights was changed while it was read.
    """
    model, drafter = compat.models(vllm_config)
    model_id = _settings(vllm_config).model_id
    draft = None
    with compat.operators_cores():
        share = _share(model, vllm_config.model_config.dtype, model_id)
        if drafter is not None and compat.has_draft_layers(vllm_config):
            dtype = vllm_config.speculative_config.draft_model_config.dtype
            # An identity that users give stands for the model that they name.
            draft = _share(drafter, dtype, "")
    _under_way.clear()
    return share, draft


def _share(model: Any, dtype: Any, model_id: str) -> ModelShare:
    threads = digest_threads()
    code: Mapping[str, str] = {
        name: hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for name, file in compat.own_code(model).items()
    }
    settings = {
        f"{name} (settings)": hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
        for name, told in (*compat.position_settings(model), *compat.attention_settings(model))
    }
    return ModelShare(
        weights=f"id:{model_id}" if model_id else _weights(model, threads),
        buffers={**digest_tensors(compat.buffers(model, dtype), threads), **settings},
        code=code,
    )


def _weights(model: Any, threads: int) -> str:
    began = time.monotonic()
    files = compat.weight_files(model)
    if files is not None:
        digests = _digests_of(files)
        found = f"files:{digests.digest()}"
        total, _, read = digests.progress
        what = f"{len(files)} files of weights, {total:,} bytes, {read:,} of them read"
    else:
        found = f"tensors:{one_digest(digest_tensors(compat.weight_tensors(model), threads))}"
        what = "weights in memory, which did not come from files alone"
    logger.info(
        "Penstock: digested %s; the start waited %.2f s for it", what, time.monotonic() - began
    )
    return found
