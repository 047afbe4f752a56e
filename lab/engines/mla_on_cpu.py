"""What vLLM's CPU build needs to show that its kernels for MLA go on from a prefix.

Called in a test's engine before it starts; the engine's other processes are forked from it.
"""

from __future__ import annotations

from typing import Any


def right_rotary() -> None:
    """Gives vLLM's rotary kernel for CPUs what it reads rightly.

    The kernel takes the stride of heads for that of tokens. So MLA's queries are rotated in another
    way with each number of tokens, and a prompt that is computed in two parts has other outputs.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    forward = RotaryEmbedding.forward_cpu

    def flat(tensor: Any) -> Any:
        return tensor.reshape(tensor.shape[0], -1).contiguous()

    def wrapped(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        rotated, rotated_key = forward(
            self, positions, flat(query), None if key is None else flat(key)
        )
        return rotated.view(query.shape), None if key is None else rotated_key.view(key.shape)

    RotaryEmbedding.forward_cpu = wrapped


def right_rotary_and_own_hits() -> None:
    """Switches vLLM's prefix cache on too, which its CPU platform switches off for MLA, and the
    steps that were asked for: there it has every prompt computed in one."""
    from vllm.platforms.cpu import CpuPlatform

    right_rotary()
    check = CpuPlatform.check_and_update_config.__func__

    def wrapped(cls: Any, vllm_config: Any) -> None:
        scheduler = vllm_config.scheduler_config
        tokens_a_step = scheduler.max_num_batched_tokens
        check(cls, vllm_config)
        scheduler.max_num_batched_tokens = tokens_a_step
        scheduler.enable_chunked_prefill = True
        vllm_config.cache_config.enable_prefix_caching = True

    CpuPlatform.check_and_update_config = classmethod(wrapped)
