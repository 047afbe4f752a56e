"""The server over HTTP: answers, refusals, token, TLS, limits, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.pretended import BLOCK, Engine, hashes
from lab.processes import free_port
from lab.waiting import LIMIT, eventually_async
from penstock._native import Store
from penstock.lookup import Service
from penstock.lookup.http import Application
from penstock.lookup.service import Limits, Settings
from penstock.lookup.short import read_plain
from penstock.lookup.tokenizing import Tokenizers

CALL = "import sys; from penstock.cli import main; sys.exit(main())"
TOKEN = "open-sesame"
PROMPT = list(range(3 * BLOCK + 1))


class Running:
    """`penstock lookup-server` in a process of its own."""

    def __init__(self, *arguments: str, token: str | None = None) -> None:
        command = [sys.executable, "-c", CALL, "lookup-server", *arguments]
        environment = os.environ | ({} if token is None else {"PENSTOCK_LOOKUP_TOKEN": token})
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        text = ""
        while not text.endswith("\n}\n"):
            line = self.process.stdout.readline()
            assert line, self.process.communicate()[1]
            text += line
        self.said = json.loads(text)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def ask(
        self,
        path: str = "/lookup",
        body: Any = None,
        *,
        token: str | None = None,
        context: ssl.SSLContext | None = None,
    ) -> tuple[int, Any]:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(self.said["url"] + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=LIMIT, context=context) as answer:
                return answer.status, _content(answer)
        except urllib.error.HTTPError as error:
            return error.code, _content(error)

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Exit status and standard error."""
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, said


def _content(answer: Any) -> Any:
    text = answer.read().decode()
    return json.loads(text) if "json" in answer.headers["content-type"] else text


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"file://{tmp_path_factory.mktemp('pool')}/pool?size=64MiB"
    engine = Engine(Store.open(url))
    engine.put(hashes(PROMPT)[:2])
    return url


@pytest.fixture(scope="module")
def server(pool: str) -> Iterator[Running]:
    with Running(pool) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(pool: str) -> Iterator[Running]:
    with Running(pool, token=TOKEN) as running:
        yield running


def test_a_look_up(server: Running, pool: str) -> None:
    assert server.said["models"] == ["llama"]
    status, found = server.ask(body={"model": "llama-served", "prompt": PROMPT})
    assert status == 200
    [in_pool] = found.pop("pools")
    assert found == {"model": "llama-served", "prompt_tokens": len(PROMPT)}
    assert (in_pool["tokens"], in_pool["block_size"]) == (2 * BLOCK, BLOCK)
    assert pool.startswith(in_pool["url"].partition("?")[0])
    status, found = server.ask(body={"model": "llama", "prompt": PROMPT, "cache_salt": "mine"})
    assert (status, found["pools"][0]["tokens"]) == (200, 0)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 400, "no JSON"),
        (b"{", 400, "no JSON"),
        (b"[" * 100_000, 400, "no JSON object"),
        (b"\xff\xfe", 400, "no JSON"),
        ([1], 400, "no JSON object"),
        ({}, 400, "missing field `model`"),
        ({"model": 7, "prompt": []}, 400, "model: invalid type"),
        ({"model": "llama"}, 400, "missing field `prompt`"),
        ({"model": "llama", "prompt": {"ids": []}}, 400, "a list of token ids, or text"),
        ({"model": "llama", "prompt": [1, "2"]}, 400, "prompt[1]: invalid type"),
        ({"model": "llama", "prompt": [1, True]}, 400, "prompt[1]: invalid type"),
        ({"model": "llama", "prompt": [-1]}, 400, "prompt[0]: invalid value"),
        ({"model": "llama", "prompt": [2**31] * BLOCK}, 400, "token 2147483648"),
        ({"model": "llama", "prompt": [1] * (1 << 18) + [1]}, 400, "262144 tokens"),
        ({"model": "llama", "prompt": [1], "cache_salt": 7}, 400, "cache_salt: invalid type"),
        (b'{"model": "llama", "prompt": [1], "cache_salt": "\\ud800"}', 400, "no JSON"),
        (b'{"model": "llama", "prompt": [1], "cache_salt": "\\udc00"}', 400, "no JSON"),
        ({"model": "llama", "prompt": [1], "cache_salt": "s" * 20_000}, 400, "16384 bytes"),
        ({"model": "llama", "prompt": [1], "lora": {"name": "a"}}, 400, "missing field `path`"),
        ({"model": "llama", "prompt": [1], "lora": ["a", "b", "c"]}, 400, "an object of name"),
        ({"model": "llama", "prompt": [1], "lora": "a"}, 400, "--adapter"),
        ({"model": "llama", "prompt": [1], "tenant": "../x"}, 400, "1 to 64 letters"),
        ({"model": "llama", "prompt": [1], "n": 1}, 400, "unknown field `n`"),
        ({"model": "gpt", "prompt": [1]}, 404, "they describe llama, llama-served"),
        ({"model": "llama", "prompt": "text"}, 422, "send token ids"),
    ],
)
def test_what_is_no_look_up_is_refused(server: Running, body: Any, status: int, says: str) -> None:
    found, answer = server.ask(body=body)
    assert (found, says in answer["error"]) == (status, True), answer


