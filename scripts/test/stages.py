"""The stages: what is run, of which kinds of a run it is part, and what it depends on."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

VENV = os.environ.get("VIRTUAL_ENV", ".venv")

VERSION_BEFORE = "f733200"
"""The version that an upgrade to this one starts from: that before the native catalogue."""

HANGS = ("--timeout", "600")
"""Guards against a test that hangs, and says nothing about how long one takes."""


@dataclass(frozen=True)
class Stage:
    """One check."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    kinds: tuple[str, ...] = ("all",)
    inputs: tuple[str, ...] = ()
    """Files and folders that the stage depends on. If none of them changed since it last passed,
    `all` leaves it out. Without inputs it is always run."""
    both_lanes: bool = False
    """Whether it uses both cores by itself: nothing runs beside it then."""
    runs_some: bool = False
    """Whether its output has to say that a test ran: Cargo says that all went well if none did."""
    report: Path | None = None
    """Where nextest writes what tests said, those that were skipped too."""


def _words(line: str) -> tuple[str, ...]:
    return tuple(shlex.split(line))


def _pytest(*arguments: str) -> tuple[str, ...]:
    return ("python", "-m", "pytest", "-q", *HANGS, *arguments)


_LINT = ("lint", "check", "all")
_UNIT = ("unit", "check", "all")

_RUST_TESTS = (
    ("cargo", "nextest", "run", "--workspace", "--locked", "--no-fail-fast")
    if shutil.which("cargo-nextest")
    else _words("cargo test --quiet --workspace --locked --no-fail-fast -- --show-output")
)

_PYTHON_TESTS = _pytest(
    *(f"--ignore=tests/{room}" for room in ("e2e", "packages", "sglang")),
    *("--numprocesses", "2", "--dist", "loadfile"),
)

# What is tried with other versions of vLLM than the environment's, which has all tests: a shared
# pool, preemption, blocks given back, a hybrid model, LoRA, KV events, weights that change in
# place, resets. With the oldest and the newest also an uneven pipeline, and what a router hears.
_IN_PLACE = (
    *(
        f"tests/e2e/test_weights_in_place.py::test_{name}"
        for name in (
            "after_an_update_nothing_of_the_old_weights_is_loaded[one rank]",
            "without_a_reset_nothing_of_both_weights_is_stored",
            "updates_under_load",
        )
    ),
    "tests/e2e/test_resets.py::test_a_load_on_its_way_is_given_up[in turn]",
    "tests/e2e/test_resets.py::test_resets_under_load[ahead]",
)
_OF_EACH_VERSION = (
    "tests/e2e/test_sharing.py::test_second_process_loads[file]",
    "tests/e2e/test_requests.py::test_preemption_under_a_tiny_kv_cache",
    "tests/e2e/test_requests.py::test_blocks_of_finished_requests_come_back",
    "tests/e2e/test_hybrid.py::test_only_the_last_window_is_loaded",
    "tests/e2e/test_hybrid.py::test_a_damaged_block_of_either_group_is_recomputed",
    "tests/e2e/test_adapters.py::test_an_adapter_trained_again_under_its_path_never_hits",
    "tests/e2e/test_kv_events.py",
    "tests/e2e/test_hints.py::test_parameters_that_are_no_object_change_nothing",
    *_IN_PLACE,
)
_OF_OLDEST_AND_NEWEST = (
    "tests/e2e/test_pipeline_memory.py::test_a_proportional_split_holds_the_sum",
    "tests/e2e/test_lookup_engines.py",
)
# What the newest does otherwise than the environment's: options, plans, drafters, failed steps.
_OF_THE_NEWEST = (
    "tests/connector/test_since_0_33.py",
    "tests/e2e/test_options.py::test_the_list_names_options_that_there_are",
    "tests/e2e/test_options.py::test_the_list_names_environment_variables_that_there_are",
    "tests/e2e/test_plan_agrees.py",
    "tests/e2e/test_speculation.py::test_a_drafter_goes_on_from_what_is_loaded[eagle3]",
)
_PLANS_AND_LOOK_UPS = (
    *("tests/e2e/test_parallel.py", "python/penstock/plan", "python/penstock/lookup"),
    "crates/penstock-lookup/src",
)

