"""What a prefill engine says of the blocks it has stored, and a decode engine reads.

A prefill engine returns it in `kv_transfer_params`. A proxy hands that to the decode engine as it
is. So it may come from anybody: it makes an engine wait for a bounded time, and nothing more. What
is loaded is verified as always.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from penstock._native import Catalogue
from penstock.vllm.agreement import Agreement
from penstock.vllm.counters import Counters
from penstock.vllm.names import PREFIX, TENANT
from penstock.vllm.scheduler.facts import EngineFacts
from penstock.vllm.scheduler.requests import RequestState
from penstock.vllm.scheduler.sharing import Sharing

logger = logging.getLogger("vllm.penstock")

REMOTE_PREFILL, REMOTE_DECODE = "do_remote_prefill", "do_remote_decode"
"""vLLM's names: another engine has computed this prompt, or is computing it; another engine goes on
with it."""

_PROMISE = PREFIX + "promise"
_DIGEST_DIGITS = 32


@dataclass(frozen=True)
class Promise:
    """Blocks that an engine has ordered to be stored."""

    namespaces: tuple[bytes, ...]
    """The namespace of each group."""
    tokens: int
    """The tokens of the prompt's beginning that these blocks hold."""
    last_block_hash: bytes
    """The hash of the last of these tokens' blocks; empty if there are no tokens."""

    def as_params(self) -> dict[str, Any]:
        """The promise as plain JSON."""
        return {
            _PROMISE: {
                "namespaces": [namespace.hex() for namespace in self.namespaces],
                "tokens": self.tokens,
                "last": self.last_block_hash.hex(),
            }
        }


def is_announced(params: Mapping[str, Any] | None) -> bool:
    """Whether a proxy says that another engine computes the prompt."""
    return bool((params or {}).get(REMOTE_PREFILL))


def is_handed_over(params: Mapping[str, Any] | None) -> bool:
    """Whether a proxy says that another engine goes on after the prompt."""
    return bool((params or {}).get(REMOTE_DECODE))


def read_promise(params: Mapping[str, Any] | None) -> Promise | None:
    """The promise among a request's parameters; None if there is none that can be read."""
    try:
        written = (params or {})[_PROMISE]
        namespaces, tokens, last = (written[name] for name in ("namespaces", "tokens", "last"))
        if type(tokens) is not int or tokens < 0 or not isinstance(namespaces, Sequence):
            return None
        if any(len(namespace) != _DIGEST_DIGITS for namespace in namespaces):
            return None
        return Promise(tuple(map(bytes.fromhex, namespaces)), tokens, bytes.fromhex(last))
    except (KeyError, TypeError, ValueError):
        return None


class Promises:
    """The promises that one engine makes and reads."""

    def __init__(
        self,
        catalogue: Catalogue,
        facts: EngineFacts,
        agreement: Agreement,
        sharing: Sharing,
        counters: Counters,
    ) -> None:
        self._catalogue = catalogue
        self._facts = facts
        self._agreement = agreement
        self._sharing = sharing
        self._counters = counters

    def make(self, state: RequestState) -> dict[str, Any] | None:
        """The promise in the request's answer to the engine that goes on with it; None if none
        does. It has the fields that proxies and routers expect besides."""
        if not state.is_handed_over:
            return None
        request, unit = state.request, self._catalogue.alignment
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens) // unit * unit
        each = self._facts.hash_tokens
        if not self._sharing.may_store(state):
            tokens = 0
        promise = Promise(
            self._agreement.namespaces,
            tokens,
            request.block_hashes[tokens // each - 1] if tokens else b"",
        )
        self._counters.count("promises")
        return {
            REMOTE_PREFILL: True,
            REMOTE_DECODE: False,
            "remote_engine_id": self._facts.engine_id,
            "remote_request_id": state.id,
            # No engine is asked for the blocks: they are in the pool.
            "remote_block_ids": [],
            "remote_host": "",
            "remote_port": 0,
            "tp_size": self._facts.tensor_parallel,
            # A proxy may send nothing else of what the client sent to this engine.
            **({TENANT: state.label} if state.label else {}),
            **promise.as_params(),
        }

    def end(self, state: RequestState, params: Mapping[str, Any] | None) -> int | None:
        """The token up to which a request may be loaded, by the promise among its parameters; 0 if
        the promise is not for this engine, None if there is none."""
        promise = read_promise(params)
        if promise is None:
            return None
        unit = self._catalogue.alignment
        tokens = promise.tokens // unit * unit
        if tuple(promise.namespaces) != self._agreement.namespaces:
            self._refuse(
                "it is for another namespace: give both engines the same model, settings and "
                "penstock.pool_geometry (portable, if their parallelism differs)"
            )
            return 0
        blocks = tokens // self._facts.hash_tokens
        block_hashes = state.request.block_hashes
        if blocks and block_hashes[blocks - 1 : blocks] != [promise.last_block_hash]:
            self._refuse("its hash is not that of this request's tokens")
            return 0
        return self._catalogue.last_end(tokens + 1)

    def _refuse(self, reason: str) -> None:
        self._counters.count("promises_refused")
        _warn_of_promise(reason)


@lru_cache(maxsize=16)
def _warn_of_promise(reason: str) -> None:
    # Once for each reason: a client may send such with every request.
    logger.warning("Penstock: a request's promise is not used: %s", reason)
