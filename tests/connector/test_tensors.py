"""Digests of live tensors: each element, type and shape counts, and nothing else does."""

from __future__ import annotations

import importlib
import sys
from abc import ABC
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Generic, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from penstock.vllm import tensors
from penstock.vllm.compat.code import own_code
from penstock.vllm.compat.weights import (
    attention_settings,
    buffers,
    position_settings,
    weight_tensors,
)
from penstock.vllm.tensors import (
    by_kind,
    digest_on_device,
    digest_tensors,
    one_digest,
    reduced,
    sample_tensors,
)

Kind = TypeVar("Kind")
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.float8_e4m3fn)


def found(*tensors: torch.Tensor) -> list[str]:
    named = [(str(number), tensor) for number, tensor in enumerate(tensors)]
    return list(digest_tensors(named, 2).values())


def random_tensor(kind: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    element = torch.empty((), dtype=kind).element_size()
    raw = torch.randint(0, 2, [*shape, element], generator=generator, dtype=torch.uint8)
    return raw.view(kind).reshape(shape)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(TYPES),
    st.lists(st.integers(1, 7), min_size=0, max_size=3),
    st.integers(0, 99),
    st.data(),
)
def test_one_bit_of_one_element_is_enough(
    kind: torch.dtype, shape: list[int], seed: int, data: st.DataObject
) -> None:
    tensor = random_tensor(kind, shape, seed)
    changed = tensor.clone()
    raw = changed.reshape(-1).view(torch.uint8)
    place = data.draw(st.integers(0, raw.numel() - 1))
    raw[place] ^= 1
    changed = raw.view(kind).reshape(shape)
    one, other, again = found(tensor, changed, tensor.clone())
    assert one == again
    assert one != other
    # What a device makes of it differs too, in both numbers.
    raw, other_raw = (each.contiguous().reshape(-1).view(torch.uint8) for each in (tensor, changed))
    assert reduced(raw) == reduced(raw.clone())
    assert all(a != b for a, b in zip(reduced(raw), reduced(other_raw), strict=True))


def test_type_and_shape_count() -> None:
    plain = torch.zeros(6)
    others = [plain.reshape(2, 3), plain.reshape(3, 2), torch.zeros(6, dtype=torch.int32)]
    assert len({*found(plain), *found(*others)}) == 4
    assert found(torch.zeros(0), torch.zeros(0, 3))[0] != found(torch.zeros(0, 3))[0]


def test_how_a_tensor_lies_in_memory_does_not_count() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    turned = tensor.t().contiguous().t()
    assert turned.stride() != tensor.stride()
    assert len({*found(tensor), *found(turned), *found(tensor.repeat(2, 1)[:3])}) == 1


def test_parts_that_are_not_used_have_no_memory_and_do_not_count() -> None:
    model = torch.nn.Linear(2, 2)
    model.bias = torch.nn.Parameter(torch.zeros(2, device="meta"))
    assert [name for name, _ in weight_tensors(model)] == ["weight"]


def test_a_tensor_that_is_made_of_others_is_told_by_them() -> None:
    # As the weights of torchao, which cannot be seen as bytes.
    model = torch.nn.Linear(2, 2, bias=False)
    model.weight = torch.nn.Parameter(TwoTensor(torch.zeros(2, 2), torch.ones(2, 2)))
    before = digest_tensors(weight_tensors(model), 1)
    assert before.keys() == {"weight.a", "weight.b"}
    model.register_buffer("scale", torch.ones(()))
    assert [name for name, _ in buffers(model, torch.float32)] == ["scale"]
    model.weight.b[1, 1] += 1
    after = digest_tensors(weight_tensors(model), 1)
    assert {name for name in before if before[name] != after[name]} == {"weight.b"}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 100), st.integers(0, 7), st.integers(0, 99), st.data())
