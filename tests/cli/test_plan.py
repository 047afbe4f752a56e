"""`penstock plan` from its command line."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from tests import pictures
from tests.plan.test_kv import LLAMA


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "memory",
    [["24GiB", "--enable-pp-prop-kv-cache"], ["12GiB"]],
    ids=["flag: of all ranks", "vLLM's own: of each rank"],
)
def test_uniform_beside_proportional(
    memory: list[str], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """48/16 with 24 GiB: the same memory holds half as much again."""
    document = planned(capsys, model, "--pp", "48,16", "--kv-cache-memory-bytes", *memory)
    (plan,) = document["plans"]
    assert [rank["layers"] for rank in plan["ranks"]] == [[0, 48], [48, 64]]
    assert [rank["kv_bytes_per_token"] for rank in plan["ranks"]] == [48 * 4096, 16 * 4096]
    uniform, proportional = plan["splits"]
    assert uniform["tokens"] == 65_536
    assert uniform["split"]["idle_bytes"] == [0, 8 << 30]
    assert uniform["rank_concurrency"] == [2, 6]
    assert proportional["tokens"] == 98_304
    assert proportional["concurrency"] == 3
    assert proportional["split"]["kv_memory_bytes"] == [18 << 30, 6 << 30]
    assert proportional["split"]["idle_bytes"] == [0, 0]
    assert proportional["rank_concurrency"] == [3, 3]


def test_the_proposals_own_case(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM PR 25164: 8 GiB over 56 and 8 layers are 7 GiB and 1 GiB."""
    arguments = [model, "--pp", "56,8", "--kv-cache-memory-bytes", "8GiB"]
    for tensor_parallel in ("1", "4"):
        more = ["--tp", tensor_parallel, "--enable-pp-prop-kv-cache"]
        (plan,) = planned(capsys, *arguments, *more)["plans"]
        _, proportional = plan["splits"]
        assert proportional["split"]["kv_memory_bytes"] == [7 << 30, 1 << 30]


