"""Every shape of page that vLLM makes: what is loaded is what was stored, and nothing else changes.

Most of these pages belong to kernels for GPUs, so no model is computed here. But specs, packing and
placement are vLLM's own functions, over real memory, and so are Penstock's worker halves with their
native engines.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as run_with
from hypothesis import strategies as st
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim
from vllm.v1.attention.backends.b12x import B12xPagedAttentionBackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    group_kernel_blocks,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from penstock.errors import ConfigError
from penstock.vllm import compat
from penstock.vllm.agreement import Agreement
from penstock.vllm.compat.versions import installed
from penstock.vllm.messages import RankShare
from penstock.vllm.model_facts import ModelFacts
from penstock.vllm.settings import Settings
from penstock.vllm.worker import Services, WorkerFacts, WorkerHalf
from penstock.vllm.worker_facts import kv_memory
from tests.connector.ranks import Rank, blocks, job
from tests.connector.test_compat import engine

TOKENS = 32
"""In a block."""

BACKENDS: dict[KVQuantMode, Any] = {
    **dict.fromkeys([m for m in KVQuantMode if m.is_per_token_head], TritonAttentionBackend),
    **dict.fromkeys([m for m in KVQuantMode if m.is_turboquant], TurboQuantAttentionBackend),
}


def attention(mode: KVQuantMode, heads: int, size: int) -> FullAttentionSpec:
    """The spec of a full-attention layer, as the backend for this quantization packs it."""
    dtype = torch.float16 if mode == KVQuantMode.NONE else torch.uint8
    if mode == KVQuantMode.INT8_PER_TOKEN_HEAD:
        dtype = torch.int8
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=heads, head_size=size, dtype=dtype, kv_quant_mode=mode
    )
    if mode == KVQuantMode.NVFP4:
        # As FlashInfer's backend does, which is not installed with vLLM's CPU build.
        content = nvfp4_kv_cache_full_dim(size)
        return replace(spec, num_head_slots=2 * heads, state_content_bytes=content)
    return BACKENDS[mode].customize_spec(spec) if mode in BACKENDS else spec


def two_planes(heads: int, size: int) -> FullAttentionSpec:
    """K of all heads in one slot, and V in another."""
    return B12xPagedAttentionBackend.customize_spec(attention(KVQuantMode.NONE, heads, size))


def latents(mode: KVQuantMode, content: int | None) -> MLAAttentionSpec:
    """The spec of an MLA layer."""
    spec = MLAAttentionSpec(
        block_size=TOKENS,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.bfloat16 if mode == KVQuantMode.NONE else torch.uint8,
        kv_quant_mode=mode,
        state_content_bytes=content,
    )
    return TritonMLABackend.customize_spec(spec)


MHA_MODES = [mode for mode in KVQuantMode if mode.name not in ("NVFP4_DS_MLA", "ULTRAQUANT_4BIT")]
SPECS = st.one_of(
    st.builds(
        attention,
        st.sampled_from(MHA_MODES),
        st.sampled_from([1, 2, 4]),
        st.sampled_from([64, 128]),
    ),
    st.builds(two_planes, st.sampled_from([1, 2, 4]), st.sampled_from([64, 128])),
    st.sampled_from(
        [
            latents(KVQuantMode.NONE, None),
            latents(KVQuantMode.FP8_PER_TENSOR, None),
            latents(KVQuantMode.INT8_PER_TOKEN_HEAD, None),
            latents(KVQuantMode.FP8_PER_TENSOR, 656),
            latents(KVQuantMode.NVFP4_DS_MLA, 352),
        ]
    ),
)


@dataclass(frozen=True)
class Shape:
    """A KV cache: the groups' specs, and where their pages lie."""

    specs: tuple[Any, ...]
    layers: int
    """In each group."""
    layout: KVCacheLayout
    split: int
    """Pages of the kernels in a block."""