def test_where_bytes_lie_does_not_count_for_a_device_but_their_order_does(
    nbytes: int, offset: int, seed: int, data: st.DataObject
) -> None:
    memory = random_tensor(torch.uint8, [nbytes + offset, 1], seed).reshape(-1)
    content = memory[offset:]
    assert reduced(content) == reduced(content.clone())
    assert reduced(content) != reduced(torch.cat([content, torch.zeros(1, dtype=torch.uint8)]))
    if nbytes >= 16:
        place = data.draw(st.integers(0, nbytes // 8 - 2)) * 8
        swapped = content.clone()
        swapped[place : place + 16] = content[place : place + 16].roll(8)
        assert (reduced(swapped) == reduced(content)) == torch.equal(swapped, content)


def test_the_numbers_of_a_device_stay_what_they_are() -> None:
    # Pools hold namespaces that were made of such numbers.
    assert reduced(torch.arange(100, dtype=torch.uint8)) == (
        6606994075236619618,
        6665122415406395371,
    )


def test_more_than_a_device_mixes_at_a_time_is_one_content(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = random_tensor(torch.uint8, [1003, 1], 4).reshape(-1)
    whole = reduced(content)
    monkeypatch.setattr(tensors, "_WORDS", 16)
    assert reduced(content) == whole


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TYPES), st.integers(0, 20_000), st.integers(0, 99), st.data())
def test_a_sample_sees_start_middle_and_end(
    kind: torch.dtype, elements: int, seed: int, data: st.DataObject
) -> None:
    tensor = random_tensor(kind, [elements], seed)
    changed = tensor.clone()
    assert sampled(tensor) == sampled(changed)
    raw = changed.view(torch.uint8)
    if nbytes := raw.numel():
        middle = (nbytes - 4096) // 2 // kind.itemsize * kind.itemsize
        starts = (0, max(0, middle), max(0, nbytes - 4096))
        place = data.draw(st.sampled_from(starts)) + data.draw(st.integers(0, 4095))
        raw[min(place, nbytes - 1)] ^= 1
        assert sampled(tensor) != sampled(changed)
    assert sampled(tensor) != sampled(torch.cat([tensor, tensor[:1], torch.empty(1, dtype=kind)]))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(TYPES),
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.integers(0, 99),
    st.data(),
)
def test_neither_a_sample_nor_a_device_asks_how_a_tensor_lies_in_memory(
    kind: torch.dtype, shape: list[int], seed: int, data: st.DataObject
) -> None:
    tensor = random_tensor(kind, shape, seed)
    order = data.draw(st.permutations(range(len(shape))))
    back = sorted(range(len(shape)), key=order.__getitem__)
    turned = tensor.permute(order).contiguous().permute(back)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tensors, "_CHUNK", data.draw(st.sampled_from([64, 1000, 1 << 20])))
        for made in (sampled, digest_on_device):
            assert made(tensor) == made(turned)
        changed = tensor.clone()
        raw = changed.reshape(-1).view(torch.uint8)
        raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1
        changed = raw.view(kind).reshape(shape)
        assert digest_on_device(tensor) != digest_on_device(changed)


def sampled(tensor: torch.Tensor) -> dict[str, str]:
    return sample_tensors([("one", tensor)])


