"""`penstock doctor`, `pool` and `bench` against real stores."""

from __future__ import annotations

import ctypes.util
import io
import json
import os
import pty
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock
from penstock.cli import cuda_copies, main
from penstock.cli.main import COMMANDS
from tests.servers import Server


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/pool?size=64MiB"


def as_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


class TestMain:
    def test_the_installed_program_runs(self) -> None:
        program = Path(sys.executable).with_name("penstock")
        shown = subprocess.run([program, "--help"], capture_output=True, text=True, check=True)
        for command in COMMANDS:
            assert re.search(rf"^    {command}( |$)", shown.stdout, re.MULTILINE)

    def test_the_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["--version"])
        assert caught.value.code == 0
        assert penstock.__version__ in capsys.readouterr().out

    def test_without_what_vllm_brings_only_what_needs_it_fails(self, tmp_path: Path) -> None:
        for name in ("openai", "prometheus_client", "psutil", "pydantic", "torch", "vllm"):
            (tmp_path / f"{name}.py").write_text(
                f"raise ModuleNotFoundError({name!r}, name={name!r})"
            )
        environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            program = Path(sys.executable).with_name("penstock")
            return subprocess.run(
                [program, *arguments], capture_output=True, text=True, env=environment
            )

        assert run("doctor", f"file://{tmp_path}/pool?size=64MiB").returncode == 0
        for command in ("plan", "serve"):
            assert run(command, "--help").returncode == 0
        serve = run("serve", "model", "--pool", "file:///tmp/pool", "--dry-run")
        assert serve.returncode == 1
        assert serve.stderr.startswith("penstock: `penstock serve` needs pydantic, which vLLM")
        assert serve.stderr.count("\n") == 1

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["nonsense"],
            ["doctor", "memory://?size=1MiB", "--nonsense"],
            ["doctor", "memory://?size=1MiB", "--timeout", "-1"],
            ["pool"],
            ["pool", "paint", "memory://?size=1MiB"],
            ["bench", "pool", "memory://?size=1MiB", "--size", "lots"],
            ["bench", "pool", "memory://?size=1MiB", "--size", "0"],
            ["bench", "pool", "memory://?size=1MiB", "--threads", "0"],
        ],
    )
    def test_wrong_usage_ends_with_2(self, arguments: list[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2

    @pytest.mark.parametrize("url", ["nonsense", "valkey://user:hush@", "memory://"])
    def test_a_wrong_url_ends_with_2(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        for arguments in (["doctor"], ["pool", "ls"], ["bench", "pool"]):
            assert main([*arguments, url]) == 2
            shown = capsys.readouterr()
            assert shown.err.startswith("penstock: ")
            assert "hush" not in shown.err

    def test_the_environment_may_name_the_pool(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delenv("PENSTOCK_POOL", raising=False)
        assert main(["pool", "ls"]) == 2
        assert "PENSTOCK_POOL" in capsys.readouterr().err
        monkeypatch.setenv("PENSTOCK_POOL", "memory://?size=1MiB")
        assert main(["pool", "ls"]) == 0

    def test_an_absent_server_ends_with_1(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        url = f"unix://{tmp_path}/absent.sock"
        for arguments in (["doctor"], ["pool", "ls"], ["pool", "purge"], ["bench", "pool"]):
            assert main([*arguments, url]) == 1
            shown = capsys.readouterr()
            assert "absent.sock" in shown.out + shown.err


class TestDoctor:
    @pytest.mark.skipif(
        ctypes.util.find_library("cuda") is not None, reason="there is a CUDA driver"
    )
    def test_copies_of_a_device_that_is_not_there(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["doctor", "--cuda-device", "0"]) == 1
        assert "no usable CUDA driver: libcuda" in capsys.readouterr().err

    def test_copies_of_a_device(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        piece = partial(SimpleNamespace, piece_bytes=4096)
        found = SimpleNamespace(
            copy_bytes=2 << 20,
            gather=SimpleNamespace(
                copy_engine_from=20_000,
                pieces=[piece(copy_engine_seconds=4e-4, kernel_seconds=1e-4)],
            ),
            scatter=SimpleNamespace(
                copy_engine_from=30_000,
                pieces=[piece(copy_engine_seconds=2e-4, kernel_seconds=5e-5)],
            ),
        )
        monkeypatch.setattr(cuda_copies, "cuda_calibration", lambda device: found)
        assert main(["doctor", "--cuda-device", "1"]) == 0
        shown = capsys.readouterr().out
        assert "gather: copy engines from 19.53 KiB a piece" in shown
        assert main(["doctor", "--cuda-device", "1", "--json"]) == 0
        scatter = as_json(capsys)["scatter"]
        assert scatter["copy_engine_from"] == 30_000
        assert scatter["rows"] == [
            {
                "piece_bytes": 4096,
                "copy_engine_gb_s": pytest.approx((2 << 20) / 2e-4 / 1e9),
                "kernel_gb_s": pytest.approx((2 << 20) / 5e-5 / 1e9),
            }
        ]

    def test_a_server_as_it_comes(
        self, redis_server: Server, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["doctor", redis_server.unix_url]) == 0
        shown = capsys.readouterr().out
        assert "CONFIG SET maxmemory-policy allkeys-lru" in shown
        assert "can serve; 2 things should be changed" in shown
        with penstock.open(redis_server.unix_url) as pool:
            assert pool.namespaces() == []

    def test_its_advice_is_taken(
        self, valkey_server: Server, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["doctor", valkey_server.unix_url, "--json"]) == 0
        for finding in as_json(capsys)["findings"]:
            if finding["advice"].startswith("CONFIG SET"):
                assert valkey_server.command(*finding["advice"].split()) == b"+OK\r\n"
        assert main(["doctor", valkey_server.unix_url, "--json"]) == 0
        report = as_json(capsys)
        assert not [one for one in report["findings"] if one["level"] in ("warn", "fail")]
        assert "Valkey" in report["findings"][0]["message"]
        for measured in ("round_trip_ms", "put_mib_s", "get_mib_s"):
            assert report[measured] > 0

    def test_a_directory(self, file_url: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["doctor", file_url]) == 0
        shown = capsys.readouterr().out
        assert "file system" in shown
        assert "This pool can serve." in shown

    def test_tiers_are_examined_each(
        self, redis_server: Server, file_url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["doctor", f"{file_url} {redis_server.unix_url}", "--json"]) == 0
        near, far = as_json(capsys)["tiers"]
        assert any(one["check"] == "capacity" for one in near["findings"])
        assert any(one["check"] == "eviction" for one in far["findings"])
        assert near["can_serve"] is far["can_serve"] is True
        redis_server.kill()
        assert main(["doctor", f"{file_url} {redis_server.unix_url}", "--json"]) == 1
        report = as_json(capsys)
        assert [tier["can_serve"] for tier in report["tiers"]] == [True, False]

    def test_a_full_server_cannot_serve(
        self, redis_server: Server, capsys: pytest.CaptureFixture[str]
    ) -> None:
        redis_server.command("CONFIG", "SET", "maxmemory", "1mb")
        assert main(["doctor", redis_server.unix_url, "--json"]) == 1
        report = as_json(capsys)
        failed = {
            one["check"]: one["advice"] for one in report["findings"] if one["level"] == "fail"
        }
        assert "allkeys-lru" in failed["put"]
        assert report["can_serve"] is False

    def test_a_frozen_server_cannot_serve(
        self, redis_server: Server, capsys: pytest.CaptureFixture[str]
    ) -> None:
        redis_server.freeze()
        assert main(["doctor", redis_server.unix_url, "--timeout", "0.2"]) == 1
        assert "cannot serve" in capsys.readouterr().out

    def test_missing_rights_are_named(
        self, redis_server: Server, capsys: pytest.CaptureFixture[str]
    ) -> None:
        redis_server.command("ACL", "SETUSER", "reader", "on", ">hush", "~*", "+@all", "-set")
        url = redis_server.tcp_url.replace("://", "://reader:hush@")
        assert main(["doctor", url]) == 1
        shown = capsys.readouterr().out
        assert "+set" in shown
        assert "hush" not in shown

    def test_a_server_that_hides_its_state_may_serve(
        self, redis_server: Server, capsys: pytest.CaptureFixture[str]
    ) -> None:
        redis_server.command("ACL", "SETUSER", "engine", "on", ">hush", "~*", "+@all", "-info")
        url = redis_server.tcp_url.replace("://", "://engine:hush@")
        assert main(["doctor", url, "--json"]) == 0
        assert any(one["check"] == "settings" for one in as_json(capsys)["findings"])


class TestPool:
    @pytest.fixture
    def filled(self, file_url: str) -> str:
        with penstock.open(file_url, namespace="docs") as pool:
            pool.put_many({f"key {i}": bytes(1000) for i in range(20)})
        engine = {"model": "Qwen/Qwen3-8B", "kv_dtype": "torch.bfloat16", "block_size": 128}
        with penstock.open(file_url, namespace=engine) as pool:
            pool.put("block", bytes(5000))
        return file_url

    def test_ls(self, filled: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["pool", "ls", filled]) == 0
        shown = capsys.readouterr().out
        assert 'pool "docs"' in shown
        assert "model Qwen/Qwen3-8B, KV bfloat16, blocks of 128 tokens" in shown
        assert main(["pool", "ls", filled, "--json"]) == 0
        listed = {one["objects"]: one for one in as_json(capsys)}
        assert listed[20]["bytes"] == 20 * 1064
        assert listed[20]["description"] == {"kind": "pool", "name": "docs"}
        assert listed[20]["namespace"] in shown

    def test_stats(self, filled: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["pool", "stats", filled]) == 0
        assert "objects" in capsys.readouterr().out
        assert main(["pool", "stats", filled, "--json"]) == 0
        stats = as_json(capsys)
        assert (stats["namespaces"], stats["objects"]) == (3, 23)
        assert stats["store"]["capacity_bytes"] == str(64 << 20)

    def test_an_empty_pool(self, file_url: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["pool", "ls", file_url]) == 0
        assert "empty" in capsys.readouterr().out
        assert main(["pool", "purge", file_url]) == 0

    def test_purge_does_not_guess(
        self, filled: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n"))
        assert main(["pool", "purge", filled]) == 2
        assert "--yes" in capsys.readouterr().err
        for beginning in ("", "xyz"):
            assert main(["pool", "purge", filled, "--namespace", beginning, "--yes"]) == 2
        with penstock.open(filled, namespace="docs") as pool:
            assert len(pool.list()) == 20

    @pytest.mark.parametrize(("answer", "left"), [("no", 20), ("y", 20), ("yes", 0)])
    def test_purge_asks(
        self, filled: str, monkeypatch: pytest.MonkeyPatch, answer: str, left: int
    ) -> None:
        ours, theirs = pty.openpty()
        with os.fdopen(theirs) as terminal, os.fdopen(ours, "wb", buffering=0) as keyboard:
            keyboard.write(f"{answer}\n".encode())
            monkeypatch.setattr(sys, "stdin", terminal)
            assert main(["pool", "purge", filled]) == (0 if left == 0 else 1)
        with penstock.open(filled, namespace="docs") as pool:
            assert len(pool.list()) == left

    def test_purge_of_one_namespace(self, filled: str, capsys: pytest.CaptureFixture[str]) -> None:
        with penstock.open(filled, namespace="docs") as pool:
            digest = pool.namespace.hex()
        arguments = ["pool", "purge", filled, "--namespace", digest[:12].upper(), "--yes", "--json"]
        assert main(arguments) == 0
        assert as_json(capsys)["removed"] == 21
        assert main(["pool", "ls", filled, "--json"]) == 0
        left = as_json(capsys)
        assert digest not in [one["namespace"] for one in left]
        assert sum(one["objects"] for one in left) == 2

    def test_purge_of_everything(self, filled: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["pool", "purge", filled, "--yes"]) == 0
        assert "Removed 23 objects" in capsys.readouterr().out
        assert main(["pool", "ls", filled, "--json"]) == 0
        assert as_json(capsys) == []


class TestBench:
    def test_figures(self, pool_url: str, capsys: pytest.CaptureFixture[str]) -> None:
        sizes = ["--size", "4KiB,64KiB", "--total", "2MiB", "--threads", "2", "--passes", "2"]
        assert main(["bench", "pool", pool_url, *sizes, "--json"]) == 0
        document = as_json(capsys)
        assert [row["size"] for row in document["rows"]] == [4096, 65536]
        for row in document["rows"]:
            assert row["values"] * row["size"] == 2 << 20
            assert row["misses"] == 0
            for figure in ("put_mib_s", "get_mib_s", "put_p50_ms", "get_p50_ms"):
                assert row[figure] > 0
            assert row["put_p50_ms"] <= row["put_p99_ms"]
            assert row["get_p50_ms"] <= row["get_p99_ms"]

    def test_a_table_and_nothing_left(
        self, file_url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["bench", "pool", file_url, "--size", "64KiB", "--total", "1MiB"]) == 0
        assert "64 KiB" in capsys.readouterr().out
        with penstock.open(file_url) as pool:
            assert pool.namespaces() == []

    def test_a_pool_too_small_is_told(self, capsys: pytest.CaptureFixture[str]) -> None:
        url = "memory://?size=1MiB"
        arguments = ["--size", "64KiB", "--total", "4MiB", "--passes", "1"]
        assert main(["bench", "pool", url, *arguments]) == 0
        assert "no room" in capsys.readouterr().out
