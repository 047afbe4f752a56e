"""A vLLM server as the demo sees it: it takes prompts of token ids, and gives tokens and times."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import add, sub
from typing import Any, TypeVar

from lab.processes import Server, ServerFailed
from penstock.completions import Answer, BrokenOff, Completions, Refused
from penstock.exposition import totals

_START_SECONDS = 420.0
_T = TypeVar("_T")


@dataclass(frozen=True)
class Counters:
    """Penstock's counters in a server."""

    loaded_tokens: int = 0
    loaded_bytes: int = 0
    """Bytes fetched from the pool."""
    stored_bytes: int = 0
    declined_tokens: int = 0
    """Tokens computed though they could be loaded."""
    handovers_given_up: int = 0
    """Requests that did not wait for all blocks that a prefill server had promised."""
    late_blocks: int = 0
    """Blocks that a load did not get before it broke off; the pool may have them."""

    def __sub__(self, earlier: Counters) -> Counters:
        return self._with(earlier, sub)

    def __add__(self, other: Counters) -> Counters:
        return self._with(other, add)

    def _with(self, other: Counters, operation: Callable[[int, int], int]) -> Counters:
        return Counters(*map(operation, astuple(self), astuple(other)))


class Engine:
    """A vLLM server on a port of the loopback interface."""

    def __init__(self, name: str, server: Server, port: int) -> None:
        self.name = name
        self._server = server
        self._port = port
        # The environment's proxy is not for the loopback interface.
        self._completions = Completions(self.url, uses_proxy=False)

    @property
    def url(self) -> str:
        """URL where the server answers, without a path."""
        return f"http://127.0.0.1:{self._port}"

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

    def complete(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> Answer:
        """The greedy continuation of `prompt` by exactly `max_tokens` tokens.

        Raises:
            ServerFailed: the server refused, broke off or ended.
        """
        answer = self._ask(
            lambda: self._completions.complete(
                prompt, max_tokens, kv_transfer_params=kv_transfer_params
            )
        )
        if len(answer.tokens) != max_tokens:
            raise ServerFailed(
                f"{self.name} sent {len(answer.tokens)} tokens in place of {max_tokens}"
            )
        return answer

    def prefill(
        self, prompt: Sequence[int], kv_transfer_params: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Computes `prompt` for another server. Returns what that server's request needs.

        Raises:
            ServerFailed: the server refused, broke off or ended.
        """
        return self._ask(lambda: self._completions.prefill(prompt, kv_transfer_params))

    def _ask(self, ask: Callable[[], _T]) -> _T:
        try:
            return ask()
        except Refused as error:
            raise ServerFailed(f"{self.name} {error}") from error
        except BrokenOff as error:
            self._server.check(float("inf"))
            raise ServerFailed(f"{self.name} {error}{self._server.log_tail()}") from error

    def counters(self) -> Counters:
        """Penstock's counters since the server's start; zeros without Penstock."""
        sums = self.metrics()

        def total(name: str) -> int:
            return int(sums.get(f"vllm:penstock_{name}_total", 0))

        return Counters(
            total("loaded_tokens"),
            # Some bytes may come as a prefetch while a request waits, before its load.
            total("loaded_bytes") + total("prefetched_bytes"),
            total("stored_bytes"),
            total("declined_tokens"),
            total("handovers_given_up"),
            total("load_late_blocks"),
        )

    def metrics(self) -> Mapping[str, float]:
        """The server's metrics, each summed over its labels."""
        return totals(self._get("/metrics")[1])

    def _get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10.0)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()