@pytest.mark.parametrize(
    "request_text",
    [
        "Content-Length: 8388609\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\n800001\r\n" + "1" * 0x800001,
    ],
)
def test_a_body_that_is_too_long_is_not_read(server: Running, request_text: str) -> None:
    port = int(server.said["url"].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as client:
        head = b"POST /lookup HTTP/1.1\r\nHost: here\r\n"
        with contextlib.suppress(ConnectionError):
            # The server need not take all of it.
            client.sendall(head + request_text.encode())
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [("/nothing", None, 404), ("/lookup", None, 405), ("/health", {}, 405)],
)
def test_other_paths_and_methods(server: Running, path: str, body: Any, status: int) -> None:
    assert server.ask(path, body)[0] == status


def test_health_models_and_metrics(server: Running) -> None:
    assert server.ask("/health") == (200, {"ok": True})
    server.ask(body={"model": "llama", "prompt": PROMPT})
    status, models = server.ask("/models")
    assert (status, models["refused"]) == (200, {})
    assert models["models"][0]["names"] == ["llama", "llama-served"]
    status, text = server.ask("/metrics")
    assert status == 200
    for name in (
        'penstock_lookup_requests_total{status="200"}',
        "penstock_lookup_seconds_bucket",
        "penstock_lookup_index_blocks{",
        "penstock_lookup_pool_blocks_total{",
        "penstock_lookup_models 1.0",
    ):
        assert name in text


def answers(connection: socket.socket, pieces: list[bytes], count: int) -> list[tuple[int, Any]]:
    """Sends the pieces one by one, and reads so many answers."""
    for piece in pieces:
        connection.sendall(piece)
        time.sleep(0.002)
    found = []
    with connection.makefile("rb") as reader:
        while len(found) < count:
            status = int(reader.readline().split()[1])
            headers = http.client.parse_headers(reader)
            if status != 100:
                body = reader.read(int(headers["content-length"]))
                assert headers["content-type"] == "application/json"
                found.append((status, json.loads(body)))
    return found


