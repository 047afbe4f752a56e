"""`penstock serve` composes vLLM's command; --dry-run shows it."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli import main
from penstock.cli.serve import compose
from penstock.errors import ConfigError

POOL = "valkey://cache.example:6379/2"
words = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
options = st.lists(
    st.one_of(
        st.sampled_from(["--port", "--tensor-parallel-size=2", "--dtype", "-O3", "--lora_modules"]),
        words.filter(lambda word: not word.startswith("-")),
    ),
    max_size=8,
)


def transfer_config(arguments: list[str]) -> dict[str, Any]:
    document = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert isinstance(document, dict)
    return document


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The words of the command that a shell would read from what is printed."""
    assert main(["serve", *arguments, "--dry-run"]) == 0
    return shlex.split(capsys.readouterr().out)


def test_the_command_carries_the_connector_and_vllms_own_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = dry_run(
        capsys, "a/model", "--port", "8001", "--pool", POOL, "--max-model-len", "4096"
    )
    assert command[:7] == ["vllm", "serve", "a/model", "--port", "8001", "--max-model-len", "4096"]
    assert "--enable-prompt-tokens-details" in command
    config = transfer_config(command)
    assert config == {
        "kv_connector": "PenstockConnector",
        "kv_connector_module_path": "penstock.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"penstock.pool": POOL},
    }


@pytest.mark.parametrize("role", ["both", "producer", "consumer"])
def test_the_role_reaches_vllm(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = dry_run(capsys, "m", "--pool", POOL, "--role", role)
    assert transfer_config(command)["kv_role"] == f"kv_{role}"


def test_layout_and_geometry_reach_the_connector(capsys: pytest.CaptureFixture[str]) -> None:
    command = dry_run(
        capsys, "m", "--pool", POOL, "--kv-layout", "LBHNC", "--pool-geometry", "portable"
    )
    extra = transfer_config(command)["kv_connector_extra_config"]
    assert extra["penstock.kv_layout"] == "LBHNC"
    assert extra["penstock.pool_geometry"] == "portable"
    assert "--kv-layout" not in command


@pytest.mark.parametrize("setting", ["kv_layout=XYZ", "pool_geometry=portable", "pool_geometry=3"])
def test_a_setting_with_an_option_of_its_own_or_a_bad_value_is_refused(
    setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "m", "--pool", POOL, "--dry-run", "--set", setting]) == 2
    assert "option of its own" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="pool geometry '3'"):
        compose("m", {"pool": POOL, "pool_geometry": "3"})


def test_kv_memory_travels_in_vllms_additional_configuration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["m", "--pool", POOL, "-pp", "2", "--kv-cache-memory-bytes", "1073741824"]
    arguments += ["--enable-pp-prop-kv-cache", "--additional-config", '{"theirs":1}']
    command = dry_run(capsys, *arguments)
    assert command.count("--additional-config") == 1
    given = json.loads(command[command.index("--additional-config") + 1])
    assert given == {"theirs": 1, "penstock.enable_pp_prop_kv_cache": True}
    command = dry_run(capsys, "m", "--pool", POOL, "--kv-cache-tokens", "262144")
    given = json.loads(command[command.index("--additional-config") + 1])
    assert given == {"penstock.kv_cache_tokens": 262_144}
    assert "--additional-config" not in dry_run(capsys, "m", "--pool", POOL)


