"""How an engine rounds numbers, if it always computes the same block to the same bits."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

from penstock.vllm.groups import Groups

_BITS = 24


def rounding(vllm_config: Any, groups: Groups) -> int:
    """A number of 24 bits for all that decides how this engine rounds: two engines with the same
    number compute the same block to the same bits. 0 if not even one engine does.

    vLLM's kernels for CPUs do, whatever else is in a batch and however a prompt is cut, if all
    layers are attention with keys and values. With latent attention and with states they do not
    (``benches/witness_noise.py``). With adapters, quantized weights, images or several ranks nobody
    has looked. On a device kernels do if vLLM was told to (``VLLM_BATCH_INVARIANT``), which no GPU
    has confirmed.
    """
    from vllm import envs
    from vllm.platforms import current_platform

    is_known = current_platform.is_cpu() and _is_plain(vllm_config, groups)
    if not (is_known or envs.VLLM_BATCH_INVARIANT):
        return 0
    facts = (_software(), _hardware(), vllm_config.compute_hash())
    digest = hashlib.sha256(repr(facts).encode()).digest()
    return int.from_bytes(digest[: _BITS // 8], "little") or 1


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
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return (str(current_platform.get_device_name()),)
    kinds = set()
    facts = Path("/proc/cpuinfo")
    if facts.is_file():
        wanted = ("model name", "flags", "Features", "CPU part")
        lines = facts.read_text(encoding="utf-8", errors="replace").splitlines()
        kinds = {line for line in lines if line.startswith(wanted)}
    return (platform.machine(), str(os.cpu_count()), *sorted(kinds))
