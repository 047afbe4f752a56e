"""A vLLM server as the demo sees it: prompts of token ids in, tokens and times out."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.demo.processes import Server, ServerFailed

_START_SECONDS = 420.0
_ANSWER_SECONDS = 120.0


@dataclass(frozen=True)
class Answer:
    """What a server said to one prompt."""

    tokens: tuple[int, ...]
    first_token: float
    """Seconds from sending the request to the first token."""
    seconds: float
    """Seconds from sending the request to the last token."""
    cached_tokens: int
    """Prompt tokens that vLLM took from its own cache or the pool, by its own count."""


@dataclass(frozen=True)
class Counters:
    """Penstock's counters in a server: tokens loaded, bytes fetched from the pool, bytes stored."""

    loaded_tokens: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            self.loaded_tokens - earlier.loaded_tokens,
            self.loaded_bytes - earlier.loaded_bytes,
            self.stored_bytes - earlier.stored_bytes,
        )

    def __add__(self, other: Counters) -> Counters:
        return Counters(
            self.loaded_tokens + other.loaded_tokens,
            self.loaded_bytes + other.loaded_bytes,
            self.stored_bytes + other.stored_bytes,
        )


class Engine:
    """A vLLM server on a port of the loopback interface."""

    def __init__(self, name: str, server: Server, port: int) -> None:
        self.name = name
        self._server = server
        self._port = port

    def is_ready(self) -> bool:
        """Whether it answers requests.

        Raises:
            ServerFailed: it ended, or took too long.
        """
        self._server.check(_START_SECONDS)
        try:
            return self._get("/health")[0] == 200
        except OSError:
            return False

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """The greedy continuation of `prompt` by exactly `max_tokens` tokens.

        Raises:
            ServerFailed: the server refused, broke off or ended.
        """
        body = json.dumps(
            {
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_ANSWER_SECONDS)
        try:
            connection.connect()
            begin = time.perf_counter()
            connection.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != 200:
                problem = response.read(2000).decode(errors="replace")
                raise ServerFailed(f"{self.name} answered {response.status}: {problem}")
            answer = _read_stream(response, begin)
        except (OSError, http.client.HTTPException) as error:
            self._server.check(float("inf"))
            raise ServerFailed(
                f"{self.name} broke off: {error!r}{self._server.log_tail()}"
            ) from error
        finally:
            connection.close()
        if len(answer.tokens) != max_tokens:
            raise ServerFailed(
                f"{self.name} sent {len(answer.tokens)} tokens in place of {max_tokens}"
            )
        return answer

    def counters(self) -> Counters:
        """Penstock's counters since the server's start; zeros without Penstock."""
        sums: dict[str, float] = {}
        for line in self._get("/metrics")[1].splitlines():
            if line.startswith("vllm:penstock_"):
                series, _, value = line.rpartition(" ")
                name = series.partition("{")[0].removeprefix("vllm:penstock_")
                sums[name] = sums.get(name, 0.0) + float(value)

        def total(name: str) -> int:
            return int(sums.get(f"{name}_total", 0))

        return Counters(
            total("loaded_tokens"),
            # Some may come while a request waits, ahead of its load.
            total("loaded_bytes") + total("prefetched_bytes"),
            total("stored_bytes"),
        )

    def _get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10.0)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()


def _read_stream(response: http.client.HTTPResponse, begin: float) -> Answer:
    tokens: list[int] = []
    first = last = begin
    cached = 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        arrived = time.perf_counter()
        event: dict[str, Any] = json.loads(line[len(b"data: ") :])
        if "error" in event:
            raise http.client.HTTPException(str(event["error"]))
        for choice in event.get("choices") or ():
            new = choice.get("token_ids") or ()
            if new:
                first, last = (first if tokens else arrived), arrived
                tokens += new
        usage = event.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens") or cached
    return Answer(tuple(tokens), first - begin, last - begin, cached)
