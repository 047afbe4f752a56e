"""The two ways to use two servers: prefill and decode apart, or both alike behind round-robin."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from lab.demo.engine import Engine
from lab.demo.pd.load import Prompt
from penstock.completions import Answer

_TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's toy proxy sends to a prefill server."""


class System(Protocol):
    """Servers that answer prompts together."""

    def ask(self, prompt: Prompt) -> Answer:
        """The answer to `prompt`. Its times count from this call on.

        Raises:
            ServerFailed: a server refused, broke off or ended.
        """


class Apart:
    """Prefill servers compute prompts, decode servers go on with them: a serial proxy, which takes
    the servers of either kind in turn."""

    def __init__(self, prefill: Sequence[Engine], decode: Sequence[Engine]) -> None:
        self._prefill, self._decode = prefill, decode

    def ask(self, prompt: Prompt) -> Answer:
        begin = time.perf_counter()
        first = self._prefill[prompt.number % len(self._prefill)]
        second = self._decode[prompt.number % len(self._decode)]
        params = first.prefill(prompt.tokens, _TO_PREFILL)
        waited = time.perf_counter() - begin
        return second.complete(prompt.tokens, prompt.answer_tokens, params).later(waited)


class RoundRobin:
    """Each server computes prompts and answers; a router takes them in turn."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    def ask(self, prompt: Prompt) -> Answer:
        engine = self._engines[prompt.number % len(self._engines)]
        return engine.complete(prompt.tokens, prompt.answer_tokens)