BODY = json.dumps({"model": "llama", "prompt": PROMPT}).encode()
PLAIN = b"POST /lookup HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n" % len(BODY)
WHOLE = PLAIN + b"\r\n" + BODY
CHUNKED = b"POST /lookup HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED += b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize(
    ("pieces", "count"),
    [
        ([WHOLE], 1),
        ([WHOLE, WHOLE, WHOLE], 3),
        ([WHOLE + WHOLE], 2),
        ([WHOLE + WHOLE[:9], WHOLE[9:], WHOLE], 3),
        ([PLAIN + b"\r\n", BODY, WHOLE], 2),
        ([WHOLE[:50], WHOLE[50:200], WHOLE[200:], WHOLE], 2),
        ([CHUNKED, WHOLE, CHUNKED], 3),
        ([CHUNKED[:100], CHUNKED[100:] + WHOLE], 2),
        ([PLAIN + b"Connection: keep-alive\r\n\r\n" + BODY, WHOLE], 2),
        ([PLAIN + b"Expect: 100-continue\r\n\r\n", BODY, WHOLE], 2),
    ],
)
def test_requests_are_answered_however_they_come(
    server: Running, pieces: list[bytes], count: int
) -> None:
    port = int(server.said["url"].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as connection:
        for status, found in answers(connection, pieces, count):
            assert (status, found["pools"][0]["tokens"]) == (200, 2 * BLOCK)


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (WHOLE.replace(b"Host", b"Ho st"), 400),
        (WHOLE.replace(b"Host: here", b"Host: here\r\nContent-Length: 5"), 400),
        (WHOLE.replace(b"Host: here", b"Host: here\r\nTransfer-Encoding: x"), 400),
        (WHOLE.replace(b"Content-Length: ", b"Content-Length: " + b"0" * 5000), 413),
        (WHOLE.replace(b"llama", b"other"), 404),
        (WHOLE.replace(b"POST /lookup", b"POST /look"), 404),
        (PLAIN + b"Connection: close\r\n\r\n" + BODY, 200),
    ],
)
def test_what_is_not_plain_goes_the_long_way(
    server: Running, request_text: bytes, status: int
) -> None:
    port = int(server.said["url"].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as connection:
        connection.sendall(request_text)
        assert connection.recv(100).startswith(b"HTTP/1.1 %d " % status)


def test_the_short_way_is_for_what_is_whole_and_plain() -> None:
    read = read_plain(WHOLE)
    assert read is not None
    assert read[0][0] == (b"host", b"here")
    assert read[1] == BODY
    assert read_plain(PLAIN + b"Authorization: Bearer x\r\n\r\n" + BODY) is not None
    for other in (WHOLE[:-1], WHOLE + b"x", CHUNKED, WHOLE.replace(b"Host", b"Expect")):
        assert read_plain(other) is None


def test_a_connection_may_be_idle_between_requests(pool: str) -> None:
    """Short answers keep uvicorn's clock: it closes idle connections, and no others."""
    with Running(pool) as running:
        port = int(running.said["url"].rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT) as connection:
            answers(connection, [WHOLE], 1)
            # A connection that is idle does not hold up the end.
            assert running.end(signal.SIGTERM) == (0, "")
            assert connection.recv(1) == b""


def test_the_token_is_asked_for(guarded: Running) -> None:
    body = {"model": "llama", "prompt": PROMPT}
    for wrong in (None, "", "wrong", TOKEN + "x", TOKEN[:-1]):
        for path in ("/lookup", "/models", "/metrics"):
            status, answer = guarded.ask(path, body if path == "/lookup" else None, token=wrong)
            assert status == 401, path
            assert TOKEN not in json.dumps(answer)
    assert guarded.ask(body=body, token=TOKEN)[0] == 200
    assert guarded.ask("/metrics", token=TOKEN)[0] == 200
    assert guarded.ask("/health")[0] == 200


def test_secrets_are_nowhere(pool: str) -> None:
    with Running(pool, token=TOKEN) as running:
        running.ask(body={"model": "llama", "prompt": PROMPT}, token=TOKEN)
        status, said = running.end(signal.SIGTERM)
    assert (status, TOKEN in said) == (0, False)


def test_engines_are_part_of_the_answer(pool: str) -> None:
    with Running(pool, "--engine", f"a=tcp://127.0.0.1:{free_port()}") as running:
        status, found = running.ask(body={"model": "llama", "prompt": PROMPT})
        assert (status, found["engines"]) == (
            200,
            # Nobody publishes there. The pool's tokens are there for whoever comes.
            [{"name": "a", "state": "gone", "own": None, "tokens": 2 * BLOCK, "heard": None}],
        )
        text = running.ask("/metrics")[1]
        assert 'penstock_lookup_engine_state{engine="a",state="gone"} 1.0' in text
        assert 'penstock_lookup_engine_blocks{engine="a"} 0.0' in text
        assert 'penstock_lookup_engine_losses_total{engine="a"} 0.0' in text
        assert running.end(signal.SIGTERM)[0] == 0


def test_signals_end_it(pool: str) -> None:
    for number, expected in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
        with Running(pool) as running:
            assert running.ask("/health")[0] == 200
            status, said = running.end(number)
            assert (status, said) == (expected, "")


def test_tls(pool: str, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    files = ("--tls-certificate", str(certificate), "--tls-key", str(key))
    with Running(pool, *files) as running:
        assert running.said["url"].startswith("https://")
        trusting = ssl.create_default_context(cafile=str(certificate))
        body = {"model": "llama", "prompt": PROMPT}
        assert running.ask(body=body, context=trusting)[0] == 200
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            running.ask(body=body)


def test_text_is_tokenized_where_a_tokenizer_is(pool: str, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0} | {f"w{number}": number for number in PROMPT[1:]}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}'
    )
    text = "unknown " + " ".join(f"w{number}" for number in PROMPT[1:])
    with Running(pool, "--tokenizer", f"llama={tmp_path}") as running:
        for name in ("llama", "llama-served"):
            status, found = running.ask(body={"model": name, "prompt": text})
            assert (status, found["prompt_tokens"]) == (200, len(PROMPT)), found
            assert found["pools"][0]["tokens"] == 2 * BLOCK


class Frozen:
    """A service whose pool does not answer until it is let go."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.gate = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    def begin(self, question: Any) -> Any:
        pending = self._service.begin(question)
        waits = self._service._asking.submit(self.gate.wait)
        [asked] = pending.asked
        return replace(pending, asked=(replace(asked, tokens=waits),))


def test_no_more_look_ups_at_once_than_allowed() -> None:
    store = Store.open("memory://?size=16MiB")
    Engine(store)
    with Service([store], Settings(threads=4)) as service:
        frozen = Frozen(service)
        application = Application(frozen, Tokenizers({}), limits=Limits(concurrency=2))

        async def ask() -> int:
            sent: list[Any] = []

            async def receive() -> Any:
                return {"type": "http.request", "body": b'{"model":"llama","prompt":[1]}'}

            async def send(message: Any) -> None:
                sent.append(message)

            scope = {"type": "http", "path": "/lookup", "method": "POST", "headers": []}
            await application(scope, receive, send)
            return int(sent[0]["status"])

        async def many() -> list[int]:
            asked = [asyncio.create_task(ask()) for _ in range(5)]
            await eventually_async(lambda: sum(task.done() for task in asked) >= 3)
            frozen.gate.set()
            return sorted(await asyncio.gather(*asked))

        assert asyncio.run(many()) == [200, 200, 503, 503, 503]


def test_a_body_that_does_not_come_is_given_up() -> None:
    store = Store.open("memory://?size=16MiB")
    with Service([store]) as service:
        limits = Limits(body_seconds=0.05)
        application = Application(service, Tokenizers({}), limits=limits)
        sent: list[Any] = []

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "path": "/lookup", "method": "POST", "headers": []}
        asyncio.run(application(scope, receive, send))
        assert sent[0]["status"] == 408