# Demos besides that of `make demo`, the quick start and an example. Their engines import vLLM anew.
_OTHER_DEMOS = (
    "tests/e2e/test_examples.py",
    "tests/e2e/test_quickstart.py::test_the_page_is_as_it_happens",
    "tests/e2e/test_quickstart.py::test_a_wrong_page_fails",
    "tests/e2e/test_warm.py",
    "tests/e2e/test_demo_pd.py",
    "tests/e2e/test_demo.py::test_a_trace_finds_what_the_simulator_says",
    "tests/e2e/test_demo.py::test_a_signal_leaves_no_process_behind",
)

# What runs over the stand-in for CUDA's driver: each way in which blocks come and go.
_ON_A_DEVICE = (
    "tests/e2e/test_device.py",
    "tests/e2e/test_sharing.py::test_second_process_loads[file]",
    "tests/e2e/test_corruption.py",
    "tests/e2e/test_requests.py",
    "tests/e2e/test_handover.py::test_all_families_of_proxies[valkey-unix]",
    "tests/e2e/test_handover.py::test_the_prefill_engine_dies[4]",
    "tests/e2e/test_host_tier.py::test_every_rank_holds_its_part[tp2]",
    "tests/e2e/test_host_tier.py::test_what_waits_is_prefetched",
    "tests/e2e/test_node_memory.py::test_what_one_engine_computed_another_loads_without_a_pool",
    "tests/e2e/test_node_memory.py::test_every_rank_takes_its_part_from_there[tp2]",
    "tests/e2e/test_compression.py",
    "tests/e2e/test_hybrid.py::test_only_the_last_window_is_loaded",
    "tests/e2e/test_hybrid.py::test_blocks_that_leave_the_window_are_read_before_they_are_given_away",
    "tests/gpu",
)

# The laboratory's processes and servers.
_SERVERS = tuple(f"lab/{name}.py" for name in ("loopback", "processes", "servers", "waiting"))

# What end-to-end tests are made of.
_ENGINES = (
    *("tests/e2e/conftest.py", "tests/e2e/engines.py", "tests/e2e/stored.py"),
    *("lab/engines", "lab/network.py", "tests/servers.py", "requirements"),
    *(*_SERVERS, *(f"lab/models/{kind}.py" for kind in ("attention", "hybrids", "saved"))),
)

# What stands between an engine and a pool.
_CONNECTOR = (
    *(f"python/penstock/{room}" for room in ("vllm", "layout", "plan", "pool", "lookup")),
    *("python/penstock/identity.py", "python/penstock/safetensors.py"),
    *("crates/*/src/*", "Cargo.lock"),
)

# Kinds of models, and pipelines that are split unevenly. Most of what these show, other tests show
# with a Llama.
_OF_EACH_KIND = tuple(
    f"tests/e2e/test_{name}.py"
    for name in (
        *("images", "mla", "pipeline_memory", "portable", "shared_layers", "speculation"),
        "states",
    )
)


def _end_to_end(tests: tuple[str, ...], kind: str) -> tuple[str, ...]:
    """The end-to-end tests of a kind. Engines wait for each other: two processes leave the cores
    idle for a third of the time."""
    return _pytest(
        *(*tests, "-m", kind, "--timeout", "900", "--numprocesses", "3", "--dist", "loadfile")
    )


def _files(tests: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted({test.partition("::")[0] for test in tests}))


def _version(version: str, tests: tuple[str, ...], *others: str) -> Stage:
    """The tests with a version of vLLM. They depend on `others` besides what all of them do."""
    return Stage(
        f"end-to-end tests with vLLM {version}",
        ("scripts/vllm-version.sh", VENV, version, *_pytest(*tests)),
        inputs=(
            *(*_ENGINES, *_files(tests), "python/penstock/vllm", "scripts/vllm-version.sh"),
            *others,
        ),
    )


SERVERS = Stage(
    "Redis and Valkey servers",
    ("scripts/install-servers.sh",),
    kinds=("all", "unit", "check"),
    both_lanes=True,
)

