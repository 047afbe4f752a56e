"""Which of vLLM's options count: all of them, but for a list.

On vLLM's own configuration. No engine is started.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import itertools
import json
import shutil
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from lab.models import images
from penstock.errors import ConfigError
from penstock.vllm.compat import (
    COUNTED,
    MAY_DIFFER,
    MAY_DIFFER_BY_ENVIRONMENT,
    environment,
    may_differ,
    options,
)
from penstock.vllm.model_facts import model_facts

pytestmark = pytest.mark.e2e

ONLY_IN = {
    "model_config.enable_return_routed_experts": "<0.31",
    **dict.fromkeys(
        (
            "attention_config.indexer_tp_shard_min_rows",
            "attention_config.minimax_m3_indexer_cp",
            "cache_config.simple_cpu_offload_num_blocks",
            "speculative_config.disable_lookahead_block_hashes",
            "speculative_config.draft_lm_head_quantization",
            "speculative_config.fly_*",
            "watchdog_config",
            "VLLM_*_LOG_LEVEL",
            "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT",
        ),
        ">=0.33",
    ),
    "VLLM_USE_RAY_*": "<0.33",
}
"""The versions of vLLM with options and environment variables that not all supported ones have."""


@pytest.fixture(scope="module")
def config(llama: Path) -> Any:
    return configured(llama)


def configured(model: Path, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = {"skip_tokenizer_init": True, "dtype": "float32"} | arguments
    return EngineArgs(model=str(model), **arguments).create_engine_config()


def fields(config: Any, path: str = "") -> Iterator[tuple[str, Any, str]]:
    """Each option of a configuration that is not a part with options of its own: its path, and who
    has it under which name."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        if dataclasses.is_dataclass(value):
            yield from fields(value, f"{path}{field.name}.")
        else:
            yield f"{path}{field.name}", config, field.name


