"""Other kernels for linear layers, called in an engine before it starts.

vLLM's CPU kernels compute each row for itself and in one order, so how a prompt is cut changes no
bit there. On a GPU a kernel is chosen by the number of rows, and each sums in an order of its own.
What follows sums in other orders too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def summed_in_float32() -> None:
    """Products are summed by the kernel for float32 and rounded once, as by another kernel of a
    GPU."""
    import torch

    def made(weight: Any) -> Callable[..., Any]:
        wide = weight.detach().float()

        def linear(x: Any, _weight: Any, bias: Any = None) -> Any:
            found = torch.nn.functional.linear(x.float(), wide)
            return (found if bias is None else found + bias.float()).to(x.dtype)

        return linear

    _replace(made)


def summed_in_two_parts() -> None:
    """Each half is rounded before both are added, as by two tensor-parallel ranks."""
    import torch

    def made(weight: Any) -> Callable[..., Any]:
        middle = weight.shape[1] // 2
        halves = weight.detach()[:, :middle].contiguous(), weight.detach()[:, middle:].contiguous()

        def linear(x: Any, _weight: Any, bias: Any = None) -> Any:
            one, other = x[..., :middle], x[..., middle:]
            found = torch.nn.functional.linear(one, halves[0], bias)
            return found + torch.nn.functional.linear(other, halves[1])

        return linear

    _replace(made)


def _replace(made: Callable[[Any], Callable[..., Any]]) -> None:
    """Gives each linear layer what is made of its weight."""
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm

    def replaced(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim != 2 or layer.weight.is_meta:
            dispatch(layer, remove_weight)
        else:
            layer.cpu_linear = made(layer.weight)

    utils.dispatch_cpu_unquantized_gemm = replaced


def for_mla(kernels: Callable[[], None]) -> Callable[[], None]:
    """The same for multi-head latent attention, which needs more on CPUs."""

    def both() -> None:
        from lab.engines.mla_on_cpu import right_rotary_and_own_hits

        right_rotary_and_own_hits()
        kernels()

    return both


mla_summed_in_float32 = for_mla(summed_in_float32)
mla_summed_in_two_parts = for_mla(summed_in_two_parts)
