"""Has an engine say given tokens, so that it tells how likely it holds each of them.

vLLM leaves its prefix cache alone for requests that ask for logprobs of their prompt. So what is to
be scored is no prompt here: the engine generates it, and its logprobs are those from before the
choice was made for it.

Name it to an engine as `logits_processors`. A request says `extra_args={"forced": [token, ...]}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class Forced(LogitsProcessor):  # type: ignore[misc]
    """Leaves one token to choose from at each step of a request that is forced."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[Sequence[int], Sequence[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """Greedy requests need it too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Learns which rows of the batch are forced."""
        process_dict_updates(self._rows, batch_update, _forced)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Takes all other tokens away."""
        for row, (tokens, said) in self._rows.items():
            if len(said) < len(tokens):
                logits[row] = -torch.inf
                logits[row, tokens[len(said)]] = 0.0
        return logits


def _forced(
    params: Any, prompt: Sequence[int] | None, said: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]] | None:
    tokens = (params.extra_args or {}).get("forced")
    return None if tokens is None else (tokens, said)
