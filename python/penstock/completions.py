"""A vLLM server's completions of prompts: its tokens, when they came, and what was cached.

It uses OpenAI's client, which vLLM brings.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import openai
from openai.types import Completion

from penstock.errors import PenstockError

_ANSWER_SECONDS = 120.0


class Refused(PenstockError):
    """The server answered with an error. Other prompts may be answered."""

    kind = "refused"


class BrokenOff(PenstockError):
    """The server did not answer, or not to the end."""

    kind = "broken_off"


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
    prompt_tokens: int = 0
    """Tokens of the prompt, as vLLM counts them."""
    arrivals: tuple[float, ...] = ()
    """Seconds from sending the request to each token. Tokens of one message came at one time."""
    waited: float = 0.0
    """Seconds of these times that passed before the server got the request."""

    def later(self, seconds: float) -> Answer:
        """This answer, as seen by somebody who has waited for `seconds` before."""
        return replace(
            self,
            waited=self.waited + seconds,
            first_token=self.first_token + seconds,
            seconds=self.seconds + seconds,
            arrivals=tuple(arrival + seconds for arrival in self.arrivals),
        )


class Completions:
    """The completions of a vLLM server. Several threads may ask at once."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "none",
        uses_proxy: bool = True,
        timeout: float = _ANSWER_SECONDS,
    ) -> None:
        """`url` is the server's, as ``http://host:port``. `timeout` bounds the wait for each part
        of an answer, in seconds. With `uses_proxy`, the environment's proxy is used."""
        self.url = url
        self._client = openai.OpenAI(
            base_url=f"{url}/v1",
            api_key=api_key,
            timeout=timeout,
            # A retry that nobody sees would be measured as part of one request.
            max_retries=0,
            # No connection stays open between requests, as the server could close it just before
            # the next one.
            default_headers={"Connection": "close"},
            http_client=openai.DefaultHttpxClient(trust_env=uses_proxy),
        )

    def complete(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        *,
        # Empty: the model that the server has.
        model: str = "",
        cache_salt: str | None = None,
        # For the server's connector.
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> Answer:
        """The greedy continuation of `prompt` (text or token ids) by `max_tokens` tokens.

        Raises:
            Refused: the server answered with an error.
            BrokenOff: the server did not answer, or broke off.
        """
        begin = time.perf_counter()
        try:
            chunks = self._client.completions.create(
                model=model,
                prompt=None,
                max_tokens=max_tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={
                    # Not passed as an argument, because the client would then check it token by
                    # token, which takes 40 ms for 4,000 tokens.
                    "prompt": prompt if isinstance(prompt, str) else list(prompt),
                    "ignore_eos": True,
                    "return_token_ids": True,
                    **({} if cache_salt is None else {"cache_salt": cache_salt}),
                    **({"kv_transfer_params": kv_transfer_params} if kv_transfer_params else {}),
                },
            )
            return _read(chunks, begin)
        except Exception as error:
            raise _failure(error) from error

    def prefill(
        self,
        prompt: Sequence[int],
        kv_transfer_params: Mapping[str, Any],
        *,
        model: str = "",
    ) -> dict[str, Any]:
        """Has the server compute `prompt` for another server. Returns the ``kv_transfer_params``
        that the other server needs to go on with it; empty if the server's connector has none.

        Raises:
            Refused: the server answered with an error.
            BrokenOff: the server did not answer.
        """
        try:
            answer = self._client.completions.create(
                model=model,
                prompt=None,
                max_tokens=1,
                temperature=0,
                extra_body={"prompt": list(prompt), "kv_transfer_params": kv_transfer_params},
            )
        except Exception as error:
            raise _failure(error) from error
        return dict(getattr(answer, "kv_transfer_params", None) or {})

    def count_tokens(self, text: str, *, model: str = "") -> int:
        """The number of tokens that the server makes of a text.

        Raises:
            Refused: the server answered with an error.
            BrokenOff: the server did not answer, or broke off.
        """
        try:
            answer = self._client.post(
                f"{self.url}/tokenize",
                body={"prompt": text} | ({"model": model} if model else {}),
                cast_to=dict[str, Any],
            )
            return int(answer["count"])
        except Exception as error:
            raise _failure(error) from error


def _failure(error: Exception) -> Refused | BrokenOff:
    if isinstance(error, openai.APIStatusError):
        return Refused(f"answered {error.status_code}: {error.body}")
    # Some versions of the client also raise errors of their own dependencies.
    return BrokenOff(f"broke off: {error!r}")


def _read(chunks: Iterable[Completion], begin: float) -> Answer:
    tokens: list[int] = []
    arrivals: list[float] = []
    prompt = cached = 0
    for chunk in chunks:
        arrived = time.perf_counter()
        for choice in chunk.choices:
            # vLLM's own field. Some chunks do not have it.
            new = getattr(choice, "token_ids", None) or ()
            tokens += new
            arrivals += [arrived - begin] * len(new)
        if chunk.usage:
            prompt = chunk.usage.prompt_tokens
            if details := chunk.usage.prompt_tokens_details:
                cached = details.cached_tokens or cached
    first, last = (arrivals[0], arrivals[-1]) if arrivals else (0.0, 0.0)
    return Answer(tuple(tokens), first, last, cached, prompt, tuple(arrivals))