@st.composite
def shapes(draw: Callable[..., Any]) -> Shape:
    """One group, or two that lie over each other: then the second looks back over a window, and its
    pages are padded to the size of the first's."""
    spec = draw(SPECS)
    layouts, split = list(KVCacheLayout), 1
    padding = draw(st.sampled_from([0, 0, 16, 4096]))
    alignment = draw(st.sampled_from([None, None, 512, 3000]))
    specs = [spec]
    if padding:
        specs = [replace(spec, page_size_padded=spec.page_size_bytes + padding)]
    elif draw(st.booleans()):
        split = 2
    if alignment and split == 1:
        specs = [replace(specs[0], block_stride_alignment=alignment)]
    # The page of a window's layer in another precision, and never larger than the first's.
    window = SlidingWindowSpec(
        block_size=TOKENS // 2,
        num_kv_heads=spec.num_kv_heads,
        head_size=32,
        dtype=torch.uint8,
        sliding_window=100,
    )
    if split == 1 and not alignment and draw(st.booleans()):
        specs.append(replace(window, page_size_padded=specs[0].page_size_bytes))
    if padding or alignment or len(specs) > 1:
        layouts = [layout for layout in layouts if layout.is_block_compact]
    if split > 1:
        layouts = [layout for layout in layouts if layout.is_layer_compact]
        layouts = [layout for layout in layouts if layout.is_block_compact]
    return Shape(tuple(specs), draw(st.integers(1, 3)), draw(st.sampled_from(layouts)), split)


class Node:
    """A rank with the KV cache that vLLM makes for a shape."""

    def __init__(
        self, shape: Shape, settings: Settings, num_blocks: int, seed: int, **facts: Any
    ) -> None:
        self.shape = shape
        config, self.caches = caches_of(shape, num_blocks)
        self.num_blocks = config.num_blocks
        first = next(iter(self.caches.values()))
        self.raw = torch.empty(0, dtype=torch.int8).set_(first.untyped_storage())
        generator = torch.Generator().manual_seed(seed)
        self.raw.copy_(torch.randint(-128, 128, self.raw.shape, generator=generator))
        groups = compat.transfer_groups(engine(), config)
        heads, layers = shape.specs[0].num_kv_heads, shape.layers * len(shape.specs)
        known = {
            "heads": heads,
            "tensor_ranks": 1,
            "tokens_per_step": 64,
            "requests_per_step": 2,
        }
        self.facts = WorkerFacts(
            groups=groups,
            num_blocks=self.num_blocks,
            layers=layers,
            stages=[(0, layers)],
            **(known | facts),
        )
        self.half = WorkerHalf(settings, self.facts, Services())
        self.half.register(kv_memory(groups, layers, self.caches))
        self.loaded: set[str] = set()
        self.free: set[str] = set()

    # Steps, and what is reported of them, are as in other tests of ranks.
    step, poll, until_over, run, counts = (
        Rank.step,
        Rank.poll,
        Rank.until_over,
        Rank.run,
        Rank.counts,
    )

    def pages(self, position: int, block: int, raw: torch.Tensor) -> list[torch.Tensor]:
        """A block's pages in a group's layers, in this memory or a copy of it."""
        found = []
        for name in self.facts.groups[position].layer_names:
            own = self.caches[name]
            view = torch.empty(0, dtype=own.dtype).set_(
                raw.untyped_storage(), own.storage_offset(), own.shape, own.stride()
            )
            found.append(group_kernel_blocks(view, self.num_blocks)[block])
        return found


