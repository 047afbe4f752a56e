"""Wrong KV that nothing else notices is found by engines that compute the same: it is removed, and
nothing of its writer is loaded any more.

Each fault is in an engine that names its blocks as all the others do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.engines.node import Adapter, Node
from lab.models import attention
from lab.models.hybrids import HYBRIDS
from penstock._native import Store
from tests.e2e.conftest import BLOCK, tokens
from tests.e2e.stored import all_stored

pytestmark = pytest.mark.e2e

Start = Callable[..., Node]

LENGTH = 4 * BLOCK + 5
PROMPTS = [tokens(LENGTH, seed=800 + number) for number in range(4)]
BLOCKS = 4 * len(PROMPTS)

# What stands for the weights is given by name here, as for weights that only one rank has wrong.
SETTINGS: dict[str, Any] = {"penstock.host_tier": True, "penstock.model_id": "the same"}


def turn_too_slowly() -> None:
    """Positions count half in rotary embeddings, as with a scaling that only one engine has."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    for name in ("forward_cpu", "forward_native"):
        right = getattr(RotaryEmbedding, name)

        def wrong(self: Any, positions: Any, *others: Any, right: Any = right, **named: Any) -> Any:
            return right(self, positions // 2, *others, **named)

        setattr(RotaryEmbedding, name, wrong)


def weaken_adapters() -> None:
    """Adapters do less than their files say."""
    import vllm.lora.layers
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    layers = [one for one in vars(vllm.lora.layers).values() if isinstance(one, type)]
    for layer in {BaseLinearLayerWithLoRA, *layers}:
        if issubclass(layer, BaseLinearLayerWithLoRA) and "set_lora" in vars(layer):
            _weaken(layer)


def _weaken(layer: Any) -> None:
    right = layer.set_lora

    def wrong(self: Any, index: int, lora_a: Any, lora_b: Any) -> None:
        parts = lora_b if isinstance(lora_b, list) else [lora_b]
        weaker = [part if part is None else part * 0.5 for part in parts]
        right(self, index, lora_a, weaker if isinstance(lora_b, list) else weaker[0])

    layer.set_lora = wrong


def exchange_layers() -> None:
    """The first two layers' memory is taken for each other."""
    from penstock.vllm import worker_facts

    right = worker_facts._view

    def wrong(layer: int, tensor: Any) -> Any:
        return right({0: 1, 1: 0}.get(layer, layer), tensor)

    worker_facts._view = wrong


def flip_a_bit() -> None:
    """One bit of what the first store reads flips in memory, after it was computed."""
    import torch

    from penstock.vllm.worker.half import WorkerHalf

    right = WorkerHalf.start_stores
    flipped: list[bool] = []

    def wrong(self: Any, orders: Any) -> None:
        if orders.stores and not flipped:
            flipped.append(True)
            block = orders.stores[0].blocks.block_ids[0]
            cache = self._owners[0]
            place = tuple(cache.shape).index(self._facts.num_blocks)
            page = cache.select(place, block)
            first = page.reshape(-1) if page.is_contiguous() else page.select(0, 0).reshape(-1)
            first[:1].view(torch.int32).bitwise_xor_(1)
        right(self, orders)

    WorkerHalf.start_stores = wrong


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return attention.llama(tmp_path_factory.mktemp("other"), seed=1)


def ask(node: Node, prompt: list[int], adapter: Adapter | None) -> tuple[int, ...]:
    return node.ask(prompt, **({} if adapter is None else {"adapter": adapter})).tokens


@pytest.mark.parametrize("fault", ["weights", "adapter", "rotary", "layout", "bit"])
def test_wrong_kv_is_found_and_never_loaded_again(
    fault: str, llama: Path, other: Path, start: Start, tmp_path: Path
) -> None:
    pool = f"file://{tmp_path}/pool?size=1GiB"
    options: dict[str, Any] = {"pool": pool}
    adapter = None
    if fault == "adapter":
        options |= {"enable_lora": True, "max_lora_rank": 8}
        adapter = Adapter("writer", 1, str(attention.lora(tmp_path / "writer", llama, seed=1)))
    prepare = {
        "weights": None,
        "adapter": "weaken_adapters",
        "rotary": "turn_too_slowly",
        "layout": "exchange_layers",
        "bit": "flip_a_bit",
    }[fault]
    wrongly = {} if prepare is None else {"prepare": f"{__name__}:{prepare}"}
    with start(
        other if fault == "weights" else llama, settings=SETTINGS, **options, **wrongly
    ) as wrong:
        for prompt in PROMPTS:
            ask(wrong, prompt, adapter)
        all_stored(wrong, BLOCKS)
    # vLLM alone, with a pool of nobody else.
    alone = options | {"pool": f"file://{tmp_path}/alone?size=1GiB"}
    with start(llama, settings=SETTINGS, **alone) as reference:
        right = [ask(reference, prompt, adapter) for prompt in PROMPTS]
    settings = SETTINGS | {"penstock.witness_share": 0.05}
    with start(llama, settings=settings, **options) as node:
        # The engine's first hit is compared. This test waits for that, so not
        # even one answer is wrong. Requests do not wait.
        assert ask(node, PROMPTS[0], adapter) == right[0]
        node.wait_for("witness_disagreements", 1)
        for prompt, expected in zip(PROMPTS[1:], right[1:], strict=True):
            assert ask(node, prompt, adapter) == expected
        counters = node.counters()
        assert counters["witnessed_blocks"] >= counters["witness_disagreements"]
        found = Store.open(pool).marks(timeout=60.0)
        assert [counts for *_, counts in found] == [True]
        # What was wrong is computed and stored again by now, and found.
        before = node.counters()
        for prompt, expected in zip(PROMPTS, right, strict=True):
            node.forget()
            assert ask(node, prompt, adapter) == expected
        assert node.counters()["witness_disagreements"] == before["witness_disagreements"]
        assert node.counters()["loaded_tokens"] > before.get("loaded_tokens", 0)
    # Nor does an engine that compares nothing load it.
    with start(llama, settings=SETTINGS | {"penstock.witness_time": 0.0}, **options) as third:
        for prompt, expected in zip(PROMPTS, right, strict=True):
            assert ask(third, prompt, adapter) == expected
        assert third.counters().get("loaded_tokens", 0) > 0


RIGHT_ROTARY = "lab.engines.mla_on_cpu:right_rotary"
"""vLLM's rotary kernel for CPUs rotates other rows than it should."""

FAMILIES: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "grouped queries": (attention.llama, {}),
    "fp8": (attention.llama, {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}),
    "windows": (attention.gemma2, {"dtype": "bfloat16"}),
    "latent": (
        attention.deepseek_v2,
        attention.LATENT_ENGINE | {"dtype": "bfloat16", "prepare": RIGHT_ROTARY},
    ),
    "delta net": (HYBRIDS["qwen3_next"].make, HYBRIDS["qwen3_next"].engine),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_honest_engines_agree(family: str, start: Start, tmp_path: Path) -> None:
    """The second computes in smaller steps, and computes as prompts what the first has decoded."""
    if family == "fp8" and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM keeps FP8 only on CPUs with AVX-512")
    make, options = FAMILIES[family]
    model = make(tmp_path / "model")
    options = options | {"pool": f"file://{tmp_path}/pool?size=1GiB"}
    block = options.get("block_size", BLOCK)
    prompts = [tokens(3 * block - 20 + number, seed=840 + number) for number in range(8)]
    with start(model, settings={"penstock.host_tier": True}, **options) as first:
        answers = [first.ask(prompt, max_tokens=40).tokens for prompt in prompts]
        all_stored(first, 3 * len(prompts))
    settings = {"penstock.witness_share": 1.0, "penstock.host_tier": True}
    smaller = options | {"max_num_batched_tokens": block}
    with start(model, settings=settings, **smaller) as second:
        for prompt, answer in zip(prompts, answers, strict=True):
            second.ask([*prompt, *answer], max_tokens=2)
        second.wait_for("witnessed_blocks", 2 * len(prompts))
        assert second.counters()["witness_disagreements"] == 0
        assert second.counters().get("loaded_tokens", 0) == 0
    assert Store.open(options["pool"]).marks(timeout=60.0) == []
