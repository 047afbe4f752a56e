"""Which engines are taken to compute the same bits: none that anybody knows to round otherwise."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from penstock.vllm import compat
from penstock.vllm.groups import Groups, State
from tests.connector.test_scheduler import FULL

PLAIN = Groups([FULL])
STATES = Groups(
    [FULL, replace(FULL, index=1, kind="mamba", state=State("mamba2", (), (), "", "cpu"))]
)


def config(**model: Any) -> Any:
    """vLLM's configuration of an engine."""
    known = {"use_mla": False, "is_multimodal_model": False, "quantization": None}
    return SimpleNamespace(
        model_config=SimpleNamespace(**known | model),
        lora_config=None,
        parallel_config=SimpleNamespace(world_size=1),
        compute_hash=lambda: "0123456789",
    )


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This platform computes on CPUs, without batch invariance."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: True)
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)


def test_engines_alike_have_one_number_of_24_bits() -> None:
    found = {compat.rounding(config(), PLAIN) for _ in range(3)}
    assert len(found) == 1
    assert 0 < found.pop() < 1 << 24


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_CPU_ATTN_SPLIT_KV",
        "OMP_NUM_THREADS",
        "ONEDNN_MAX_CPU_ISA",
        "MKL_CBWR",
    ],
)
def test_what_is_set_to_compute_otherwise_gives_another_number(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "0")
    one = compat.rounding(config(), PLAIN)
    monkeypatch.setenv(name, "1")
    assert compat.rounding(config(), PLAIN) != one


def test_it_counts_how_many_cores_threads_are_bound_to_and_not_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def bound(cores: str) -> int:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", cores)
        return compat.rounding(config(), PLAIN)

    assert bound("0") == bound("1") != bound("0,1")
    assert bound("0-3") == bound("0,2,4-5")
    assert len({bound(cores) for cores in ("0|1", "0-1|2", "auto", "nobind", "0-1")}) == 5


def test_ports_and_places_give_no_other_number(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compat.rounding(config(), PLAIN)
    for name in ("VLLM_PORT", "VLLM_HOST_IP", "VLLM_CACHE_ROOT", "VLLM_API_KEY", "HOSTNAME"):
        monkeypatch.setenv(name, "other")
    assert compat.rounding(config(), PLAIN) == before


def test_other_threads_and_cores_give_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compat.rounding(config(), PLAIN)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 1000)
        assert compat.rounding(config(), PLAIN) != before
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(1000)))
    assert compat.rounding(config(), PLAIN) != before


def test_inputs_of_encoders_and_of_quantized_kernels_are_noisy() -> None:
    assert not compat.has_noisy_inputs(config())
    assert compat.has_noisy_inputs(config(is_multimodal_model=True))
    assert compat.has_noisy_inputs(config(quantization="fp8"))


@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_kernels_that_nobody_looked_at_round_as_no_other(
    is_batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kernels for CPUs know nothing of that mode.
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1" if is_batch_invariant else "0")
    assert compat.rounding(config(use_mla=True), PLAIN) == 0
    assert compat.rounding(config(is_multimodal_model=True), PLAIN) == 0
    assert compat.rounding(config(quantization="fp8"), PLAIN) == 0
    assert compat.rounding(config(), STATES) == 0
    several = config()
    several.parallel_config.world_size = 2
    assert compat.rounding(several, PLAIN) == 0
