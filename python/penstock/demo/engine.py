"""A vLLM server as the demo sees it: it takes prompts of token ids, and gives tokens and times."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import openai
from openai.types import Completion

from penstock.demo.processes import Server, ServerFailed
from penstock.exposition import totals

_START_SECONDS = 420.0
_ANSWER_SECONDS = 120.0


@dataclass(frozen=True)
class Answer:
    """A server's answer to one prompt."""

    tokens: tuple[int, ...]
    first_token: float
    """Seconds from sending the request to the first token."""
    seconds: float
    """Seconds from sending the request to the last token."""
    cached_tokens: int
    """Prompt tokens that vLLM took from its own cache or the pool, as vLLM counts them."""


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
        self._client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key="none",
            timeout=_ANSWER_SECONDS,
            # A retry that nobody sees would be measured as part of one request.
            max_retries=0,
            # No connection stays open between requests, as the server could close it just before
            # the next one.
            default_headers={"Connection": "close"},
            # Do not use the environment's proxy for the loopback interface.
            http_client=openai.DefaultHttpxClient(trust_env=False),
        )

    def is_ready(self) -> bool:
        """Whether the server answers requests.

        Raises:
            ServerFailed: the server ended, or took too long to start.
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
        begin = time.perf_counter()
        try:
            chunks = self._client.completions.create(
                # Empty: the model that the server has.
                model="",
                prompt=None,
                max_tokens=max_tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={
                    # Not passed as an argument, because the client would then check it token by
                    # token, which takes 40 ms for 4,000 tokens.
                    "prompt": list(prompt),
                    "ignore_eos": True,
                    "return_token_ids": True,
                },
            )
            answer = _read(chunks, begin)
        except openai.APIStatusError as error:
            raise ServerFailed(f"{self.name} answered {error.status_code}: {error.body}") from error
        except Exception as error:
            # Some versions of the client also raise errors of their own dependencies.
            self._server.check(float("inf"))
            raise ServerFailed(
                f"{self.name} broke off: {error!r}{self._server.log_tail()}"
            ) from error
        if len(answer.tokens) != max_tokens:
            raise ServerFailed(
                f"{self.name} sent {len(answer.tokens)} tokens in place of {max_tokens}"
            )
        return answer

    def counters(self) -> Counters:
        """Penstock's counters since the server's start; zeros without Penstock."""
        sums = totals(self._get("/metrics")[1])

        def total(name: str) -> int:
            return int(sums.get(f"vllm:penstock_{name}_total", 0))

        return Counters(
            total("loaded_tokens"),
            # Some bytes may come as a prefetch while a request waits, before its load.
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


def _read(chunks: Iterable[Completion], begin: float) -> Answer:
    tokens: list[int] = []
    first = last = begin
    cached = 0
    for chunk in chunks:
        arrived = time.perf_counter()
        for choice in chunk.choices:
            # vLLM's own field. Some chunks do not have it.
            new = getattr(choice, "token_ids", None) or ()
            if new:
                first, last = (first if tokens else arrived), arrived
                tokens += new
        if chunk.usage and (details := chunk.usage.prompt_tokens_details):
            cached = details.cached_tokens or cached
    return Answer(tuple(tokens), first - begin, last - begin, cached)
