"""The wheel, in an empty environment: used without vLLM and without Rust."""

from __future__ import annotations

import email
import json
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from tests.packages.conftest import ROOT, Environment, imported, uv
from tests.plan.test_kv import LLAMA

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

RICH = {"markdown-it-py", "mdurl", "pygments", "rich"}
"""What the wheel asks for, and what that asks for."""

VLLM = {"torch", "transformers", "vllm"}
"""What the extra leaves to vLLM."""

SGLANG = {"sglang"}
"""What nothing that Penstock installs brings."""

LOOKUP = {"msgspec", "prometheus_client", "uvicorn"}
"""What the look-up server needs, and vLLM brings too."""


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel: Path) -> email.message.Message:
    [text] = [data for name, data in contents(wheel).items() if name.endswith("/METADATA")]
    return email.message_from_bytes(text)


def test_it_is_for_every_python_from_3_11_on(wheel: Path) -> None:
    name = rf"penstock-{re.escape(penstock.__version__)}-cp311-abi3-manylinux_2_\d+_\w+\.whl"
    assert re.fullmatch(name, wheel.name)
    said = metadata(wheel)
    assert said["Version"] == penstock.__version__
    assert said["Requires-Python"] == ">=3.11"
    assert said["License-Expression"] == "Apache-2.0"


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    found = {name for name in contents(wheel) if ".dist-info/" not in name}
    sources = {
        str(path.relative_to(ROOT / "python"))
        for path in (ROOT / "python/penstock").rglob("*")
        if path.suffix in (".py", ".pyi", ".typed", ".ptx") or path.name == "py.typed"
    }
    assert found - sources == {"penstock/_native.abi3.so"}
    assert sources - found == set()


def test_no_path_of_the_checkout_is_in_its_code(wheel: Path) -> None:
    assert str(ROOT).encode() not in contents(wheel)["penstock/_native.abi3.so"]


