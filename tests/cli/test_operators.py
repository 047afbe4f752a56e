"""`penstock pool verify`, `export`, `import` and `warm`: what they print, and how they end."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.cli import main
from penstock.cli.prompts import Prompt, read_prompts
from penstock.errors import ConfigError
from penstock.pool.pace import Pace
from tests.clock import Clock
from tests.servers import Server
from tests.web import serving

PENSTOCK = str(Path(sys.executable).with_name("penstock"))


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"file://{tmp_path}/pool?size=64MiB"
    with penstock.open(url, namespace="docs") as pool:
        pool.put_many({f"key {number}": bytes([number]) * 1000 for number in range(20)})
    with penstock.open(url, namespace="other") as pool:
        pool.put("key", b"value")
    return url


def digest(name: str) -> str:
    return penstock.open("memory://?size=1MiB", namespace=name).namespace.hex()


def damage(tmp_path: Path) -> None:
    """Changes a byte of one value of 1000 bytes."""
    file = next(path for path in (tmp_path / "pool").rglob("*") if path.stat().st_size == 1064)
    raw = bytearray(file.read_bytes())
    raw[500] ^= 1
    file.write_bytes(raw)


def as_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


class TestVerify:
    def test_a_sound_pool(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["pool", "verify", url]) == 0
        shown = capsys.readouterr().out
        assert 'pool "docs"' in shown
        assert "No damage was found." in shown

    def test_damage_ends_with_1_until_it_is_removed(
        self, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        damage(tmp_path)
        assert main(["pool", "verify", url]) == 1
        shown = capsys.readouterr().out
        assert "payload_checksum 1" in shown
        assert "`--remove` removes them" in shown
        assert main(["pool", "verify", url, "--namespace", digest("other")[:8]]) == 0
        capsys.readouterr()
        assert main(["pool", "verify", url, "--remove", "--json"]) == 0
        (report,) = as_json(capsys)
        (docs,) = [one for one in report["namespaces"] if one["namespace"] == digest("docs")]
        assert docs["objects"] == 20
        assert (docs["sound"], docs["damaged"], docs["removed"]) == (19, 1, 1)
        assert docs["reasons"] == {"payload_checksum": 1}
        assert main(["pool", "verify", url]) == 0

    def test_each_tier_is_read(
        self,
        url: str,
        tmp_path: Path,
        redis_server: Server,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        damage(tmp_path)
        with penstock.open(redis_server.unix_url, namespace="far") as pool:
            pool.put("key", b"value")
        tiers = f"{url} {redis_server.unix_url}"
        assert main(["pool", "verify", tiers, "--json"]) == 1
        near, far = as_json(capsys)
        assert sum(one["damaged"] for one in near["namespaces"]) == 1
        assert digest("far") in [one["namespace"] for one in far["namespaces"]]
        assert main(["pool", "verify", tiers, "--json", "--namespace", digest("far")]) == 0
        near, far = as_json(capsys)
        assert (len(near["namespaces"]), len(far["namespaces"])) == (0, 1)

    def test_it_keeps_its_rate(
        self, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock(monkeypatch, "penstock.pool.pace")
        begin = clock.now
        assert main(["pool", "verify", url, "--rate", "100kB/s", "--sample", "50%", "--json"]) == 0
        assert clock.now - begin >= 0.1
        (report,) = as_json(capsys)
        assert [one["sound"] for one in report["namespaces"] if one["objects"] == 20] == [10]

    def test_a_terminal_gets_a_progress_bar(self, url: str) -> None:
        ours, theirs = pty.openpty()
        command = [PENSTOCK, "pool", "verify", url]
        with os.fdopen(theirs, "wb") as terminal:
            run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal)
        out, _ = run.communicate(timeout=60)
        assert run.returncode == 0
        assert b"verifying" in os.read(ours, 1 << 16)
        assert b"verifying" not in out
        os.close(ours)

    @pytest.mark.parametrize(
        "wrong",
        [
            ["--sample", "0"],
            ["--sample", "101%"],
            ["--sample", "half"],
            ["--rate", "fast"],
            ["--rate", "0/s"],
            ["--timeout", "never"],
        ],
    )
    def test_wrong_options_end_with_2(self, url: str, wrong: list[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["pool", "verify", url, *wrong])
        assert caught.value.code == 2

    def test_a_namespace_that_is_not_there_ends_with_2(
        self, url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["pool", "verify", url, "--namespace", "xyz"]) == 2
        assert "no namespace begins with 'xyz'" in capsys.readouterr().err


class TestArchives:
    def test_out_and_in(self, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file, into = str(tmp_path / "archive"), f"file://{tmp_path}/into?size=64MiB"
        assert main(["pool", "export", url, file]) == 0
        assert "Exported 21 values" in capsys.readouterr().out
        assert Path(file).stat().st_mode & 0o777 == 0o600
        assert main(["pool", "import", file, into, "--json"]) == 0
        report = as_json(capsys)
        assert (report["values"], report["stored"], report["damaged"]) == (21, 21, 0)
        with penstock.open(into, namespace="docs") as pool:
            assert pool.get("key 7") == bytes([7]) * 1000
        assert main(["pool", "import", file, into]) == 0
        assert "21 are in the pool already" in capsys.readouterr().out

    def test_chosen_namespaces(
        self, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = str(tmp_path / "archive")
        one, other = (f"--namespace={digest(name)[:9]}" for name in ("docs", "other"))
        assert main(["pool", "export", url, file, one, "--json"]) == 0
        report = as_json(capsys)
        assert report["values"] == 20
        assert [each["description"]["name"] for each in report["namespaces"]] == ["docs"]
        assert main(["pool", "export", url, f"{file}2", one, other, "--json"]) == 0
        assert as_json(capsys)["values"] == 21

    def test_dry_runs_write_nothing(
        self, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file, into = tmp_path / "archive", f"file://{tmp_path}/into?size=64MiB"
        assert main(["pool", "export", url, str(file), "--dry-run", "--json"]) == 0
        assert as_json(capsys)["objects"] == 21
        assert not file.exists()
        assert main(["pool", "export", url, str(file)]) == 0
        assert main(["pool", "import", str(file), into, "--dry-run"]) == 0
        assert "21 would be stored" in capsys.readouterr().out
        with penstock.open(into) as pool:
            assert pool.namespaces() == []

    def test_through_a_pipe(self, url: str, tmp_path: Path) -> None:
        into = f"file://{tmp_path}/into?size=64MiB"
        out = subprocess.run(
            [PENSTOCK, "pool", "export", url, "-"], capture_output=True, check=True
        )
        assert b"Exported 21 values" in out.stderr
        read = subprocess.run(
            [PENSTOCK, "pool", "import", "-", into], input=out.stdout, capture_output=True
        )
        assert (read.returncode, read.stderr) == (0, b"")
        assert b"21 were stored" in read.stdout
        cut = subprocess.run(
            [PENSTOCK, "pool", "import", "-", into.replace("into", "cut")],
            input=out.stdout[:-100],
            capture_output=True,
        )
        assert cut.returncode == 1
        assert b"penstock: the archive is cut off after" in cut.stderr
        assert cut.stderr.count(b"\n") == 1

    def test_no_half_file_is_left(
        self, redis_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with penstock.open(redis_server.unix_url) as pool:
            pool.put("key", b"value")
        assert main(["pool", "export", redis_server.unix_url, str(tmp_path / "no/file")]) == 2
        assert "there is no folder" in capsys.readouterr().err
        redis_server.kill()
        folder = tmp_path / "folder"
        folder.mkdir()
        assert main(["pool", "export", redis_server.unix_url, str(folder / "file")]) == 1
        assert list(folder.iterdir()) == []

    def test_what_is_refused(
        self, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        there = tmp_path / "there"
        there.write_text("something else")
        for arguments, status, words in [
            (["export", url, str(there)], 2, "is there already"),
            (["export", f"{url} {url}", str(tmp_path / "x")], 2, "one tier"),
            (["export", "nonsense", str(tmp_path / "x")], 2, "not a pool URL"),
            (["import", str(there), url], 1, "not an archive of a pool"),
            (["import", str(tmp_path / "absent"), url], 2, "is no file"),
            (["import", str(there), " "], 2, "URL is empty"),
            (["import", str(tmp_path), url], 2, "is no file"),
        ]:
            assert main(["pool", *arguments]) == status
            assert words in capsys.readouterr().err
        assert there.read_text() == "something else"


class Vllm(BaseHTTPRequestHandler):
    """What answers as a server would: it refuses prompts that are too long, and may break off."""

    stored = 0
    asked: list[dict[str, Any]]
    is_gone = False

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.answer({"count": len(body["prompt"].split())})
            return
        if self.is_gone:
            self.connection.close()
            return
        self.asked.append(body)
        tokens = len(body["prompt"])
        if tokens > 50:
            self.answer({"error": {"message": "too long"}}, 400)
            return
        if body not in self.asked[:-1]:
            type(self).stored += 1
        usage = {
            "prompt_tokens": tokens,
            "completion_tokens": 1,
            "total_tokens": tokens + 1,
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        chunk = {"id": "1", "object": "text_completion", "choices": [], "usage": usage}
        self.answer(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    def do_GET(self) -> None:
        self.answer(f'vllm:penstock_stored_blocks_total{{engine="0"}} {self.stored}\n')

    def answer(self, content: Any, status: int = 200) -> None:
        is_text = isinstance(content, str)
        data = (content if is_text else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/event-stream" if is_text else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


class TestWarm:
    @pytest.fixture
    def vllm(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[Vllm], str]]:
        monkeypatch.setattr("penstock.cli.pool_warm._QUIET_SECONDS", 0.1)
        monkeypatch.setattr("penstock.cli.pool_warm._POLL_SECONDS", 0.05)
        monkeypatch.delenv("HTTP_PROXY", raising=False)
        handler = type("Own", (Vllm,), {"asked": []})
        with serving(handler) as port:
            yield handler, f"127.0.0.1:{port}"

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        lines: list[Any] = [
            list(range(10)),
            "a text of five words",
            {"prompt": [1, 2, 3, 4, 5], "model": "adapter", "cache_salt": "its", "tenant": "red"},
            list(range(10)),
            list(range(60)),
        ]
        file = tmp_path / "prompts.jsonl"
        file.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
        return file

    def test_a_dry_run_counts(
        self,
        file: Path,
        vllm: tuple[type[Vllm], str],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        handler, address = vllm
        assert main(["pool", "warm", str(file), address, "--dry-run"]) == 0
        assert capsys.readouterr().out == "4 prompts, 80 tokens. None was sent.\n"
        assert handler.asked == []

    def test_each_prompt_is_sent_once_for_one_token(
        self,
        file: Path,
        vllm: tuple[type[Vllm], str],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        handler, address = vllm
        options = ["--model", "m", "--concurrency", "1", "--json"]
        assert main(["pool", "warm", str(file), f"http://{address}", *options]) == 1
        warmed = as_json(capsys)
        assert (warmed["prompts"], warmed["answered"], warmed["refused"]) == (4, 3, 1)
        assert (warmed["prompt_tokens"], warmed["cached_tokens"]) == (10 + 20 + 5, 12)
        assert (warmed["stored_blocks"], warmed["stores_lost"]) == (3, 0)
        assert "too long" in warmed["refusals"][0]
        sent, again = handler.asked[:4], handler.asked[4:]
        assert {asked["max_tokens"] for asked in sent} == {1}
        assert [asked["model"] for asked in sent] == ["m", "m", "adapter", "m"]
        salts = [asked.get("cache_salt") for asked in sent]
        assert salts == [None, None, "its", None]
        params = [asked.get("kv_transfer_params") for asked in sent]
        assert params == [None, None, {"penstock.tenant": "red"}, None]
        # So that the server counts to the end.
        assert again
        assert all(asked == sent[2] for asked in again)

    def test_what_is_cached_does_not_count_for_the_rate(
        self, tmp_path: Path, vllm: tuple[type[Vllm], str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, address = vllm
        spent: list[float] = []
        spend = Pace.spend

        def record(pace: Pace, amount: float) -> None:
            spent.append(amount)
            spend(pace, amount)

        monkeypatch.setattr(Pace, "spend", record)
        file = tmp_path / "prompts.jsonl"
        file.write_text("\n".join(json.dumps([number] * 5) for number in range(10)))
        clock = Clock(monkeypatch, "penstock.pool.pace")
        begin = clock.now
        assert main(["pool", "warm", str(file), address, "--rate", "20/s"]) == 0
        # Of five tokens each, four are cached.
        assert spent == [1] * 10
        assert clock.now - begin == pytest.approx(0.5)

    def test_files_that_are_refused_before_anything_is_sent(
        self,
        tmp_path: Path,
        vllm: tuple[type[Vllm], str],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        handler, address = vllm
        (tmp_path / "half").write_text("[1, 2]\nnonsense\n")
        for name, status, words in [
            ("half", 2, "half, line 2: "),
            ("absent", 2, "No such file"),
            (".", 2, "give a regular file"),
            ("/dev/null", 2, "give a regular file"),
        ]:
            assert main(["pool", "warm", str(tmp_path / name), address]) == status
            assert words in capsys.readouterr().err
        assert handler.asked == []

    def test_a_server_that_goes_away_ends_with_1(
        self,
        file: Path,
        vllm: tuple[type[Vllm], str],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        handler, address = vllm
        handler.is_gone = True
        assert main(["pool", "warm", str(file), address]) == 1
        assert f"penstock: the server at http://{address} broke off" in capsys.readouterr().err

    def test_a_server_without_a_pool_ends_with_2(
        self,
        file: Path,
        vllm: tuple[type[Vllm], str],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        handler, address = vllm
        monkeypatch.setattr(handler, "do_GET", lambda self: self.answer("up 1\n"))
        assert main(["pool", "warm", str(file), address]) == 2
        assert "has no pool" in capsys.readouterr().err
        assert handler.asked == []


class TestPrompts:
    def test_forms(self, tmp_path: Path) -> None:
        file = tmp_path / "prompts"
        file.write_text(
            '"text"\n[1, 2]\n{"prompt": "text"}\n{"prompt": "text", "model": "m"}\n'
            '{"prompt": "text", "tenant": "red"}\n{"prompt": "text", "x": 1}\n'
        )
        assert list(read_prompts(file)) == [
            Prompt("text"),
            Prompt((1, 2)),
            Prompt("text", "m"),
            Prompt("text", tenant="red"),
        ]

    @pytest.mark.parametrize(
        "line",
        [
            *("{", "1", "null", "{}", "[]", '""', "[1, true]", "[-1]", '{"prompt": 5}', "[[1]]"),
            *('{"prompt": "a", "tenant": 5}', '{"prompt": "a", "tenant": "not a name"}'),
            *('{"prompt": "a", "model": 5}', '{"prompt": "a", "cache_salt": []}', "[" * 100_000),
            '"\\ud800"',
        ],
    )
    def test_a_line_that_is_no_prompt_is_named(self, tmp_path: Path, line: str) -> None:
        file = tmp_path / "prompts"
        file.write_text(f'"text"\n{line}\n')
        with pytest.raises(ConfigError, match="line 2"):
            list(read_prompts(file))

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="No such file"):
            list(read_prompts(tmp_path / "absent"))
        (tmp_path / "binary").write_bytes(b"\xff\xfe")
        with pytest.raises(ConfigError, match="not UTF-8"):
            list(read_prompts(tmp_path / "binary"))