def caches_of(shape: Shape, num_blocks: int) -> tuple[KVCacheConfig, Mapping[str, torch.Tensor]]:
    names = [
        [f"model.layers.{group * shape.layers + layer}.attn" for layer in range(shape.layers)]
        for group in range(len(shape.specs))
    ]
    groups = [KVCacheGroupSpec(*pair) for pair in zip(names, shape.specs, strict=True)]
    vllm_config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: shape.layout,
            num_gpu_blocks_override=num_blocks,
            prefix_cache_retention_interval=None,
        ),
    )
    planning = importlib.import_module(installed().PLANNING.module)
    config = planning.get_kv_cache_config_from_groups(vllm_config, groups, 1 << 30)
    kernels = [spec.block_size // shape.split for spec in shape.specs]
    return config, allocate_kv_cache(config, torch.device("cpu"), shape.layout, kernels)


def on_disk(folder: str, **more: Any) -> Settings:
    return Settings(f"file://{folder}/pool?size=256MiB", host_bytes=16 << 20, **more)


MOVES = [((1, 2), (4, 0)), ((3, 5), (5, 3))]
"""By group: a stored block and where it is loaded, twice. No block is in two groups, as vLLM gives
a block to one group at a time."""


@run_with(max_examples=30)
@given(
    shapes(),
    st.data(),
    st.sampled_from(["rank", "portable"]),
    st.sampled_from(["off", "lossless"]),
)
def test_a_page_of_any_shape_is_whole_and_nothing_around_it_changes(
    shape: Shape, data: st.DataObject, geometry: str, compression: str
) -> None:
    # Another engine may have another layout, with the same interior and pages.
    inner = [axis for axis in shape.layout.name if axis in "HNC"]
    alike = [
        layout
        for layout in KVCacheLayout
        if layout.is_block_compact == shape.layout.is_block_compact
        and (shape.split == 1 or layout.is_layer_compact)
        and [axis for axis in layout.name if axis in "HNC"] == inner
    ]
    other = replace(shape, layout=data.draw(st.sampled_from(alike)))
    with tempfile.TemporaryDirectory() as folder:
        settings = on_disk(folder, pool_geometry=geometry, compression=compression)
        source, target = Node(shape, settings, 6, seed=1), Node(other, settings, 7, seed=2)
        try:
            check(source, target)
        finally:
            source.half.shutdown()
            target.half.shutdown()


def check(source: Node, target: Node) -> None:
    before, expected = source.raw.clone(), target.raw.clone()
    stored = 0
    for position in range(len(source.shape.specs)):
        moves = [(move[0][position], move[1][position]) for move in MOVES]
        for number, (block, place) in enumerate(moves):
            pages = source.pages(position, block, source.raw)
            for page, there in zip(pages, target.pages(position, place, expected), strict=True):
                there.copy_(page)
            one = 10 * position + 2 * number
            named = blocks((one, block), group=position)
            source.run(stores=[job(one, named)])
            report = target.run(loads=[job(one + 1, blocks((one, place), group=position))])
            assert report.unloaded == {}
        spec = source.shape.specs[position]
        stored += len(moves) * source.shape.layers * spec.unpadded_page_size_bytes
    # Padding does not travel.
    assert source.counts()["stored_bytes"] == stored
    assert torch.equal(source.raw, before)
    assert torch.equal(target.raw, expected)


def one_group(spec: Any, layout: KVCacheLayout = KVCacheLayout.LBHNC) -> Shape:
    return Shape((spec,), 2, layout, 1)


def two_ranks(shape: Shape, settings: Settings, **facts: Any) -> list[Node]:
    """Two tensor-parallel ranks, each with the heads of `shape`."""
    heads = shape.specs[0].num_kv_heads
    return [
        Node(
            shape,
            settings,
            6,
            seed=rank,
            heads=2 * heads,
            tensor_ranks=2,
            tensor_rank=rank,
            **facts,
        )
        for rank in range(2)
    ]


def namespace(nodes: Sequence[Node], settings: Settings, position: int = 0) -> bytes:
    """The namespace of a group, as the scheduler half derives it from the ranks' shares."""
    heads = nodes[0].facts.heads
    model = ModelFacts("model", (1, len(nodes)), (nodes[0].facts.layers, heads), {})
    agreement = Agreement(settings, model, nodes[0].facts.groups, lambda: b"seed")
    shares: dict[tuple[int, int], RankShare] = {}
    for rank, node in enumerate(nodes):
        assert node.half.share is not None
        shares[0, rank] = node.half.share
    agreement.accept(shares)
    return agreement.namespaces[position]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return on_disk(str(tmp_path), pool_geometry="portable")


@pytest.mark.parametrize("mode", [mode for mode in KVQuantMode if mode.is_per_token_head])
def test_heads_with_scales_of_their_own_are_found_by_other_tensor_parallel_degrees(
    mode: KVQuantMode, settings: Settings
) -> None:
    ranks = two_ranks(one_group(attention(mode, 2, 64)), settings)
    alone = Node(one_group(attention(mode, 4, 64), KVCacheLayout.BLNHC), settings, 7, seed=3)
    assert namespace(ranks, settings) == namespace([alone], settings)
    expected = alone.raw.clone()
    for rank, node in enumerate(ranks):
        node.run(stores=[job(1, blocks((0, 4)))])
        pages = zip(node.pages(0, 4, node.raw), alone.pages(0, 2, expected), strict=True)
        for part, whole in pages:
            whole[..., 2 * rank : 2 * rank + 2, :, :].copy_(part)
    report = alone.run(loads=[job(2, blocks((0, 2)))])
    assert report.unloaded == {}
    assert torch.equal(alone.raw, expected)
    for node in (*ranks, alone):
        node.half.shutdown()


@pytest.mark.parametrize(
    "make",
    [lambda heads: attention(KVQuantMode.NVFP4, heads, 64), lambda heads: two_planes(heads, 64)],
    ids=["nvfp4", "two planes"],
)
def test_pages_that_cannot_be_cut_have_a_namespace_for_each_tensor_parallel_degree(
    make: Callable[[int], FullAttentionSpec], settings: Settings
) -> None:
    ranks = two_ranks(one_group(make(2)), settings)
    alone = Node(one_group(make(4)), settings, 6, seed=3)
    assert namespace(ranks, settings) != namespace([alone], settings)
    # With as many heads on each rank, nothing but the ranks' number differs.
    small = Node(one_group(make(2)), settings, 6, seed=3)
    assert namespace(ranks, settings) != namespace([small], settings)
    # Ranks that hold the same heads hold the same pages.
    twins = [
        Node(one_group(make(1)), settings, 6, seed=3, tensor_ranks=2, tensor_rank=rank)
        for rank in range(2)
    ]
    single = Node(one_group(make(1)), settings, 6, seed=3)
    assert namespace(twins, settings) == namespace([single], settings)
    for rank, node in enumerate(ranks):
        node.run(stores=[job(1, blocks((0, 4)))])
        before = node.raw.clone()
        for page in node.pages(0, 4, node.raw):
            page.zero_()
        assert node.run(loads=[job(2, blocks((0, 4)))]).unloaded == {}
        assert torch.equal(node.raw, before), rank
    for node in (*ranks, alone, small, single, *twins):
        node.half.shutdown()


def test_what_differs_in_packing_has_another_namespace_and_padding_does_not(
    settings: Settings,
) -> None:
    def of(spec: Any, **facts: Any) -> bytes:
        node = Node(one_group(spec), settings, 6, seed=1, **facts)
        node.half.shutdown()
        return namespace([node], settings)

    opaque = latents(KVQuantMode.FP8_PER_TENSOR, 656)
    plain = attention(KVQuantMode.NONE, 2, 64)
    different = [
        of(opaque),
        of(replace(opaque, kv_quant_mode=KVQuantMode.NVFP4_DS_MLA)),
        of(opaque, backends={0: ("FLASHMLA",)}),
        of(plain),
        # As many bytes in a token.
        of(replace(plain, state_content_bytes=plain.state_content_size_bytes)),
    ]
    assert len(set(different)) == len(different)
    # Not packed: whose kernels read it is nothing new.
    assert of(plain, backends={0: ("FLASH_ATTN",)}) == of(plain)
    padded = replace(plain, page_size_padded=plain.page_size_bytes + 512)
    assert of(padded) == of(plain)


def test_packed_slots_are_not_compared_as_numbers() -> None:
    def numbers(spec: Any) -> str | None:
        config, _ = caches_of(one_group(spec), 6)
        [group] = compat.transfer_groups(engine(), config)
        return group.numbers

    assert numbers(attention(KVQuantMode.FP8_PER_TENSOR, 2, 64)) == "fp8_e4m3"
    # vLLM's mode says no more of these slots, which have scales and bfloat16 beside 8-bit numbers.
    assert numbers(latents(KVQuantMode.FP8_PER_TENSOR, 656)) is None


@pytest.mark.parametrize(
    ("spec", "element"),
    [
        (attention(KVQuantMode.NONE, 2, 64), "fp16"),
        (replace(attention(KVQuantMode.NONE, 2, 64), dtype=torch.float32), None),
        (attention(KVQuantMode.FP8_PER_TENSOR, 2, 64), "fp8_e4m3"),
        (latents(KVQuantMode.NONE, None), "bf16"),
        # Numbers and their scales.
        (attention(KVQuantMode.INT8_PER_TOKEN_HEAD, 2, 64), None),
        (attention(KVQuantMode.FP8_PER_TOKEN_HEAD, 2, 64), None),
        (latents(KVQuantMode.FP8_PER_TENSOR, 656), None),
    ],
)
def test_a_coder_is_named_for_pages_of_one_type(
    spec: Any, element: str | None, settings: Settings
) -> None:
    node = Node(one_group(spec), settings, 6, seed=1)
    node.half.shutdown()
    assert node.facts.groups[0].element == element


def test_of_fp8_vllms_name_tells_the_coder() -> None:
    config, _ = caches_of(one_group(attention(KVQuantMode.FP8_PER_TENSOR, 2, 64)), 6)
    for kv_type, element in [("fp8", "fp8_e4m3"), ("fp8_e5m2", "fp8_e5m2")]:
        (group,) = compat.transfer_groups(engine(kv_type=kv_type), config)
        assert group.element == element


def test_engines_that_compress_have_a_namespace_of_their_own(tmp_path: Path) -> None:
    settings, off, lossless = (
        on_disk(str(tmp_path), **more)
        for more in ({}, {"compression": "off"}, {"compression": "lossless"})
    )
    node = Node(one_group(latents(KVQuantMode.NONE, None)), settings, 6, seed=1)
    node.half.shutdown()
    assert namespace([node], off) == namespace([node], settings)
    assert namespace([node], lossless) != namespace([node], settings)


def test_scales_that_were_loaded_stay_when_a_layer_is_first_computed(settings: Settings) -> None:
    spec = attention(KVQuantMode.INT8_PER_TOKEN_HEAD, 2, 64)

    def started(is_ready: bool) -> tuple[Node, list[TritonAttentionImpl]]:
        node = Node(one_group(spec), settings, 6, seed=4)
        layers = {}
        for name in node.caches:
            impl = TritonAttentionImpl(
                2, 64, 1.0, 2, None, None, kv_cache_dtype="int8_per_token_head"
            )
            layers[name] = SimpleNamespace(impl=impl)
        if is_ready:
            forward = SimpleNamespace(static_forward_context=layers)
            compat.make_scales(SimpleNamespace(compilation_config=forward), node.caches)
        return node, [layer.impl for layer in layers.values()]

    def compute(node: Node, impls: list[TritonAttentionImpl]) -> None:
        for impl, cache in zip(impls, node.caches.values(), strict=True):
            impl._pth_key_value_caches(cache)

    source, impls = started(is_ready=False)
    source.run(stores=[job(1, blocks((0, 4)))])
    stored = [page.clone() for page in source.pages(0, 4, source.raw)]
    for is_ready in (True, False):
        node, impls = started(is_ready)
        assert node.run(loads=[job(2, blocks((0, 1)))]).unloaded == {}
        compute(node, impls)
        loaded = node.pages(0, 1, node.raw)
        same = [torch.equal(a, b) for a, b in zip(loaded, stored, strict=True)]
        assert same == [is_ready] * len(same)
        node.half.shutdown()
    source.half.shutdown()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (
            replace(latents(KVQuantMode.NONE, None), tokens_per_state=4),
            "several tokens in one state of the KV cache",
        ),
        (
            replace(latents(KVQuantMode.NONE, None), cache_role=SparseCacheRole.INDEXER),
            "indexes of sparse attention",
        ),
    ],
)
def test_pages_that_are_not_the_tokens_kv_are_refused(spec: Any, says: str) -> None:
    config, _ = caches_of(one_group(spec), 6)
    with pytest.raises(ConfigError, match=says):
        compat.transfer_groups(engine(), config)
