"""With the plugin and without it, an engine's heads and tokens lie in the same order: the names of
its objects hold that order, and engines of either kind are to share them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

from lab.models import attention
from penstock.layout.negotiate import interior
from penstock.vllm import compat, layouts


def importable() -> list[Any]:
    """vLLM's attention backends, as far as this machine has what they import."""
    import vllm._custom_ops  # noqa: F401

    # Backends for AMD import vLLM's kernels by their usual name. On CPUs without AVX-512 they are
    # loaded by another, and loading them once more would end the process.
    sys.modules.setdefault("vllm._C", ModuleType("vllm._C"))
    found = {}
    for member in AttentionBackendEnum:
        try:
            backend = member.get_class()
        except (ImportError, AttributeError, RuntimeError, ValueError):
            continue
        found[backend.full_cls_name()] = backend
    return list(found.values())


BACKENDS = importable()
STATES = (
    MambaAttentionBackendEnum.SHORT_CONV,
    MambaAttentionBackendEnum.GDN_ATTN,
    MambaAttentionBackendEnum.MAMBA2,
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """vLLM's configuration of an engine with Penstock, for a model of each kind."""
    makers = {"gqa": attention.llama, "mla": attention.deepseek_v2, "windows": attention.gemma2}
    made: dict[str, Any] = {}

    def config_for(kind: str) -> Any:
        if kind not in made:
            folder: Path = makers[kind](tmp_path_factory.mktemp(kind))
            transfer = {
                "kv_connector": compat.CONNECTOR,
                "kv_connector_module_path": "penstock.vllm.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"penstock.pool": "memory:"},
            }
            made[kind] = compat.engine_config(str(folder), transfer)
        return made[kind]

    return config_for


def with_plugin(config: Any, listed: list[str], specs: list[Any]) -> str:
    layouts.decide(config, [layouts.reported(config, listed)], specs)
    return resolved(config)


def without_plugin(config: Any, listed: list[str], specs: list[Any]) -> str:
    resolve_kv_cache_layout(config, [listed], specs)
    return resolved(config)


def resolved(config: Any) -> str:
    layout: str | None = config.cache_config.kv_cache_layout
    config.cache_config.kv_cache_layout = None
    assert layout is not None
    return layout


def test_backends_of_every_declaration_are_here() -> None:
    declared = {backend.supported_kv_cache_layouts() for backend in BACKENDS}
    firsts = {layouts[0].name for layouts in declared if layouts}
    assert None in declared
    assert firsts >= {"LBNHC", "LBHNC", "LHBNC"}


@pytest.mark.parametrize("kind", ["gqa", "mla", "windows"])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_same_order_with_the_plugin_and_without(
    kind: str,
    on_cpu: bool,
    config: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = config(kind)
    monkeypatch.setattr(compat, "is_cpu", lambda: on_cpu)
    specs = compat.expected_specs(engine)
    for backend in BACKENDS:
        monkeypatch.setattr(compat, "attention_backends", lambda _, b=backend: [b])
        listed = compat.listed_layouts([backend])
        ours, theirs = with_plugin(engine, listed, specs), without_plugin(engine, listed, specs)
        assert interior(ours) == interior(theirs), backend.get_name()
        # Where the plugin has nothing to add, it is the same layout altogether.
        if backend.get_name() != "CPU_ATTN":
            assert ours == theirs, backend.get_name()


def test_layers_that_keep_a_state_leave_the_choice_to_attention(
    config: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = config("gqa")
    attention = AttentionBackendEnum.CPU_ATTN.get_class()
    choosy = next(b for b in BACKENDS if b is not attention and b.supported_kv_cache_layouts())
    others = [*((state.get_class(), ["BLHNC"]) for state in STATES), (choosy, [])]
    for other, added in others:
        backends = [attention, other]
        monkeypatch.setattr(compat, "attention_backends", lambda _, b=backends: b)
        assert layouts.reported(engine, ["LBHNC"]) == ["LBHNC", *added], other.get_name()


def test_blocks_of_several_lengths_lie_where_vllm_makes_them_equal(
    config: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = config("windows")
    monkeypatch.setattr(compat, "is_cpu", lambda: False)
    full, window = compat.expected_specs(engine)
    short = replace(window, block_size=window.block_size // 4)
    assert layouts.negotiate(layouts.spec_facts([full, window]), "auto", BOTH).layout == "BLHNC"
    decision = layouts.negotiate(layouts.spec_facts([full, short]), "auto", BOTH)
    assert decision.layout == "LBHNC"
    assert f"blocks of {short.block_size} and {full.block_size} tokens" in decision.reason


BOTH = ("LBHNC", "BLHNC")


def test_a_layout_that_is_asked_for_is_asked_of_vllm_too(
    config: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = config("gqa")
    extra = engine.kv_transfer_config.kv_connector_extra_config
    monkeypatch.setitem(extra, "penstock.kv_layout", "BHLNC")
    assert layouts.required(engine) == "BHLNC"
