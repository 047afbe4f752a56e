"""Embeddings of images that a request does not bring.

vLLM lets requests leave them out on an engine whose connector receives KV: that KV was made of them
elsewhere. A pool may have lost it. The engine would then compute the image's tokens without the
image, and store that under the image's name.
"""

from __future__ import annotations

import functools
from typing import Any

from penstock.vllm.compat.configuration import has_penstock


def require_embeddings() -> None:
    """Has engines with Penstock require what engines without a connector do,
    once in a process."""
    from vllm.config import VllmConfig

    resolve = VllmConfig._resolve_mm_embedding_inputs
    if hasattr(resolve, "__wrapped__"):
        return

    @functools.wraps(resolve)
    def wrapped(self: Any) -> None:
        transfer = self.kv_transfer_config
        if has_penstock(self):
            self.kv_transfer_config = None
        try:
            resolve(self)
        finally:
            self.kv_transfer_config = transfer

    VllmConfig._resolve_mm_embedding_inputs = wrapped
