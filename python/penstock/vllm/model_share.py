"""What this rank's models are: digests of weights, of other tensors, and of code of their own.

Files are digested while vLLM loads them, compiles and warms up. What did not come from files is
digested once all is in place. Weights that change later are known from memory alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.identity import WeightFiles, digest_threads
from penstock.vllm import compat
from penstock.vllm.messages import ModelShare, ModelShares
from penstock.vllm.settings import KEEP, Settings
from penstock.vllm.tensors import digest_tensors, one_digest, sample_tensors
from penstock.vllm.worker import PARTIAL, Reading

logger = logging.getLogger("vllm.penstock")

_under_way: dict[tuple[str, ...], WeightFiles] = {}
"""Files → their digests. A start reads the same files once for each model that they hold."""

_code: weakref.WeakKeyDictionary[Any, Mapping[str, str]] = weakref.WeakKeyDictionary()
"""Model → digests of its own code, as it was when the model was asked for first."""


def install() -> None:
    """Follows in this process how models get their weights; does nothing the second time."""
    compat.wrap_loading(_begin, _under_way.clear)


def _begin(vllm_config: Any, files: list[str]) -> None:
    if not _settings(vllm_config).model_id:
        _digests_of(files)


def _needs_files(vllm_config: Any) -> bool:
    """Whether it matters which files a reload has read."""
    return _settings(vllm_config).weight_updates != KEEP


def _digests_of(files: list[str]) -> WeightFiles:
    names = tuple(sorted(set(files)))
    if names not in _under_way:
        with compat.operators_cores():
            _under_way[names] = WeightFiles(names)
    return _under_way[names]


def _settings(vllm_config: Any) -> Settings:
    return Settings.parse(compat.extra_config(vllm_config))


def starting_models(vllm_config: Any) -> ModelShares:
    """This rank's part of the models, with the weights that the engine was started with.

    Raises:
        IoError: a file of weights cannot be read.
        ConfigError: a file of weights was changed while it was read.
    """
    model_id = _settings(vllm_config).model_id

    def weights(model: Any, is_draft: bool) -> str:
        # An identity that users give stands for the model that they name.
        if model_id and not is_draft:
            return f"id:{model_id}"
        return _starting_weights(model, is_random=vllm_config.load_config.load_format == "dummy")

    shares = _shares(vllm_config, weights)
    _under_way.clear()
    return shares


def live_models(vllm_config: Any, reading: Reading) -> ModelShares | None:
    """This rank's part of the models, with the weights that are in memory now. None if they cannot
    be read, as those that some kernel keeps in a form of its own."""

    def weights(model: Any, is_draft: bool) -> str:
        if reading is Reading.FILES:
            files = None if is_draft else compat.weight_files(model)
            if files is None or not _needs_files(vllm_config):
                raise _NoFiles
            return f"files:{_digests_of(files).digest()}"
        whole = PARTIAL if compat.hides_weights(model) else ""
        if reading is Reading.SAMPLE:
            return f"{whole}sample:{one_digest(sample_tensors(compat.weight_tensors(model)))}"
        return whole + _weights_in_memory(model)

    began = time.monotonic()
    try:
        shares = _shares(vllm_config, weights)
    except _NoFiles:
        return None
    # Whatever it is, the engine goes on, and shares its KV with nobody.
    except Exception as error:
        logger.warning("Penstock: cannot read the weights as they are now: %r", error)
        return None
    finally:
        if reading is Reading.FILES:
            _under_way.clear()
    if reading is Reading.WHOLE:
        logger.info("Penstock: read all weights in memory, in %.3f s", time.monotonic() - began)
    return shares


class _NoFiles(Exception):
    """The weights did not come from files."""


def _shares(vllm_config: Any, weights: Callable[[Any, bool], str]) -> ModelShares:
    """`weights` returns what stands for the weights of a model, which may be a drafter."""
    model, drafter = compat.models(vllm_config)
    draft = None
    with compat.operators_cores():
        share = _share(model, vllm_config.model_config.dtype, weights(model, False))
        if drafter is not None and compat.has_draft_layers(vllm_config):
            dtype = vllm_config.speculative_config.draft_model_config.dtype
            draft = _share(drafter, dtype, weights(drafter, True))
    return ModelShares(share, draft)


def _share(model: Any, dtype: Any, weights: str) -> ModelShare:
    if model not in _code:
        _code[model] = {
            name: hashlib.sha256(Path(file).read_bytes()).hexdigest()
            for name, file in compat.own_code(model).items()
        }
    settings = {
        f"{name} (settings)": hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
        for name, told in (*compat.position_settings(model), *compat.attention_settings(model))
    }
    buffers = digest_tensors(compat.buffers(model, dtype), digest_threads())
    return ModelShare(weights=weights, buffers={**buffers, **settings}, code=_code[model])


def _starting_weights(model: Any, *, is_random: bool) -> str:
    """`is_random`: vLLM made them up, always the same ones for the same tensors."""
    began = time.monotonic()
    files = compat.weight_files(model)
    if files is not None:
        digests = _digests_of(files)
        found = f"files:{digests.digest()}"
        total, _, read = digests.progress
        what = f"{len(files)} files of weights, {total:,} bytes, {read:,} of them read"
    elif not is_random and compat.hides_weights(model):
        found = f"alone:{uuid.uuid4().hex}"
        what = "nothing"
        logger.warning(
            "Penstock: the weights did not come from files alone, and a kernel keeps some in a "
            "form of its own: this engine shares blocks with no other one, unless "
            "penstock.model_id says which weights these are"
        )
    else:
        found = _weights_in_memory(model)
        what = "weights in memory, which did not come from files alone"
    logger.info(
        "Penstock: digested %s; the start waited %.2f s for it", what, time.monotonic() - began
    )
    return found


def _weights_in_memory(model: Any) -> str:
    tensors = compat.weight_tensors(model)
    return f"tensors:{one_digest(digest_tensors(tensors, digest_threads(), on_device=True))}"