class Rotary(torch.nn.Module):
    """As vLLM's: a cache that is not kept with the weights, shared by all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos_sin_cache", torch.rand(4), persistent=False)
        self.long, self.use_aiter = False, False


Rotary.__module__ = "vllm.model_executor.layers.rotary_embedding.base"


class Layer(torch.nn.Module):
    """A layer with weights, a view of them, and what must not count."""

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(4))
        self.rotary = rotary
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("view", self.weight.data[:2])
        self.register_buffer("_expert_map", torch.arange(4))


@pytest.fixture
def model() -> torch.nn.Module:
    rotary = Rotary()
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Layer(rotary), Layer(rotary)])})


def told(model: Any) -> dict[str, str]:
    return digest_tensors(buffers(model, torch.float32), 1)


def test_buffers_are_named_in_each_layer_and_weights_are_not_among_them(
    model: torch.nn.Module,
) -> None:
    names = {"rotary.cos_sin_cache", "scale"}
    assert set(told(model)) == {f"layers.{layer}.{name}" for layer in (0, 1) for name in names}


def test_each_buffer_counts(model: torch.nn.Module) -> None:
    before = told(model)

    def changes() -> Iterator[torch.Tensor]:
        layer = model.get_submodule("layers.1")
        yield layer.get_buffer("scale")
        yield layer.get_buffer("rotary.cos_sin_cache")

    for buffer in changes():
        buffer += 1
        after = told(model)
        assert by_kind(after) != by_kind(before)
        before = after
    model.get_submodule("layers.1").get_buffer("_expert_map").add_(1)
    assert told(model) == before


def test_a_cache_that_a_kernel_left_unrounded_is_the_same() -> None:
    cache = torch.rand(64)
    digests = []
    for kind in (torch.float32, torch.bfloat16):
        rotary = Rotary()
        rotary.cos_sin_cache = cache.to(kind)
        digests.append(digest_tensors(buffers(rotary, torch.bfloat16), 1))
    assert digests[0] == digests[1]


def test_settings_of_positions_count_and_those_of_kernels_do_not(model: torch.nn.Module) -> None:
    before = dict(position_settings(model))
    assert set(before) == {"layers.0.rotary", "layers.1.rotary"}
    rotary: Any = model.get_submodule("layers.0.rotary")
    rotary.use_aiter = True
    assert dict(position_settings(model)) == before
    rotary.long = True
    assert dict(position_settings(model)) != before


def test_what_the_modules_around_attention_hold_counts_but_for_how_it_is_computed() -> None:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    class Attention(torch.nn.Module, AttentionLayerBase):
        def get_attn_backend(self) -> Any:
            raise NotImplementedError

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            raise NotImplementedError

    around = torch.nn.Module()
    around.attn = Attention()
    model = torch.nn.Module()
    model.self_attn, model.mlp = around, torch.nn.Linear(1, 1)
    around.scaling, around.tunes_temperature, around.num_heads = 0.125, False, 4
    before = dict(attention_settings(model))
    assert before == {"self_attn": {"scaling": 0.125, "tunes_temperature": False}}
    around.use_fast_kernel, around.num_heads = True, 2
    assert dict(attention_settings(model)) == before
    around.tunes_temperature = True
    assert dict(attention_settings(model)) != before


def test_code_of_the_models_own_is_found(model: torch.nn.Module) -> None:
    assert set(own_code(model)) == {__name__}
    assert own_code(torch.nn.Linear(1, 1)) == {}
    # Another build of Python is no other model.

    class Abstract(torch.nn.Module, ABC, Generic[Kind]):
        __module__ = "vllm.model"

    assert own_code(Abstract()) == {}


def test_modules_that_the_models_own_code_uses_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(name: str, **content: Any) -> ModuleType:
        made = ModuleType(name)
        made.__file__ = f"{name}.py"
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    folder = "transformers_modules.of_mine.abcdef"
    deeper = module(f"{folder}.deeper")
    helper = module(f"{folder}.helper", deeper=deeper, torch=torch)
    module(f"{folder}.unused")
    kind = type("Model", (torch.nn.Module,), {"__module__": f"{folder}.modeling"})
    function = FunctionType((lambda: None).__code__, {}, "helps")
    function.__module__ = helper.__name__
    module(f"{folder}.modeling", Model=kind, helps=function)
    # Where the folder lies, and of which commit it is, does not count.
    assert own_code(kind()) == {
        name: f"{folder}.{name}.py" for name in ("deeper", "helper", "modeling")
    }


def test_a_module_that_gives_only_numbers_counts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "of_mine"
    package.mkdir()
    (package / "__init__.py").touch()
    texts = {
        "numbers": "SCALE = 2",
        "more": "OFFSET = 1",
        "unused": "",
        "quantization": "class Method:\n    pass\n",
        "modeling": (
            "import torch\n"
            "from .numbers import SCALE\n"
            "import of_mine.more\n"
            "class Model(torch.nn.Module):\n    pass\n"
        ),
    }
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    loaded = {name: importlib.import_module(f"of_mine.{name}") for name in sorted(texts)}
    for name in ("of_mine", *(f"of_mine.{name}" for name in texts)):
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
    model = loaded["modeling"].Model()
    assert {"of_mine.modeling", "of_mine.numbers", "of_mine.more"} <= set(own_code(model))
    assert not {"of_mine.unused", "of_mine.quantization"} & set(own_code(model))
    # What computes need not be a part of the model.
    model.quant_method = loaded["quantization"].Method()
    assert "of_mine.quantization" in own_code(model)


def test_names_and_digests_count_together() -> None:
    assert one_digest({"a": "1", "b": "2"}) == one_digest({"b": "2", "a": "1"})
    assert one_digest({"a": "1", "b": "2"}) != one_digest({"a": "2", "b": "1"})
