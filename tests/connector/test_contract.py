"""The contract with vLLM's inside: the installed one keeps it, and what differs is named."""

from __future__ import annotations

import ast
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.errors import ConfigError
from penstock.vllm.compat import contract, versions
from penstock.vllm.compat.contract import Sources
from penstock.vllm.compat.uses import Use

HERE = Path(contract.__file__).parent.parent
INSTALLED = contract.installed_package()
assert INSTALLED is not None
VERSION = Sources(INSTALLED).version
assert VERSION is not None
USES = (*contract.USES, *versions.differences(VERSION).USES)


def violations(package: Path) -> list[str]:
    return versions.violations(package, str(VERSION))


def test_the_installed_vllm_keeps_it() -> None:
    assert violations(INSTALLED) == []


def imported() -> Iterator[tuple[str, str]]:
    """What is imported from vLLM, for the installed version."""
    for path in HERE.rglob("*.py"):
        if path.stem.startswith("vllm_0_"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    yield str(node.module), alias.name


def test_every_import_from_vllm_is_in_it() -> None:
    covered = {(use.module, use.name.partition(".")[0]) for use in USES}
    modules = {use.module for use in USES}
    missing = {
        (module, name)
        for module, name in imported()
        if (module, name) not in covered and f"{module}.{name}" not in modules
    }
    assert missing == set()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the installed vLLM that the contract is about."""
    package = tmp_path_factory.mktemp("whole") / "vllm"
    sources = Sources(INSTALLED)
    for use in USES:
        sources.find(use.module, use.name)
    for module in sources._files:
        path = INSTALLED.joinpath(*module.split(".")[1:])
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if path.is_file():
            to = package / path.relative_to(INSTALLED)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_text(path.read_text())
    (package / "__init__.py").touch()
    assert violations(package) == []
    return package


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """A copy of them, to be changed."""
    return shutil.copytree(whole, tmp_path / "vllm")


BASE = "distributed/kv_transfer/kv_connector/v1/base.py"


@pytest.mark.parametrize(
    ("file", "before", "after", "says"),
    [
        (
            "v1/core/kv_cache_utils.py",
            "def get_max_concurrency_for_kv_cache_config(",
            "def get_max_concurrency(",
            "vllm.v1.core.kv_cache_utils.get_max_concurrency_for_kv_cache_config is not there",
        ),
        (
            "distributed/utils.py",
            "    num_hidden_layers: int, pp_rank: int, pp_size: int\n",
            "    num_hidden_layers: int, pp_rank: int, pp_size: int, how: str\n",
            "get_pp_indices takes (num_hidden_layers, pp_rank, pp_size, how); it is given",
        ),
        (
            "v1/engine/core.py",
            "def add_lora(self, lora_request: LoRARequest)",
            "def add_lora(self, lora_request: LoRARequest, pin: bool = False)",
            "EngineCore.add_lora takes (lora_request, pin); (lora_request) is known",
        ),
        (
            BASE,
            "def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata)",
            "def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata, step: int)",
            "handle_preemptions takes (self, kv_connector_metadata, step)",
        ),
        (BASE, "    def on_new_request(self", "    def on_request(self", "has no on_new_request"),
        (
            BASE,
            "    def finish_forward(self)",
            "    @abstractmethod\n    def finish_forward(self)",
            "wants finish_forward, which the connector does not have",
        ),
        (
            "v1/request.py",
            "        self.lora_request = lora_request\n",
            "        self.adapter = lora_request\n",
            "vllm.v1.request.Request.lora_request is not there",
        ),
        (
            "v1/core/sched/output.py",
            "    preempted_req_ids:",
            "    preempted_ids:",
            "SchedulerOutput.preempted_req_ids is not there",
        ),
    ],
)
def test_what_differs_is_named(file: str, before: str, after: str, says: str, copied: Path) -> None:
    content = (copied / file).read_text()
    assert content.count(before) == 1
    (copied / file).write_text(content.replace(before, after))
    (said,) = violations(copied)
    assert says in said


def test_names_are_followed_through_imports(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "outer.py").write_text("from vllm.inner import moved as kept\n")
    (package / "inner" / "__init__.py").write_text("from .place import moved\n")
    (package / "inner" / "place.py").write_text(
        "try:\n    from fast import moved\nexcept ImportError:\n    pass\n"
        "def moved(a, *, b=1): ...\n"
    )
    found = Sources(package).find("vllm.outer", "kept")
    assert isinstance(found, ast.FunctionDef)
    assert contract._mismatch(found, ("a",), exactly=False) is None
    assert contract._mismatch(found, ("a",), exactly=True) == "takes (a, b); (a) is known"


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("0.29.0", "Vllm030"),
        ("0.30.1+cpu", "Vllm030"),
        ("0.31.0", "Vllm030"),
        ("0.32.0+cpu", "Vllm032"),
        ("0.33.0", "Vllm033"),
        ("1.2.0", "Vllm033"),
        ("unknown", "Vllm033"),
    ],
)
def test_a_version_has_the_newest_class_not_after_it(version: str, name: str) -> None:
    assert type(versions.differences(version)).__name__ == name


def test_an_unknown_newer_version_starts_with_a_warning_if_it_keeps_the_contract(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import vllm

    versions.check_version()
    assert not caplog.text
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setattr(versions, "_violations", lambda version: ())
    with caplog.at_level(logging.WARNING):
        versions.check_version()
    assert "found 0.99.0, which has all that Penstock uses, but was not tried" in caplog.text
    monkeypatch.setattr(versions, "_violations", lambda version: ("vllm.a.b is not there",))
    with pytest.raises(ConfigError, match=r"found 0\.99\.0, which differs .*vllm\.a\.b is not"):
        versions.check_version()
    monkeypatch.setattr(vllm, "__version__", "0.9.0")
    with pytest.raises(ConfigError, match=r"found 0\.9\.0; install one of these"):
        versions.check_version()


def test_a_name_that_nobody_has_is_missed() -> None:
    wrong = contract.violations(INSTALLED, (Use("vllm.v1.nothing", "here"),))
    assert wrong == ["vllm.v1.nothing.here is not there"]


def test_doctor_says_it(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--vllm", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"version": VERSION, "is_tested": True, "violations": []}
    (copied / "distributed" / "utils.py").write_text("")
    assert main(["doctor", "--vllm", str(copied.parent)]) == 1
    assert "✗ vllm.distributed.utils.get_pp_indices is not there" in capsys.readouterr().out
    assert main(["doctor", "--vllm", str(copied / "v1")]) == 2
    assert "there is no vLLM in" in capsys.readouterr().err
