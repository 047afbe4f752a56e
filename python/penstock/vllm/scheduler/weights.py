"""Which weights the engine computes with, if they change while it runs."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

logger = logging.getLogger("vllm.penstock")


@dataclass
class Weights:
    """How often weights have changed, and what is left of those before.

    After a change, what the engine has is of the old weights: blocks of requests that it knows, and
    blocks in its own prefix cache until it is emptied. Requests with such blocks neither load nor
    store. Their next blocks are of both weights, and nobody else would compute the same.
    """

    count: int = 0
    """How often the namespaces have changed with the weights."""
    rounding: int = 0
    """What stands for how the engine rounds numbers, in 24 bits; 0 if it does not always compute
    the same block to the same bits."""
    writer: int = field(init=False)
    """Who computes KV now: this engine with these weights, see ``Writer`` in
    ``penstock-value/src/header.rs``. If others find its KV to be wrong, that says nothing about
    what it computes with the next."""
    changes: dict[str, int] = field(default_factory=dict)
    """Worker → how many changes it has told of."""
    is_unknown: bool = False
    """Whether it is not known yet what the weights are, or what they are called."""
    is_updating: bool = False
    """Whether a trainer has begun to update them, and has not finished."""
    version: str = ""
    """How the update to them called them; empty if it did not, or if they are those of the
    start."""
    last_old_job: int = 0
    """Jobs up to this number are of weights that are gone."""
    has_old_blocks: bool = False
    """Whether the engine's own prefix cache may have blocks of weights that are gone."""
    has_old_encodings: bool = False
    """Whether the engine may have kept what weights that are gone made of images."""

    def __post_init__(self) -> None:
        self.renew_writer()

    def renew_writer(self) -> None:
        """The weights are others: what is computed with them is another writer's."""
        self.writer = self.rounding << 40 | (secrets.randbits(40) or 1)
        logger.info("Penstock: this engine's values name writer %016x", self.writer)

    def is_stale(self, *, hits: bool, has_images: bool) -> bool:
        """Whether a request comes to something of weights that are gone: to blocks in the engine's
        own cache, if it `hits` some, or to what encoders made of its images. Its next blocks are
        then in that cache too."""
        if has_images and self.has_old_encodings:
            self.has_old_blocks = True
            return True
        return hits and self.has_old_blocks

    def is_old_job(self, number: int) -> bool:
        """Whether the job is of weights that are gone."""
        return number <= self.last_old_job

    def is_news(self, changes: Mapping[str, int]) -> bool:
        """Whether some worker has seen more changes than it had told of."""
        return any(count > self.changes.get(worker, 0) for worker, count in changes.items())