# Each lane takes the next of them as it becomes free: fast ones first, and long ones before those
# that fill up what is left.
STAGES = (
    SERVERS,
    Stage("ruff check", ("ruff", "check", "."), kinds=_LINT),
    Stage("ruff format", ("ruff", "format", "--check", "."), kinds=_LINT),
    Stage("spelling", ("typos",), kinds=_LINT),
    Stage("cargo fmt", ("cargo", "fmt", "--all", "--check"), kinds=_LINT),
    Stage(
        "cargo clippy",
        _words("cargo clippy --quiet --workspace --all-targets --locked -- -D warnings"),
        kinds=_LINT,
    ),
    Stage("mypy", ("mypy",), kinds=_LINT),
    Stage(
        "native module against its stubs",
        ("python", "-m", "mypy.stubtest", "penstock._native"),
        kinds=_LINT,
    ),
    Stage(
        "who knows whom: rooms, crates, modules",
        _pytest("tests/docs/test_architecture.py"),
        kinds=_LINT,
    ),
    Stage("site: strict build, links", ("make", "--no-print-directory", "docs"), kinds=_LINT),
    Stage(
        "Rust tests",
        _RUST_TESTS,
        kinds=_UNIT,
        report=Path("target/nextest/default/junit.xml"),
    ),
    Stage("Python tests", _PYTHON_TESTS, kinds=("unit", "all")),
    Stage("Python tests, but the long ones", (*_PYTHON_TESTS, "-m", "not long"), kinds=("check",)),
    # The wheel holds what the environment's own build has compiled.
    Stage("packages: used without vLLM and without Rust", _pytest("tests/packages")),
    Stage(
        "Rust documentation tests",
        (
            *("cargo", "test", "--quiet", "--workspace", "--locked", "--doc"),
            # The engine's own once more.
            *("--exclude", "penstock-models"),
        ),
        inputs=("crates", "Cargo.toml", "Cargo.lock"),
        runs_some=True,
    ),
    # So many inputs for each; what they found so far is in the tests above. With the features of
    # the whole workspace, as the Rust tests, so that nothing is built again.
    Stage(
        "fuzzing",
        ("cargo", "test", "--quiet", "--workspace", "--locked", "--lib", "fuzz::"),
        env={"BOLERO_RANDOM_ITERATIONS": "20000"},
        inputs=("crates/*/src/*", "Cargo.toml", "Cargo.lock"),
        runs_some=True,
    ),
    # The faults that Musuvathi and Qadeer found in real programs needed two switches at most
    # ("Iterative context bounding", 2007).
    Stage(
        "models of threads, with a third switch",
        ("cargo", "test", "--quiet", "--workspace", "--locked", "--lib", "loom_models"),
        env={"LOOM_MAX_PREEMPTIONS": "3"},
        kinds=("full",),
        runs_some=True,
    ),
    Stage(
        "end-to-end tests with one neighbour",
        _pytest(
            *("tests/e2e", "-m", "alone and not soak", "--timeout", "900"),
            *(f"--deselect={test}" for test in _OTHER_DEMOS),
        ),
        inputs=(
            *_ENGINES,
            *("lab", "tests/e2e", "tests/dashboard.py", "tests/terminal.py", "tests/watched.py"),
            *("python/penstock", "crates/*/src/*", "Cargo.lock", "deploy"),
        ),
    ),
    Stage(
        "other demos: quick start, prefill and decode, a trace, a signal",
        _pytest(*_OTHER_DEMOS, "-m", "not soak", "--timeout", "900"),
        inputs=(
            *_files(_OTHER_DEMOS),
            *(
                "docs/quickstart.md",
                "examples/README.md",
                "examples/two_engines.py",
                "tests/e2e/patient.py",
                "tests/examples/said.py",
                "tests/watched.py",
                "tests/dashboard.py",
                "requirements",
            ),
            *("lab", "python/penstock/sim", "python/penstock/vllm"),
            *(f"python/penstock/cli/{name}.py" for name in ("pool_warm", "serve", "simulate")),
            *(f"python/penstock/{name}.py" for name in ("completions", "exposition", "programs")),
            "crates/penstock-sim/src",
        ),
    ),
    Stage(
        "end-to-end tests on the stand-in for a CUDA device",
        (
            "scripts/cuda-standin.sh",
            *_pytest(*_ON_A_DEVICE, "-m", "not soak and not full", "--timeout", "900"),
        ),
        inputs=(
            *(*_ENGINES, *_files(_ON_A_DEVICE), *_CONNECTOR),
            *(
                "tests/standin",
                "tests/engine",
                "scripts/cuda-standin.sh",
                "benches/gpu_copy.py",
                "benches/shared/layouts.py",
                "benches/shared/rows.py",
            ),
        ),
    ),
    Stage(
        "end-to-end tests with model runner V2",
        (
            *("scripts/model-runner-v2.sh", VENV),
            *_pytest("tests/e2e/test_model_runner_v2.py"),
        ),
        inputs=(
            *(*_ENGINES, "tests/e2e/test_model_runner_v2.py", "scripts/model-runner-v2.sh"),
            *("python/penstock/vllm", "python/penstock/layout", "crates/penstock-layout/src"),
        ),
    ),
    _version(
        "0.33.0",
        _OF_EACH_VERSION + _OF_OLDEST_AND_NEWEST + _OF_THE_NEWEST,
        *_PLANS_AND_LOOK_UPS,
        *("tests/connector/test_compat.py", "lab/models/drafts.py", "lab/models/images.py"),
    ),
    _version("0.31.0", _OF_EACH_VERSION),
    _version("0.30.0", _OF_EACH_VERSION + _OF_OLDEST_AND_NEWEST, *_PLANS_AND_LOOK_UPS),
    Stage(
        f"rolling upgrade from {VERSION_BEFORE}",
        (
            *("scripts/version-before.sh", VENV, VERSION_BEFORE),
            *_pytest("tests/e2e/test_rolling_upgrade.py"),
        ),
        inputs=(
            *_ENGINES,
            *("tests/e2e/test_rolling_upgrade.py", "scripts/version-before.sh"),
            *("python/penstock/vllm", "python/penstock/layout", "python/penstock/identity.py"),
            *(f"crates/penstock-{crate}/src" for crate in ("contract", "store", "layout", "py")),
        ),
    ),
    Stage(
        "vLLM's own proxies and its router",
        (
            *("scripts/vllm-examples.sh", VENV, "0.32.0"),
            *("scripts/vllm-router.sh", VENV, "0.1.17"),
            *_pytest("tests/e2e/test_proxies.py", "tests/e2e/test_router.py"),
        ),
        inputs=(
            *_ENGINES,
            *("tests/e2e/test_proxies.py", "tests/e2e/test_router.py"),
            *("scripts/vllm-examples.sh", "scripts/vllm-router.sh", "lab/demo/engine.py"),
            *("python/penstock/vllm", "python/penstock/lookup", "crates/penstock-lookup/src"),
        ),
    ),
    Stage(
        "Mooncake's store",
        ("scripts/mooncake.sh", VENV, "0.3.13.post1", *_pytest("tests/pool/test_mooncake.py")),
        inputs=(
            *("tests/pool/test_mooncake.py", "lab/mooncake.py", "scripts/mooncake.sh"),
            *(*_SERVERS, "python/penstock/pool", "crates/penstock-store/src/registered"),
            "crates/penstock-contract/src",
        ),
    ),
    Stage(
        "SGLang's HiCache: its factory, host pools and threads",
        ("scripts/sglang.sh", VENV, "0.5.23", *_pytest("tests/sglang")),
        inputs=(
            *("tests/sglang", "scripts/sglang.sh", "requirements", "tests/servers.py", *_SERVERS),
            *("examples/sglang_hicache.py", "examples/README.md", "tests/examples/said.py"),
            *("python/penstock/sglang", "python/penstock/pool", "crates/penstock-py/src"),
            "crates/penstock-value/src/sealed",
        ),
    ),
    Stage(
        "every architecture of vLLM's registry, tiny",
        ("scripts/multimodal.sh", VENV, "0.28.0", "python", "-m", "scripts.sweep"),
        kinds=("full",),
        both_lanes=True,
    ),
    # What other tests show too, with another store, model or topology: see CONTRIBUTING.md.
    Stage(
        "end-to-end tests with other stores, models and topologies",
        _end_to_end(("tests/e2e",), "full and not soak"),
        kinds=("full",),
        both_lanes=True,
    ),
    Stage(
        "end-to-end tests of each kind of model, and of uneven pipelines",
        _end_to_end(_OF_EACH_KIND, "not soak and not alone and not full"),
        inputs=(
            *(*_ENGINES, *_OF_EACH_KIND, *_CONNECTOR),
            *("lab/models/drafts.py", "lab/models/images.py", "tests/e2e/test_parallel.py"),
        ),
        both_lanes=True,
    ),
    Stage(
        "end-to-end tests on the real vLLM",
        _end_to_end(
            ("tests/e2e", *(f"--ignore={file}" for file in _OF_EACH_KIND)),
            "not soak and not alone and not full",
        ),
        both_lanes=True,
    ),
)
