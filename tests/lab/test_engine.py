"""What the demo measures of a server: when tokens come, what it says of its cache, and its counts.
The server here answers with what a test gives it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from lab.demo.engine import Counters, Engine
from lab.processes import Server, ServerFailed
from tests.web import serving

Script = Iterator[Any]
"""Chunks of an answer, and seconds to wait between them; None breaks off."""

PAUSE = 0.2


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Callable[[], Script]
    asked: list[dict[str, Any]]
    status = 200
    metrics = ""

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.status)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in self.script():
            if part is None:
                return
            if isinstance(part, float):
                time.sleep(part)
            else:
                self.send(f"data: {part if isinstance(part, str) else json.dumps(part)}\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def do_GET(self) -> None:
        body = self.metrics.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send(self, text: str) -> None:
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


def chunk(*tokens: int, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": "", "token_ids": list(tokens) or None}
    return {"id": "1", "object": "text_completion", "choices": [choice], **more}


@pytest.fixture
def handler() -> type[Handler]:
    return type("Own", (Handler,), {"asked": []})


@pytest.fixture
def engine(
    handler: type[Handler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    # Nobody listens there: what asks a proxy fails.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    program = Server("the server", ["sleep", "60"], tmp_path / "log")
    with serving(handler) as port:
        yield Engine("the server", program, port)
        program.terminate()


def test_tokens_are_timed_when_they_arrive(engine: Engine, handler: type[Handler]) -> None:
    def script() -> Script:
        # The first chunk has no token: it is not the first token.
        yield chunk()
        yield PAUSE
        yield chunk(5)
        # Whoever reads may be late.
        yield 10 * PAUSE
        yield chunk(6, 7)
        yield {
            **chunk(),
            "choices": [],
            "usage": {
                "prompt_tokens": 3,
                "completion_tokens": 3,
                "total_tokens": 6,
                "prompt_tokens_details": {"cached_tokens": 2},
            },
        }
        yield "[DONE]"

    handler.script = staticmethod(script)
    answer = engine.complete([1, 2, 3], 3)
    assert answer.tokens == (5, 6, 7)
    assert answer.cached_tokens == 2
    assert answer.first_token >= PAUSE
    assert answer.first_token + PAUSE <= answer.seconds
    (asked,) = handler.asked
    assert asked["prompt"] == [1, 2, 3]
    assert (asked["max_tokens"], asked["temperature"], asked["ignore_eos"]) == (3, 0, True)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([chunk(5), None], "broke off"),
        ([chunk(5), {"error": {"message": "out of blocks"}}], "out of blocks"),
        ([chunk(5), "[DONE]"], "sent 1 tokens in place of 2"),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure(
    parts: list[Any], said: str, engine: Engine, handler: type[Handler]
) -> None:
    handler.script = staticmethod(lambda: iter(parts))
    with pytest.raises(ServerFailed, match=said):
        engine.complete([1], 2)
    assert len(handler.asked) == 1


@pytest.mark.parametrize("status", [400, 503])
def test_a_refusal_says_why_and_is_not_sent_again(
    status: int, engine: Engine, handler: type[Handler]
) -> None:
    handler.status = status
    handler.script = staticmethod(lambda: iter(["the prompt is too long"]))
    with pytest.raises(ServerFailed, match=rf"answered {status}.*too long"):
        engine.complete([1], 2)
    assert len(handler.asked) == 1


def test_counters_are_summed_over_engines_of_a_server(
    engine: Engine, handler: type[Handler]
) -> None:
    handler.metrics = """# HELP vllm:penstock_loaded_tokens_total Tokens loaded.
# TYPE vllm:penstock_loaded_tokens_total counter
vllm:penstock_loaded_tokens_total{engine="0",model_name="a \\"b\\" }"} 5.0
vllm:penstock_loaded_tokens_total{engine="1"} 1e3
# TYPE vllm:penstock_loaded_bytes_total counter
vllm:penstock_loaded_bytes_total{engine="0"} 7.0
# TYPE vllm:penstock_prefetched_bytes_total counter
vllm:penstock_prefetched_bytes_total{engine="0"} 2.0
# TYPE vllm:penstock_declined_tokens_total counter
vllm:penstock_declined_tokens_total{engine="0"} 64.0
vllm:penstock_declined_tokens_total{engine="1"} 32.0
# TYPE vllm:penstock_load_late_blocks_total counter
vllm:penstock_load_late_blocks_total{engine="0"} 3.0
# TYPE vllm:penstock_stored_bytes_created gauge
vllm:penstock_stored_bytes_created{engine="0"} 1.7e9
"""
    found = Counters(loaded_tokens=1005, loaded_bytes=9, declined_tokens=96, late_blocks=3)
    assert engine.counters() == found
    assert found + found - found == found
