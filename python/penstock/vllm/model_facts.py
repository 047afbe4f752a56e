"""What computes KV: the facts about a model that must agree before two engines share objects.

Whatever may change KV is a fact, and :data:`penstock.vllm.compat.MAY_DIFFER` lists what is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.identity import (
    config_digest,
    file_digests,
    files_beside_weights,
    model_folder,
)
from penstock.vllm import compat
from penstock.vllm.groups import Groups
from penstock.vllm.messages import ModelShare
from penstock.vllm.tensors import by_kind, one_digest

Rank = tuple[int, int]
"""Pipeline rank and tensor-parallel rank."""

_IN_MEMORY = ("tensors:", "version:", "alone:")
"""How what stands for weights begins, if each rank tells of its own part."""


@dataclass(frozen=True)
class ModelFacts:
    """The model, and how it is cut over ranks."""

    name: str
    ranks: Rank
    """Number of pipeline ranks, and of tensor-parallel ranks."""
    extent: tuple[int, int]
    """Layers and KV heads of the whole model."""
    identity: Mapping[str, Any]
    """Everything in the configuration that must agree before two engines share objects, whatever
    their ranks. Plain JSON."""
    draft: Mapping[str, Any] | None = None
    """Everything in the drafter's configuration that must agree, see `identity`; None if the
    drafter has no layers of its own."""
    lookup: Callable[[], Mapping[str, Any]] = dict
    """Tells, once the engine is up, what routers need to find its blocks, beside the identity.
    Plain JSON."""


def model_facts(vllm_config: Any, groups: Groups = ()) -> ModelFacts:
    """The facts about the model that all ranks of this engine must agree on, from vLLM's
    configuration and the groups of its KV cache.

    Raises:
        IoError: a file that processes images or the like cannot be read.
        ConfigError: it was changed while it was read, or is not on this machine.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    packing, environment = compat.kernel_packing(vllm_config), compat.environment()
    return ModelFacts(
        name=model.model,
        ranks=(parallel.pipeline_parallel_size, parallel.tensor_parallel_size),
        extent=compat.model_extent(vllm_config, groups),
        identity={
            "config": config_digest(compat.configuration(model)),
            "dtype": str(model.dtype),
            "quantization": str(model.quantization),
            "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
            "hash": vllm_config.cache_config.prefix_caching_hash_algo,
            "options": compat.options(vllm_config),
            **({"environment": environment} if environment else {}),
            **({"kernels": packing} if packing else {}),
            **_files(model, all_of_them=model.is_multimodal_model),
        },
        draft=_draft_facts(vllm_config),
    )


def _files(model: Any, *, all_of_them: bool, is_draft: bool = False) -> dict[str, dict[str, str]]:
    """Name → digest of files beside the weights that vLLM reads, as a fact; no fact without any.

    A model for text reads the settings of its quantization, if they are not in its configuration.
    """
    found: dict[str, str] = {}
    folder = model_folder(model.model, model.revision)
    if folder is not None and all_of_them:
        found |= files_beside_weights(folder)
    elif folder is not None and model.quantization:
        found |= file_digests({path.name: path for path in sorted(folder.glob("*quant*.json"))})
    # What processes images may lie with the tokenizer.
    beside = model_folder(model.tokenizer, model.tokenizer_revision) if all_of_them else None
    if beside is not None and beside != folder:
        told = files_beside_weights(beside)
        found |= {f"tokenizer: {name}": digest for name, digest in told.items()}
    if all_of_them and not is_draft and folder is None and beside is None:
        raise ConfigError(
            f"no folder of the model {model.model} is known on this machine, so nobody can tell "
            "how it makes numbers of images: give the folder in place of the name"
        )
    found |= file_digests({option: Path(path) for option, path in compat.named_files(model)})
    return {"files": found} if found else {}


def _draft_facts(vllm_config: Any) -> dict[str, Any] | None:
    if not compat.has_draft_layers(vllm_config):
        return None
    speculation = vllm_config.speculative_config
    model = speculation.draft_model_config
    return {
        "method": speculation.method,
        "config": config_digest(compat.configuration(model)),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "options": compat.draft_options(vllm_config),
        # Drafters read weights on their own, as for the mask's embedding.
        **_files(model, all_of_them=True, is_draft=True),
    }


def shared_facts(shares: Mapping[Rank, ModelShare | None]) -> dict[str, Any]:
    """What the ranks tell of a model together, as facts. Empty if none tells.

    Weights that came from files are the same on all ranks, so the facts do not depend on how the
    model is cut. Of weights that are known from memory alone, each rank has its own part.

    Raises:
        ConfigError: ranks read different weights, or have different code of the model's own.
    """
    told = {rank: share for rank, share in shares.items() if share is not None}
    if not told:
        return {}
    weights = {rank: share.weights for rank, share in told.items()}
    if any(each.startswith(_IN_MEMORY) for each in weights.values()):
        together = one_digest({str(rank): each for rank, each in weights.items()})
        weights = dict.fromkeys(told, f"{_kind(weights.values())}:{together}")
    code: dict[str, str] = {}
    for rank, share in told.items():
        _check("weights", weights, rank)
        for module, digest in share.code.items():
            if code.setdefault(module, digest) != digest:
                raise ConfigError(
                    f"rank {rank} has another {module} than the ranks before it; all machines must "
                    "have the same code of the model"
                )
    return {
        "weights": next(iter(weights.values())),
        "buffers": by_kind(_buffers(told)),
        **({"code": code} if code else {}),
    }


def _kind(weights: Iterable[str]) -> str:
    """How what stands for the weights of all ranks begins."""
    kinds = {each.rpartition(":")[0] for each in weights}
    named = [kind for kind in kinds if kind.startswith("version:")]
    if len(kinds) == len(named) == 1:
        return named[0].removesuffix(":sample")
    return "alone" if "alone" in kinds else "tensors"


def _check(what: str, values: Mapping[Rank, str], rank: Rank) -> None:
    first_rank, first = next(iter(values.items()))
    if values[rank] != first:
        raise ConfigError(
            f"rank {first_rank} has the {what} {first}, rank {rank} has {values[rank]}; all "
            "machines must have the same files"
        )


def _buffers(told: Mapping[Rank, ModelShare]) -> dict[str, str]:
    """Name → digest, over all ranks. A buffer that is cut over tensor-parallel ranks has a digest
    of its parts."""
    parts: dict[str, dict[str, str]] = {}
    for (_, tensor), share in sorted(told.items()):
        for name, digest in share.buffers.items():
            parts.setdefault(name, {})[str(tensor)] = digest
    return {
        name: one_digest(found) if len(set(found.values())) > 1 else next(iter(found.values()))
        for name, found in parts.items()
    }