def names(kind: Any, path: str = "", above: tuple[Any, ...] = ()) -> Iterator[str]:
    """All options that a configuration may have."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        yield f"{path}{field.name}"
        inner = part_of(hints[field.name])
        if inner is not None and inner not in above:
            yield f"{path}{field.name}.set"
            yield from names(inner, f"{path}{field.name}.", (*above, inner))


def part_of(hint: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return hint
    return next(filter(None, map(part_of, typing.get_args(hint))), None)


def test_every_option_counts_unless_the_list_has_it(config: Any) -> None:
    before = options(config)
    counted, left_out = set(), set()
    for path, _, _ in fields(config):
        changed = copy.deepcopy(config)
        (owner, name) = next((o, n) for p, o, n in fields(changed) if p == path)
        object.__setattr__(owner, name, "changed")
        parts = path.split(".")
        above = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
        if path not in COUNTED and any(may_differ(each) for each in above):
            assert options(changed) == before, path
            left_out.add(path)
        else:
            assert options(changed) == before | {path: "changed"}, path
            counted.add(path)
    assert {"model_config.quantization_config", "cache_config.kv_sharing_fast_prefill"} <= counted
    assert counted >= set(COUNTED)
    assert {"scheduler_config.max_num_seqs", "model_config.max_model_len"} <= left_out


def test_an_option_that_a_newer_vllm_has_counts_once_it_is_set(config: Any) -> None:
    kind = type(config.cache_config)
    newer = dataclasses.make_dataclass(
        "CacheConfig", [("halves_kv", bool, dataclasses.field(default=False))], bases=(kind,)
    )
    changed = copy.deepcopy(config)
    changed.cache_config.__class__ = newer
    changed.cache_config.halves_kv = False
    assert options(changed) == options(config)
    changed.cache_config.halves_kv = True
    assert options(changed) == options(config) | {"cache_config.halves_kv": True}


def test_the_list_names_options_that_there_are(config: Any) -> None:
    from vllm.config import VllmConfig

    known = set(names(VllmConfig)) | {"additional_config.penstock.x"}
    # A drafter's model has the options of a model.
    for pattern in MAY_DIFFER:
        parts = pattern.split(".")
        assert any(fits(name.split("."), parts) for name in known) == is_here(pattern), pattern


def is_here(pattern: str) -> bool:
    """Whether the installed vLLM is one of those that have what the pattern names."""
    import vllm

    return Version(vllm.__version__) in SpecifierSet(ONLY_IN.get(pattern, ""))


def fits(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(map(fnmatch.fnmatchcase, name, pattern))


def test_every_line_of_the_list_says_why() -> None:
    reasons = (*MAY_DIFFER.values(), *MAY_DIFFER_BY_ENVIRONMENT.values())
    assert all(len(reason.split()) > 2 for reason in reasons)


def test_code_of_vllms_own_does_not_count_and_that_of_others_does(config: Any) -> None:
    changed = copy.deepcopy(config)
    changed.parallel_config.worker_cls = "vllm.v1.worker.another.Worker"
    changed.scheduler_config.scheduler_cls = "vllm.v1.core.sched.another.Scheduler"
    assert options(changed) == options(config)
    changed.parallel_config.worker_cls = "of_mine.Worker"
    assert options(changed) == options(config) | {"parallel_config.worker_cls": "of_mine.Worker"}


def test_what_another_encoder_made_of_images_counts(llama: Path, config: Any) -> None:
    consumer = {"ec_connector": "ECExampleConnector", "ec_role": "ec_consumer"}
    first, second = (
        options(configured(llama, ec_transfer_config=consumer | {"ec_port": port}))
        for port in (14579, 14580)
    )
    assert first == second
    assert {name for name in first if name not in options(config)} == {
        f"ec_transfer_config.{name}" for name in ("set", "ec_connector", "ec_role")
    }


def test_each_environment_variable_counts_unless_the_list_has_it(
    monkeypatch: pytest.MonkeyPatch, config: Any
) -> None:
    from vllm import envs

    ours = [name for name in envs.environment_variables if name.startswith("VLLM_")]
    for name in ours:
        monkeypatch.delenv(name, raising=False)
    assert "environment" not in model_facts(config).identity
    for name in ours:
        monkeypatch.setenv(name, "3")
    left_out = {name for name in ours if in_list(name)}
    assert environment() == dict.fromkeys(sorted(set(ours) - left_out), "3")
    # Experts at random, numbers of fewer bits, other frames of a video.
    for name in ("MOE_ROUTING_SIMULATION_STRATEGY", "MARLIN_INPUT_DTYPE", "VIDEO_LOADER_BACKEND"):
        assert f"VLLM_{name}" in model_facts(config).identity["environment"]
    assert {"VLLM_LOGGING_LEVEL", "VLLM_HOST_IP", "VLLM_CACHE_ROOT", "VLLM_API_KEY"} <= left_out


def test_the_list_names_environment_variables_that_there_are() -> None:
    from vllm import envs

    for pattern, reason in MAY_DIFFER_BY_ENVIRONMENT.items():
        named = [each for each in envs.environment_variables if fnmatch.fnmatchcase(each, pattern)]
        # No secret of a newer vLLM gets into a pool.
        assert bool(named) == is_here(pattern) or "lets somebody in" in reason, pattern


def in_list(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in MAY_DIFFER_BY_ENVIRONMENT)


@pytest.mark.parametrize(
    "arguments",
    [
        {"tensor_parallel_size": 2},
        {"max_model_len": 2048, "max_num_seqs": 2, "enforce_eager": True, "seed": 7},
        {"load_format": "safetensors", "served_model_name": "other", "enable_lora": True},
        {"block_size": 32, "kv_cache_memory_bytes": 1 << 27, "gpu_memory_utilization": 0.5},
        {"additional_config": {"penstock.plan": True}},
    ],
)
def test_engines_of_a_fleet_have_the_same_options(
    arguments: dict[str, Any], config: Any, llama: Path
) -> None:
    assert options(configured(llama, **arguments)) == options(config)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"disable_sliding_window": True}, "model_config.disable_sliding_window"),
        ({"hf_overrides": {"rope_theta": 5}}, "model_config.hf_overrides"),
        ({"kv_sharing_fast_prefill": True}, "cache_config.kv_sharing_fast_prefill"),
        ({"additional_config": {"x": [1]}}, "additional_config.x"),
    ],
)
def test_others_have_others(arguments: dict[str, Any], name: str, config: Any, llama: Path) -> None:
    found = options(configured(llama, **arguments))
    assert {each for each in found if found[each] != options(config).get(each)} == {name}


@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
def test_a_role_changes_nothing_in_what_images_need(role: str, tmp_path: Path) -> None:
    from vllm.config import KVTransferConfig

    model = images.idefics3(tmp_path)
    transfer = KVTransferConfig(
        kv_connector="PenstockConnector",
        kv_connector_module_path="penstock.vllm.connector",
        kv_role=role,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"penstock.pool": "memory:"},
    )
    alone = configured(model, skip_tokenizer_init=False)
    found = configured(model, skip_tokenizer_init=False, kv_transfer_config=transfer)
    assert found.kv_transfer_config is not None
    assert found.model_config.multimodal_config == alone.model_config.multimodal_config
    assert options(found) == options(alone)


def test_values_are_the_same_text_in_every_process() -> None:
    from penstock.vllm.compat.options import plain

    class Scheme:
        """What a configuration may hold: not plain, and without an order."""

        def __init__(self, ignored: set[str]) -> None:
            self.ignored = ignored

    assert plain({"b": 1, "a": {3, 1}}) == {"a": [1, 3], "b": 1}
    one, other = plain(Scheme({"x", "y"})), plain(Scheme({"x"}))
    assert one["ignored"] == ["x", "y"]
    assert one != other
    assert "0x" not in str(one)
    assert plain(test_values_are_the_same_text_in_every_process).startswith(f"{__name__}.test_")


@pytest.mark.parametrize("where", ["beside the weights", "elsewhere"])
def test_a_file_with_the_settings_of_quantization_counts(
    where: str, llama: Path, tmp_path: Path
) -> None:
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    shutil.copytree(llama, model)
    shutil.copytree(llama, tokenizer)
    beside, elsewhere = model / "quantize_config.json", tmp_path / "settings.json"
    settings = {"bits": 4, "group_size": 16, "desc_act": False, "sym": True}
    for file in (beside, elsewhere, tokenizer / beside.name):
        file.write_text(json.dumps(settings))
    config = configured(model, tokenizer=str(tokenizer), quantization="auto_gptq", dtype="bfloat16")
    config.model_config.hf_overrides = {"quantization_config_file": str(elsewhere)}
    before = model_facts(config).identity
    changed = beside if where == "beside the weights" else elsewhere
    changed.write_text(json.dumps(settings | {"sym": False}))
    after = model_facts(config).identity
    assert {name for name in before if before[name] != after[name]} == {"files"}


def test_files_that_process_images_count_beside_the_model_and_beside_its_tokenizer(
    tmp_path: Path,
) -> None:
    model = images.idefics3(tmp_path / "model")
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(model, tokenizer)
    config = configured(model, tokenizer=str(tokenizer))
    file = "preprocessor_config.json"
    found = []
    for folder in (model, model, tokenizer):
        found.append(model_facts(config).identity["files"])
        (folder / file).write_text(json.dumps({"changed": len(found)}))
    found.append(model_facts(config).identity["files"])
    changed = [
        {name for name in before if before[name] != after[name]}
        for before, after in itertools.pairwise(found)
    ]
    assert changed == [{file}, {file}, {f"tokenizer: {file}"}]


def test_a_model_for_images_without_a_folder_is_refused(tmp_path: Path) -> None:
    config = configured(images.idefics3(tmp_path / "model"))
    config.model_config.model = config.model_config.tokenizer = "nobody/has-this"
    with pytest.raises(ConfigError, match=r"no folder of the model nobody/has-this .* of images"):
        model_facts(config)