def test_its_bill_of_materials_names_every_crate(wheel: Path) -> None:
    """CycloneDX, beside the package: what `cargo tree` says is built in, and nothing else."""
    [text] = [data for name, data in contents(wheel).items() if "/sboms/" in name]
    bill = json.loads(text)
    assert bill["bomFormat"] == "CycloneDX"
    named = {(each["name"], each["version"]) for each in bill["components"]}
    tree = subprocess.run(
        [
            *("cargo", "tree", "--locked", "--package", "penstock-py", "--prefix", "none"),
            *("--edges", "normal,build", "--format", "{p}"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    built_in = set(re.findall(r"^(\S+) v(\S+)", tree.stdout, re.MULTILINE))
    built_in.discard(("penstock-py", penstock.__version__))
    assert built_in - named == set()
    assert ("penstock-store", penstock.__version__) in named
    assert all(each["licenses"] for each in bill["components"] if each["name"] != "penstock-py")


def test_it_brings_what_it_says_and_no_more(environment: Environment) -> None:
    assert set(environment.packages()) - {"penstock"} == {*RICH}
    missing = {name for name in imported(environment).values() if name}
    assert missing <= {*VLLM, *SGLANG, *LOOKUP, "openai", "packaging", "pydantic"}


def test_what_needs_no_vllm_can_be_imported(environment: Environment) -> None:
    wrong = {name: why for name, why in imported(environment).items() if why}
    assert {name.split(".")[1] for name in wrong} == {
        "completions",
        "lookup",
        "sglang",
        "vllm",
    }
    assert not {"penstock.lookup", "penstock.lookup.service", "penstock.sglang"} & wrong.keys()


def test_with_the_extra_only_vllm_is_missing(
    wheel: Path, make_environment: Callable[..., Environment]
) -> None:
    beside = make_environment(f"penstock[vllm] @ file://{wheel}")
    assert {name for name in imported(beside).values() if name} <= {*VLLM, *SGLANG, *LOOKUP}
    said = beside.said("penstock", "serve", "m", "--pool", f"file://{beside.home}/p", "--dry-run")
    assert said.startswith("vllm serve m ")


def test_the_look_up_server_needs_its_extra_only(
    wheel: Path, make_environment: Callable[..., Environment]
) -> None:
    beside = make_environment(f"penstock[lookup] @ file://{wheel}")
    wrong = {name: why for name, why in imported(beside).items() if why}
    assert not [name for name in wrong if name.startswith("penstock.lookup")]


def test_a_command_that_needs_vllm_says_so(environment: Environment) -> None:
    pool = f"file://{environment.home}/p"
    done = environment.run("penstock", "serve", "m", "--pool", pool, "--dry-run")
    assert done.returncode == 1
    assert "install penstock[vllm]" in done.stderr
    assert "Traceback" not in done.stderr


def test_version(environment: Environment) -> None:
    assert environment.said("penstock", "--version") == f"penstock {penstock.__version__}\n"
    assert environment.packages()["penstock"] == penstock.__version__


def test_doctor_and_pool(environment: Environment) -> None:
    pool = f"file://{environment.home}/pool?size=256MiB"
    assert "This pool can serve." in environment.said("penstock", "doctor", pool)
    environment.said("python", "-c", PUT, PENSTOCK_POOL=pool)
    assert json.loads(environment.said("penstock", "pool", "stats", pool, "--json"))["objects"] > 0


PUT = """
import os, penstock
with penstock.open(os.environ["PENSTOCK_POOL"]) as pool:
    pool.put("a prompt", b"its keys and values")
with penstock.open(os.environ["PENSTOCK_POOL"]) as pool:
    assert bytes(pool.get("a prompt")) == b"its keys and values"
"""


def test_plan(environment: Environment) -> None:
    model = environment.home / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    arguments = ["--pp", "48,16", "--kv-cache-memory-bytes", "24GiB", "--enable-pp-prop-kv-cache"]
    said = json.loads(environment.said("penstock", "plan", str(model), *arguments, "--json"))
    uniform, proportional = said["plans"][0]["splits"]
    assert (uniform["tokens"], proportional["tokens"]) == (65_536, 98_304)


def test_simulate(environment: Environment) -> None:
    """A conversation of ten turns over two nodes: with a pool, no turn is computed again."""
    trace = environment.home / "trace.jsonl"
    turns = [
        {
            "timestamp": 1000 * turn,
            "input_length": 512 * (turn + 1),
            "output_length": 1,
            "hash_ids": [*range(turn + 1)],
        }
        for turn in range(10)
    ]
    trace.write_text("\n".join(map(json.dumps, turns)))
    arguments = ["--bytes-per-token", "1KiB", "--nodes", "2", "--pool-bytes", "1GiB", "--no-sizes"]
    said = json.loads(environment.said("penstock", "simulate", str(trace), *arguments, "--json"))
    shared = said["outcomes"]["shared pool"]["hit_ratio"]
    assert shared == said["bounds"]["no bound"] > 0.5


@pytest.mark.parametrize("page", ["docs/api/index.md"])
def test_examples_of_the_python_api(environment: Environment, page: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    assert blocks
    for block in blocks:
        environment.said("python", "-c", block + "\nassert bytes(value), value\n")


def test_it_runs_on_other_pythons(
    wheel: Path, make_environment: Callable[..., Environment]
) -> None:
    """The oldest and the newest that the machine has."""
    listed = json.loads(
        uv("python", "list", "--only-installed", "--no-python-downloads", "--output-format", "json")
    )
    found = {
        (each["version_parts"]["major"], each["version_parts"]["minor"]): each["path"]
        for each in listed
        if each["implementation"] == "cpython" and each["variant"] == "default"
    }
    known = sorted(version for version in found if version >= (3, 10))
    for version in {known[0], known[-1]}:
        other = make_environment(str(wheel), python=found[version])
        assert other.said("penstock", "--version") == f"penstock {penstock.__version__}\n"
        other.said("python", "-c", PUT, PENSTOCK_POOL=f"file://{other.home}/pool")
