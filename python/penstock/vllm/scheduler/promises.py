"""What a prefill engine says of the blocks it has stored, and a decode engine reads.

A prefill engine returns it in `kv_transfer_params`. A proxy hands that to the decode engine as it
is. So it may come from anybody: it makes an engine wait for a bounded time, and nothing more. What
is loaded is verified as always.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.vllm.names import PREFIX

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
    last: bytes
    """The hash of the last of these tokens' blocks; empty if there are no tokens."""

    def as_params(self) -> dict[str, Any]:
        """The promise as plain JSON."""
        return {
            _PROMISE: {
                "namespaces": [namespace.hex() for namespace in self.namespaces],
                "tokens": self.tokens,
                "last": self.last.hex(),
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
