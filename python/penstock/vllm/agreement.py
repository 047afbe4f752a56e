"""What the ranks must agree on, and the namespace that follows from it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from penstock._native import Store
from penstock.errors import ConfigError, StoreError
from penstock.layout import check_ranks
from penstock.pool.namespace import namespace_digest, publish_namespace
from penstock.vllm import compat, identity
from penstock.vllm.messages import RankShare, Span
from penstock.vllm.settings import Settings

logger = logging.getLogger("vllm.penstock")

_FORMAT = 1
"""Version of what goes into a namespace; raised when equal descriptions change meaning."""


_PUBLISH_SECONDS = 300.0


class Agreement:
    """The ranks' shares, checked against each other, and the namespace of their objects."""

    def __init__(self, settings: Settings, vllm_config: Any, spec: Any) -> None:
        self._settings = settings
        self._vllm_config = vllm_config
        self._spec = spec
        self._weights = identity.weights_identity(vllm_config, settings.model_id)
        self._shares: dict[tuple[int, int], RankShare] = {}
        self._namespace: bytes | None = None
        self._publish_next = 0.0
        self.spans: list[Span] = []
        """The distinct spans that together hold a block; all must be present for a hit."""

    @property
    def ranks(self) -> int:
        """Number of workers that report on every job."""
        return len(self._shares)

    def accept(self, shares: Mapping[tuple[int, int], RankShare]) -> None:
        """Checks that the shares make up the model's KV cache, once and without gaps.

        Raises:
            ConfigError: a rank is missing, or two ranks differ where they must not; the message
                has both sides' numbers.
            LayoutError: the ranks' spans leave a gap, overlap, or cannot be cut into objects.
        """
        parallel = self._vllm_config.parallel_config
        expected = {
            (pp, tp)
            for pp in range(parallel.pipeline_parallel_size)
            for tp in range(parallel.tensor_parallel_size)
        }
        if set(shares) != expected:
            raise ConfigError(
                f"expected one worker for each of (pipeline, tensor) {sorted(expected)}, heard "
                f"from {sorted(shares)}"
            )
        holding = {rank: share for rank, share in shares.items() if share.span is not None}
        if not holding:
            raise ConfigError("no rank holds any KV cache")
        (first_rank, first), *others = holding.items()
        for rank, share in others:
            for name in ("num_blocks", "page_tokens", "interior", "dtype", "content_bytes"):
                ours, theirs = getattr(first, name), getattr(share, name)
                if ours != theirs:
                    raise ConfigError(
                        f"rank {first_rank} has {name} {ours}, rank {rank} has {theirs}; all "
                        "ranks must agree"
                    )
        model = self._vllm_config.model_config
        self.spans, _ = check_ranks(
            [share.span for share in holding.values() if share.span is not None],
            model.get_total_num_hidden_layers(),
            model.get_total_num_kv_heads(),
            layers_per_object=self._settings.layers_per_object or None,
            heads_per_object=self._settings.heads_per_object or None,
        )
        self._shares = dict(shares)

    @property
    def namespace(self) -> bytes:
        """The digest of everything that must agree before two engines share objects.

        Made on first use, when the engine's block-hash seed is known.
        """
        if self._namespace is None:
            facts = self._facts()
            self._namespace = namespace_digest(facts)
            logger.info("Penstock: namespace %s: %s", self._namespace.hex(), facts)
        return self._namespace

    def publish(self, store: Store) -> None:
        """Leaves the namespace's description in the pool, for `penstock pool ls`.

        Called when a store has succeeded; returns at once. Repeated now and then, since a pool
        may be emptied.
        """
        now = time.monotonic()
        if now < self._publish_next:
            return
        self._publish_next = now + _PUBLISH_SECONDS
        description = {"model": self._vllm_config.model_config.model, **self._facts()}
        threading.Thread(
            target=_publish,
            args=(store, self.namespace, description),
            name="penstock-publish",
            daemon=True,
        ).start()

    def _facts(self) -> dict[str, Any]:
        if not self._shares:
            raise ConfigError("the workers did not tell what they hold; cannot name any object")
        config = self._vllm_config
        share = next(s for s in self._shares.values() if s.span is not None)
        return {
            "format": _FORMAT,
            "config": identity.config_digest(config.model_config.hf_config),
            "weights": self._weights,
            "dtype": str(config.model_config.dtype),
            "quantization": str(config.model_config.quantization),
            "kv_dtype": share.dtype,
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            "block_size": self._spec.block_size,
            "hash": config.cache_config.prefix_caching_hash_algo,
            "hash_seed": compat.none_hash().hex(),
            "page_tokens": share.page_tokens,
            "content_bytes": share.content_bytes,
            "interior": share.interior,
            "spans": [list(span) for span in self.spans],
            "salt": self._settings.salt,
        }


def _publish(store: Store, namespace: bytes, description: dict[str, Any]) -> None:
    try:
        publish_namespace(store, namespace, description)
    except StoreError as error:
        logger.warning("Penstock: could not describe the namespace in the pool: %s", error)