def test_each_ranks_concurrency_before_and_after(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """48/16: the second rank could hold three of the longest requests, the first one."""
    arguments = [model, "--pp", "48,16", "--kv-cache-memory-bytes", "12GiB"]
    (plan,) = planned(capsys, *arguments, "--enable-pp-prop-kv-cache")["plans"]
    uniform, proportional = (split["rank_concurrency"] for split in plan["splits"])
    assert uniform == [1, 3]
    assert proportional == [1.5, 1.5]
    assert main(["plan", *arguments, "--enable-pp-prop-kv-cache"]) == 0
    shown = capsys.readouterr().out
    for words in ("1.00x", "3.00x", "1.50x"):
        assert words in shown


def test_the_commands_are_those_to_type(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [model, "--pp", "48,16", "--kv-cache-memory-bytes", "1GiB"]
    ours, plain = planned(capsys, *arguments, "--enable-pp-prop-kv-cache")["commands"]
    assert ours == (
        f"VLLM_PP_LAYER_PARTITION=48,16 penstock serve {model} --pipeline-parallel-size 2 "
        "--block-size 16 --max-num-batched-tokens 8192 "
        "--kv-cache-memory-bytes 1073741824 --enable-pp-prop-kv-cache"
    )
    assert plain.endswith("""--additional-config '{"penstock.enable_pp_prop_kv_cache": true}'""")
    ours, _ = planned(capsys, *arguments)["commands"]
    assert "prop" not in ours
    assert "--kv-cache-memory-bytes 1073741824" in ours


def test_what_the_flag_would_take_is_said(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The total for more tokens in the same memory, and for the same tokens in less: both hold
    what they say."""
    memory = 12 << 30
    arguments = [model, "--pp", "48,16", "--kv-cache-memory-bytes"]
    assert main(["plan", *arguments, str(memory)]) == 0
    shown = capsys.readouterr().out
    flag = "--enable-pp-prop-kv-cache"
    for tokens, total in ((98_304, 2 * memory), (65_536, 4 * memory // 3)):
        assert f"{tokens:,} tokens: {flag} --kv-cache-memory-bytes {total}" in shown
        (plan,) = planned(capsys, *arguments, str(total), flag)["plans"]
        assert plan["splits"][1]["tokens"] == tokens


def test_tokens_wanted_are_turned_into_bytes(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [model, "--pp", "56,8", "--kv-cache-tokens", "65536"]
    (plan,) = planned(capsys, *arguments)["plans"]
    exact = plan["splits"][1]
    assert exact["tokens"] == 65_536
    assert exact["split"]["kv_memory_bytes"] == [56 * 65_536 * 4096, 8 * 65_536 * 4096]


def test_the_best_partition_for_unequal_devices(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [model, "--pp-size", "2", "--device-memory", "80GiB,40GiB", "--reserve", "4GiB"]
    default, best = planned(capsys, *arguments)["plans"]
    assert default["partition"] == [32, 32]
    tokens = [plan["splits"][0]["tokens"] for plan in (default, best)]
    assert tokens[1] > 2 * tokens[0]
    assert best["partition"][0] > 40


def test_speeds_show_the_frontier_and_the_picture(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plan.svg"
    arguments = [model, "--pp-size", "2", "--device-memory", "80GiB,40GiB"]
    arguments += ["--device-speed", "1,1.5", "--plot", str(picture)]
    frontier = planned(capsys, *arguments)["frontier"]
    assert len(frontier) > 1
    for more, faster in itertools.pairwise(frontier):
        assert more["tokens"] > faster["tokens"]
        assert more["slowest_stage"] > faster["slowest_stage"]
    root = ET.fromstring(picture.read_text())
    namespace = "{http://www.w3.org/2000/svg}"
    dots = root.findall(f".//{namespace}circle")
    assert len(dots) == len(frontier)
    assert pictures.faults(picture.read_text()) == []
    assert {"best partition", "44 layers", "32,32", "80 GiB"} <= set(
        pictures.words(picture.read_text())
    )


def test_the_axis_of_bytes_has_round_numbers(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The longest column is of 63.045 GiB."""
    picture = tmp_path / "plan.svg"
    arguments = [model, "--pp", "48,16", "--kv-cache-memory-bytes", "12GiB"]
    planned(capsys, *arguments, "--plot", str(picture))
    sizes = [text for text in pictures.words(picture.read_text()) if text.endswith("iB")]
    assert sizes == ["16 GiB", "32 GiB", "48 GiB", "64 GiB"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--pp", "9,8,8,8,8,8,8,7", "--kv-cache-memory-bytes", "1GiB"],
        ["--pp", "40,24", "--kv-cache-memory-bytes", "2GiB", "--device-memory", "80GiB,40GiB"],
        ["--pp-size", "3", "--device-memory", "80GiB,40GiB,24GiB", "--device-speed", "1,1.5,2"],
        ["--pp-size", "4", "--device-memory", "40GiB", "--device-speed", "1,1.5,2,2.5"],
    ],
)
def test_no_label_of_the_picture_crosses_another(
    arguments: list[str], model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plan.svg"
    document = planned(capsys, model, *arguments, "--plot", str(picture))
    assert pictures.faults(picture.read_text()) == []
    # Where several partitions have several splits, each column says whose it is.
    said = pictures.words(picture.read_text())
    for name in [each["name"] for each in document["plans"][0]["splits"]]:
        assert name in said or len(document["plans"]) > 1 == len(document["plans"][0]["splits"])


def test_people_read_a_table(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--pp", "48,16", "--kv-cache-memory-bytes", "12GiB"]) == 0
    shown = capsys.readouterr().out
    for words in ("estimated", "0-47 (48)", "8 GiB", "98,304", "6.00x", "To serve it so:"):
        assert words in shown


def test_too_little_to_start_is_said(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A request of 32,768 tokens, and a block that vLLM keeps back."""
    exact = str(48 * 32_768 * 4096)
    arguments = ["plan", model, "--pp", "48,16", "--kv-cache-memory-bytes"]
    assert main([*arguments, exact]) == 0
    assert "1.00x (!)" in capsys.readouterr().out
    assert main([*arguments, str(int(exact) + 48 * 16 * 4096)]) == 0
    assert "(!)" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--pp", "48,15"], "partition 48,15 has 63 layers, the model has 64"),
        (["--pp", "64,0"], "every rank needs a layer"),
        (["--pp-size", "65"], "64 layers cannot be spread over 65 ranks"),
        (["--pp-size", "2", "--device-memory", "20GiB"], "no partition fits: the weights take"),
        (["--pp", "60,4", "--device-memory", "50GiB"], "rank 0: its weights take"),
        (["--pp", "32,32", "--device-memory", "1GiB"], "of its device may be used"),
        (["--pp", "32,32", "--device-memory", "1GiB,2GiB,3GiB"], "3 values for 2 ranks"),
        (["--pp", "32,32", "--kv-cache-tokens", "5"], "ask for 32,784 at least"),
        (["--pp", "32,32", "--kv-cache-memory-bytes", "1KiB"], "no room for one block"),
        (["--pp", "32,32", "--device-speed", "1"], "needs --device-memory"),
    ],
)
def test_bad_input_says_its_numbers(
    arguments: list[str], says: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", model, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path / "none"), "--pp", "1,1"]) == 2
    assert "no such file" in capsys.readouterr().err
