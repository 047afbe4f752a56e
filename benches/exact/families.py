"""The families of models, small and with random weights, and how vLLM serves them: its CPU build,
or that for CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from lab.engines.node import new_process
from lab.models import attention, drafts
from lab.models.drafts import Drafted
from lab.models.hybrids import HYBRIDS
from lab.models.prompts import tokens

ROOT_BLOCKS = 4
"""Whole blocks of a stored prompt."""
LONGEST = ROOT_BLOCKS + 2
"""Blocks of the longest prompt with its answer."""
PHRASE = 23
"""Tokens of a phrase that comes again, where n-grams are to be found."""


@dataclass(frozen=True)
class Family:
    """A kind of model, or a way to serve it."""

    make: Callable[[Path], Path | Drafted]
    block: int
    """Tokens of a block."""
    root_bytes: int
    """About what a pool holds of a prompt of `ROOT_BLOCKS`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of its engines."""
    few_blocks: int = 20
    """Blocks of a KV cache in which a few requests do not fit together."""
    repeats: bool = False
    """Whether prompts are phrases that come again."""
    dropped: int = 0
    """Tokens at the end of each hit that vLLM computes again."""

    def made(self, folder: Path) -> tuple[Path, Family]:
        """The model, saved in a folder, and the family with the drafter that lies beside it."""
        found = self.make(folder / "model")
        if isinstance(found, Path):
            return found, self
        options = self.options | {"speculative_config": found.speculative_config}
        dropped = self.block if found.drops_last else 0
        return found.model, replace(self, options=options, dropped=dropped)

    @property
    def engine(self) -> dict[str, Any]:
        """Options of its engines. A step is a block, so every prompt is computed in the same
        pieces, whether it begins at a hit or at its start. Kernels round by the size of a piece."""
        return {
            "block_size": self.block,
            "max_num_batched_tokens": self.block,
            "max_model_len": LONGEST * self.block,
            **self.options,
        }

    @property
    def tight(self) -> dict[str, Any]:
        """Options, beside, of an engine that has to preempt."""
        return {"num_gpu_blocks_override": self.few_blocks, "scheduling_policy": "priority"}

    def tokens(self, count: int, seed: str) -> list[int]:
        """So many tokens of a prompt, the same for the same seed."""
        if self.repeats:
            return (tokens(PHRASE, seed) * (count // PHRASE + 1))[:count]
        return tokens(count, seed)


def _hybrid(name: str, root_bytes: int, few_blocks: int = 20) -> Family:
    hybrid = HYBRIDS[name]
    options = {key: value for key, value in hybrid.engine.items() if key != "block_size"}
    return Family(hybrid.saved, hybrid.block, root_bytes, options, few_blocks)


def _drafted(method: str) -> Family:
    return Family(partial(drafts.drafted, method), 128, 3 << 20)


_NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}

# vLLM on CPUs has no hits of its own with MLA, unless it is told that its kernels go on from a
# prefix. Those kernels know blocks of 16 tokens only.
_LATENT_BLOCK = 16
_LATENT = attention.LATENT_ENGINE | {
    "prepare": "lab.engines.mla_on_cpu:right_rotary_and_own_hits",
    "max_model_len": 12 * _LATENT_BLOCK,
}

FAMILIES: dict[str, Family] = {
    "lfm2": _hybrid("lfm2", 1100 << 10, few_blocks=15),
    "qwen3_next": _hybrid("qwen3_next", 1350 << 10),
    "granite_hybrid": _hybrid("granite_hybrid", 2700 << 10, few_blocks=24),
    "ngram": Family(attention.llama, 128, 1 << 20, {"speculative_config": _NGRAM}, repeats=True),
    **{method: _drafted(method) for method in ("draft_model", "eagle", "eagle3", "mtp")},
    "falcon_h1": _hybrid("falcon_h1", 3200 << 10),
    "nemotron_h": _hybrid("nemotron_h", 2100 << 10),
    "llama": Family(attention.llama, 128, 1 << 20),
    "gemma2": Family(attention.gemma2, 128, 2 << 20),
    "deepseek_v2": Family(attention.deepseek_v2, _LATENT_BLOCK, 290 << 10, _LATENT),
}
"""Hybrids with state, speculation on small Llamas and a MiMo, and the plain kinds: full attention,
windows, MLA."""


def on_cuda(family: Family) -> Family:
    """A family as a CUDA device serves it. FlashAttention has no float32, so values are half as
    long. A device's context does not outlive a fork, so engines start anew. Two of them are alive
    at a time, and each wants so much of the device's memory to be free."""
    options = family.options | {
        "dtype": "bfloat16",
        "launch": new_process,
        "gpu_memory_utilization": 0.2,
    }
    return replace(family, options=options, root_bytes=family.root_bytes // 2)


ON_CUDA: dict[str, Family] = {
    name: on_cuda(FAMILIES[name])
    for name in ("llama", "gemma2", "ngram", "draft_model", "eagle", "eagle3", "mtp")
}
"""Those that a CUDA device is tried with. No device has confirmed any of them."""
# Blocks of 64 tokens suit all of vLLM's kernels for MLA on Hopper.
ON_CUDA["deepseek_v2"] = on_cuda(Family(attention.deepseek_v2, 64, 1200 << 10))

BY_DEVICE = {"cpu": FAMILIES, "cuda": ON_CUDA}
