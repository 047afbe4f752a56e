"""A scorer for a router: what a prompt would spare on each candidate, by the look-up service.

It follows the shape that routers' scorers have: candidates in, a score from 0 to 1 for each out.
What an engine's own cache has, routers learn from vLLM's KV events. What its pool has, this asks
for. It needs Python alone.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Candidate:
    """An engine that may get the request."""

    pool: str
    """The URL of its pool, without credentials, as the service's answers have it."""
    cached_tokens: int = 0
    """Tokens of the prompt in its own cache, as far as the router knows."""


@dataclass(frozen=True)
class PoolScorer:
    """Asks the service once for each request."""

    url: str
    """As http://127.0.0.1:8377."""
    token: str | None = None
    timeout: float = 0.05
    """Seconds after which the request is routed without the pool's answer."""
    worth: float = 0.9
    """What a token in the pool is worth, if one in the engine's own cache is worth 1."""

    def scores(
        self, request: Mapping[str, Any], candidates: Mapping[str, Candidate]
    ) -> dict[str, float]:
        """Candidate → share of the prompt that need not be computed there, weighed.

        `request` has `model`, `prompt` (token ids), and `cache_salt` or `lora` if the request to
        the engine has them. If the service does not answer, only the engines' own caches count.
        """
        length = max(1, len(request["prompt"]))
        pools = self._tokens(request)
        scores = {}
        for name, candidate in candidates.items():
            own = candidate.cached_tokens
            loaded = max(0, pools.get(candidate.pool, 0) - own)
            scores[name] = min(1.0, (own + self.worth * loaded) / length)
        return scores

    def _tokens(self, request: Mapping[str, Any]) -> dict[str, int]:
        """Pool → tokens of the prompt, by the way to serve the model that has the most of it."""
        headers = {"Content-Type": "application/json"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        asked = urllib.request.Request(
            f"{self.url}/lookup", json.dumps(dict(request)).encode(), headers
        )
        try:
            with urllib.request.urlopen(asked, timeout=self.timeout) as answer:
                found = json.load(answer)["pools"]
        except (OSError, ValueError):
            # Refused or late: the request goes somewhere all the same.
            return {}
        most: dict[str, int] = {}
        for pool in found:
            most[pool["url"]] = max(most.get(pool["url"], 0), pool["tokens"] or 0)
        return most
