"""States of every kind of layer that vLLM has: what is loaded is what was stored, and nothing else
changes.

vLLM's CPU build has no kernels for some of them (Mamba-1, linear attention). So no model is
computed here. Specs, shapes and placement are vLLM's own functions, over real memory, and so are
Penstock's worker halves with their native engines.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kinds
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from tests.connector.ranks import blocks, job
from tests.connector.test_page_shapes import TOKENS, Node, Shape, namespace, on_disk

F32, BF16 = torch.float32, torch.bfloat16

STATES: dict[str, tuple[Kinds, Any, tuple[torch.dtype, ...]]] = {
    "mamba1": (
        Kinds.MAMBA1,
        Shapes.mamba1_state_shape(
            tp_world_size=1, intermediate_size=512, state_size=16, conv_kernel=4
        ),
        (BF16, F32),
    ),
    "mamba2": (
        Kinds.MAMBA2,
        Shapes.mamba2_state_shape(
            tp_world_size=1,
            intermediate_size=512,
            n_groups=1,
            num_heads=8,
            head_dim=64,
            state_size=16,
            conv_kernel=4,
        ),
        (BF16, F32),
    ),
    "linear": (
        Kinds.LINEAR,
        Shapes.linear_attention_state_shape(num_heads=4, tp_size=1, head_dim=32),
        (F32,),
    ),
    "short_conv": (
        Kinds.SHORT_CONV,
        Shapes.short_conv_state_shape(tp_world_size=1, intermediate_size=256, conv_kernel=3),
        (BF16,),
    ),
    "gdn": (
        Kinds.GDN_ATTN,
        Shapes.gated_delta_net_state_shape(
            tp_world_size=1,
            num_k_heads=2,
            num_v_heads=4,
            head_k_dim=32,
            head_v_dim=32,
            conv_kernel_size=4,
        ),
        (BF16, F32),
    ),
}


def shape(name: str, layout: KVCacheLayout, *, tokens_bytes: int = 512) -> Shape:
    """Two layers that attend, and two that keep a state. The pages of the smaller kind are padded,
    as vLLM does it."""
    kind, sizes, dtypes = STATES[name]
    attention = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=2, head_size=tokens_bytes // 16, dtype=F32
    )
    state = MambaSpec(
        shapes=tuple(sizes),
        dtypes=dtypes,
        block_size=TOKENS,
        mamba_type=kind,
        mamba_cache_mode="align",
    )
    page = max(attention.page_size_bytes, state.page_size_bytes)
    specs = [
        replace(spec, page_size_padded=page) if spec.page_size_bytes < page else spec
        for spec in (attention, state)
    ]
    return Shape(tuple(specs), 2, layout, 1)


@pytest.mark.parametrize("tokens_bytes", [128, 4096], ids=["large state", "small state"])
@pytest.mark.parametrize("name", list(STATES))
def test_a_state_is_whole_and_nothing_around_it_changes(
    name: str, tokens_bytes: int, tmp_path: Path
) -> None:
    settings = on_disk(str(tmp_path))
    source, target = (
        Node(shape(name, layout, tokens_bytes=tokens_bytes), settings, 6 + seed, seed=seed)
        for seed, layout in enumerate((KVCacheLayout.LBHNC, KVCacheLayout.BLHNC))
    )
    try:
        before, expected = source.raw.clone(), target.raw.clone()
        stored = 0
        # A block of states, and one of KV.
        for position, (block, place) in enumerate([(1, 4), (3, 5)]):
            pages = source.pages(position, block, source.raw)
            for page, there in zip(pages, target.pages(position, place, expected), strict=True):
                there.copy_(page)
            number = 10 * position
            source.run(stores=[job(number, blocks((7, block), group=position))])
            report = target.run(loads=[job(number + 1, blocks((7, place), group=position))])
            assert report.unloaded == {}
            spec = source.shape.specs[position]
            stored += len(pages) * (
                sum(s.numel() * s.element_size() for s in _tensors(spec))
                if isinstance(spec, MambaSpec)
                else spec.unpadded_page_size_bytes
            )
        # Padding does not travel.
        assert source.counts()["stored_bytes"] == stored
        assert torch.equal(source.raw, before)
        assert torch.equal(target.raw, expected)
    finally:
        source.half.shutdown()
        target.half.shutdown()


def _tensors(spec: MambaSpec) -> list[torch.Tensor]:
    """Tensors like those of a state."""
    return [
        torch.empty(size, dtype=dtype) for size, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]


def test_states_of_other_kinds_and_types_have_other_namespaces(tmp_path: Path) -> None:
    settings = on_disk(str(tmp_path))
    base = shape("mamba1", KVCacheLayout.LBHNC)
    attention, state = base.specs
    kinds = [
        state,
        replace(state, mamba_type=Kinds.MAMBA2),
        replace(state, dtypes=(torch.float16, F32)),
        # As many bytes.
        replace(state, shapes=tuple(tuple(reversed(size)) for size in state.shapes)),
    ]
    found = set()
    for kind in kinds:
        node = Node(replace(base, specs=(attention, kind)), settings, 6, seed=1)
        found.add(namespace([node], settings, position=1))
        node.half.shutdown()
    assert len(found) == len(kinds)


def test_a_coder_is_named_for_states_of_one_type(tmp_path: Path) -> None:
    named = {}
    for name in STATES:
        node = Node(shape(name, KVCacheLayout.LBHNC), on_disk(str(tmp_path)), 6, seed=1)
        named[name] = node.facts.groups[1].element
        node.half.shutdown()
    assert named == dict.fromkeys(STATES) | {"short_conv": "bf16"}