@pytest.mark.parametrize("pipeline", [[], ["-pp", "2"], ["--pipeline-parallel-size=2"]])
def test_a_proportional_split_needs_a_total(
    pipeline: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["serve", "m", "--pool", POOL, "--enable-pp-prop-kv-cache", "--dry-run"]
    assert main([*arguments, *pipeline]) == 2
    said = capsys.readouterr().err
    assert "--enable-pp-prop-kv-cache requires --kv-cache-memory-bytes" in said
    # A number of tokens is a total too; a file of options may have one.
    assert main([*arguments, *pipeline, "--kv-cache-memory-bytes", "8589934592"]) == 0
    assert main([*arguments, *pipeline, "--kv-cache-tokens", "4096"]) == 0
    assert main([*arguments, *pipeline, "--config", "options.yaml"]) == 0
    memory = ["--kv-cache-memory-bytes", "8589934592"]
    assert main([*arguments, *memory, "--additional-config", "no JSON", "-pp", "1"]) == 2
    assert "not a JSON object" in capsys.readouterr().err


@given(model=words.filter(lambda word: word and not word.startswith("-")), options=options)
def test_options_reach_vllm_in_their_order_and_to_the_letter(
    model: str, options: list[str]
) -> None:
    launch = compose(model, {"pool": POOL}, options)
    assert launch.arguments[:3] == ("vllm", "serve", model)
    assert list(launch.arguments[3 : 3 + len(options)]) == options
    assert tuple(shlex.split(launch.shown)) == launch.arguments


@pytest.mark.parametrize(
    "pool",
    [
        "valkey://me:hunter2@cache.example/1",
        "redis://:hunter2@cache.example",
        "unix:///run/valkey.sock?db=1&password=hunter2",
        "unix:///run/valkey.sock?user=me&pass%77ord=hunter2",
        "valkey+cluster://me:hunter2@one.example,other.example",
        "valkey://cache.example redis://me:hunter2@cache.example",
    ],
)
def test_a_password_is_neither_shown_nor_in_the_command_line(pool: str) -> None:
    launch = compose("model", {"pool": pool})
    assert "hunter2" not in launch.shown
    assert not any("hunter2" in argument for argument in launch.arguments)
    assert launch.environment == {"PENSTOCK_POOL": pool}
    # Without it in the configuration the connector reads it from the environment.
    extra = transfer_config(list(launch.arguments))["kv_connector_extra_config"]
    assert "penstock.pool" not in extra


def test_the_sentinels_password_is_not_either() -> None:
    url = "redis+sentinel://h/main?sentinel_user=w&sentinel_password=hunter2"
    launch = compose("m", {"pool": url})
    assert launch.environment == {"PENSTOCK_POOL": url}
    assert "hunter2" not in f"{launch.arguments} {launch.shown}"


def test_settings_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    command = dry_run(
        capsys, "m", "--pool", POOL, "--host-bytes", "3GiB", "--set", "load_timeout=0.2"
    )
    extra = transfer_config(command)["kv_connector_extra_config"]
    assert extra["penstock.host_bytes"] == 3 << 30
    assert extra["penstock.load_timeout"] == "0.2"


def test_the_load_policy_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    extra = transfer_config(dry_run(capsys, "m", "--pool", POOL, "--load-policy", "always"))
    assert extra["kv_connector_extra_config"]["penstock.load_policy"] == "always"
    arguments = ["serve", "m", "--pool", POOL, "--dry-run", "--set", "load_policy=never"]
    assert main(arguments) == 2
    assert "option of its own: --load-policy" in capsys.readouterr().err


def test_the_pool_is_a_directory_of_the_user_by_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delenv("PENSTOCK_POOL", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    extra = transfer_config(dry_run(capsys, "m"))["kv_connector_extra_config"]
    assert extra["penstock.pool"] == (tmp_path / "penstock" / "pool").as_uri()

    monkeypatch.setenv("PENSTOCK_POOL", POOL)
    extra = transfer_config(dry_run(capsys, "m"))["kv_connector_extra_config"]
    assert extra["penstock.pool"] == POOL


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--kv-transfer-config", "{}"], "--kv-transfer-config"),
        (["--kv_transfer_config={}"], "--kv-transfer-config"),
        (["--kv-transfer-config.kv_role", "kv_both"], "--kv-transfer-config"),
        (["--no-enable-prefix-caching"], "hashes"),
        (["--prefix-caching-hash-algo", "xxhash"], "PYTHONHASHSEED"),
        (["--prefix-caching-hash-algo=xxhash_cbor"], "PYTHONHASHSEED"),
        (["--pool", "memory://?size=1GiB"], "private"),
        (["--pool", "ftp://cache.example"], "no store has the scheme"),
        (["--set", "colour=red"], "colour"),
        (["--set", "load_timeout"], "NAME=VALUE"),
        (["--set", "pool=file:///elsewhere"], "--pool"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    arguments: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("PENSTOCK_POOL", POOL)
    assert main(["serve", "m", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_xxhash_with_a_seed_of_its_own_is_fine() -> None:
    options = ["--prefix-caching-hash-algo", "xxhash"]
    compose("m", {"pool": POOL}, options, environ={"PYTHONHASHSEED": "7"})
    with pytest.raises(ConfigError):
        compose("m", {"pool": POOL}, options, environ={"PYTHONHASHSEED": "random"})
