"""How an engine rounds numbers, if it always computes the same block to the same bits."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

from penstock.vllm.compat.environment import rounding_environment
from penstock.vllm.groups import Groups

_BITS = 24


def rounding(vllm_config: Any, groups: Groups) -> int:
    """A number of 24 bits for all that decides how this engine rounds: two engines with the same
    number compute the same block to the same bits. 0 if not even one engine does.

    vLLM's kernels for CPUs do, whatever else is in a batch and however a prompt is cut, if all
    layers are attention with keys and values. With latent attention and with states they do not
    (``benches/witness_noise.py``). With adapters, quantized weights, images or several ranks nobody
    has looked. Other numbers of threads make other bits. On a device kernels do if vLLM was told to
    (``VLLM_BATCH_INVARIANT``), which no GPU has confirmed.
    """
    from vllm import envs
    from vllm.platforms import current_platform

    # Kernels for CPUs know nothing of vLLM's batch-invariant mode.
    is_cpu = current_platform.is_cpu()
    if not (_is_plain(vllm_config, groups) if is_cpu else envs.VLLM_BATCH_INVARIANT):
        return 0
    facts = (_software(), _hardware(), rounding_environment(), vllm_config.compute_hash())
    digest = hashlib.sha256(repr(facts).encode()).digest()
    return int.from_bytes(digest[: _BITS // 8], "little") or 1


def has_noisy_inputs(vllm_config: Any) -> bool:
    """Whether what goes into the first layer differs by more than rounding from engine to engine.

    Encoders of images have noise of their own. Kernels of quantized weights may quantize what goes
    into them, with scales that depend on the batch. Then what was rounding is a step of few bits.
    """
    model = vllm_config.model_config
    return bool(model.is_multimodal_model or model.quantization is not None)


def _is_plain(vllm_config: Any, groups: Groups) -> bool:
    """Whether the engine is one of those whose rounding was looked at."""
    model = vllm_config.model_config
    others = (
        model.use_mla,
        model.is_multimodal_model,
        model.quantization is not None,
        vllm_config.lora_config is not None,
        vllm_config.parallel_config.world_size > 1,
        any(group.state is not None or group.draft is not None for group in groups),
    )
    return not any(others)


def _software() -> tuple[str, ...]:
    import torch
    import vllm

    return (vllm.__version__, torch.__version__, str(torch.get_default_dtype()))


def _hardware() -> tuple[str, ...]:
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return (str(current_platform.get_device_name()),)
    kinds = set()
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        wanted = ("model name", "flags", "Features", "CPU part")
        lines = facts.read_text(encoding="utf-8", errors="replace").splitlines()
        kinds = {line for line in lines if line.startswith(wanted)}
    # Workers start as many threads as there are cores for them, unless variables say otherwise.
    threads = (torch.get_num_threads(), len(os.sched_getaffinity(0)), os.cpu_count())
    return (platform.machine(), *map(str, threads), *sorted(kinds))
