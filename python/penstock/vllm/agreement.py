"""The facts that ranks must agree on, and the namespaces that follow from them."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock._native import PoolGroup, tenant_namespace
from penstock.errors import ConfigError
from penstock.layout import check_ranks
from penstock.layout.geometry import parse_geometry
from penstock.pool.namespace import namespace_digest
from penstock.vllm.groups import Group, Groups
from penstock.vllm.messages import ModelShares, RankShare, Span
from penstock.vllm.model_facts import ModelFacts, Rank, shared_facts
from penstock.vllm.settings import KEEP, OFF, Settings

logger = logging.getLogger("vllm.penstock")

_FORMAT = 3
"""Version of the descriptions behind namespaces. Raised when the same description gets another
meaning."""

_EQUAL_SHARES = ("num_blocks", "layers_per_object", "host_blocks")
"""Values of a rank that must be equal on all ranks."""

_EQUAL = ("page_tokens", "interior", "content_bytes", "packed_by")
"""Values of a group that must be equal on all ranks that hold a part of it."""

_SHARE_OF_PREFETCHES = 4
"""One part in so many of node memory may be for waiting requests of one engine."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Computed:
    """What the ranks told of the models that they compute with, as facts."""

    model: Mapping[str, Any]
    draft: Mapping[str, Any]
    changed: str = ""
    """What stands for weights that changed, and that nobody can tell; else empty."""


@dataclasses.dataclass(frozen=True)
class _Named:
    """The namespaces that follow from what the ranks told."""

    computed: _Computed
    pool_groups: tuple[PoolGroup, ...]
    namespaces: tuple[bytes, ...]


class Agreement:
    """The ranks' shares, checked against each other, and the namespaces of their objects."""

    def __init__(
        self,
        settings: Settings,
        model: ModelFacts,
        groups: Groups,
        hash_seed: Callable[[], bytes],
    ) -> None:
        """`hash_seed` returns the seed of every chain of block hashes, once the engine is up."""
        self._settings = settings
        self._model = model
        self._groups = groups
        self._hash_seed = hash_seed
        self._shares: dict[tuple[int, int], RankShare] = {}
        self._computed = _Computed({}, {})
        self._last_named: _Named | None = None
        self.spans: list[list[Span]] = []
        """By group: the distinct spans that together hold a block. A hit needs all of them."""
        self.ranks_of_group: list[int] = []
        """By group: number of ranks that hold a part of its blocks."""
        self.block_bytes: list[int] = []
        """By group: bytes of a block on all ranks together."""
        self.block_objects: list[int] = []
        """By group: objects of a block on one rank."""
        self.prefetch_blocks = 0
        """The most blocks of host memory that may be kept for waiting requests."""

    @property
    def ranks(self) -> int:
        """Number of workers that report on every job."""
        return len(self._shares)

    def accept(self, shares: Mapping[tuple[int, int], RankShare], node_bytes: int = 0) -> None:
        """Checks that the shares make up the model's whole KV cache, each part once. `node_bytes`
        is the size of node memory, if there is any.

        Raises:
            ConfigError: a rank is missing, or two ranks differ where they must be equal. The
                message has the numbers of both.
            LayoutError: the ranks' spans leave a gap, overlap, or cannot be cut into objects.
        """
        pipeline, tensor = self._model.ranks
        expected = {(pp, tp) for pp in range(pipeline) for tp in range(tensor)}
        if set(shares) != expected:
            raise ConfigError(
                f"expected one worker for each of (pipeline, tensor) {sorted(expected)}, heard "
                f"from {sorted(shares)}"
            )
        holding = {rank: share for rank, share in shares.items() if share.span is not None}
        if not holding:
            raise ConfigError("no rank holds any KV cache")
        self._check_equal(
            {
                rank: {name: getattr(share, name) for name in _EQUAL_SHARES}
                for rank, share in holding.items()
            }
        )
        self.spans, self.ranks_of_group = [], []
        self.block_bytes, self.block_objects = [], []
        for position, group in enumerate(self._groups):
            parts = {rank: s.groups[position] for rank, s in holding.items()}
            found = {rank: part for rank, part in parts.items() if part is not None}
            if not found:
                raise ConfigError(f"no rank holds a layer of the {group.kind} group {group.index}")
            self._check_equal(
                {
                    rank: {name: getattr(part, name) for name in _EQUAL}
                    for rank, part in found.items()
                }
            )
            own = {layer for part in found.values() for layer in part.layers}
            possible = self._possible_spans(group, holding)
            self.spans.append([s for s in possible if not own.isdisjoint(range(s[0], s[1]))])
            self.ranks_of_group.append(len(found))
            self.block_bytes.append(sum(part.block_bytes for part in found.values()))
            self.block_objects.append(max(1, len(self.spans[-1]) // len(found)))
        if node_bytes:
            # Other engines' blocks are there too.
            self.prefetch_blocks = node_bytes // sum(self.block_bytes) // _SHARE_OF_PREFETCHES
        elif self._settings.host_tier:
            # The native engines of the ranks keep no more than this.
            self.prefetch_blocks = next(iter(holding.values())).host_blocks // 2
        self._computed = _computed({rank: share.models for rank, share in shares.items()})
        self._shares = dict(shares)

    def _possible_spans(
        self, group: Group, holding: Mapping[tuple[int, int], RankShare]
    ) -> list[Span]:
        """The objects that would hold a block, if all layers were of this group."""
        _, tensor = self._model.ranks
        geometry = parse_geometry(self._settings.pool_geometry, *self._model.extent)
        layers, heads = group.extent(*self._model.extent, tensor)
        _, total_heads = self._model.extent
        per_object = group.cut(next(iter(holding.values())).layers_per_object, geometry.heads)
        shares: list[Span] = []
        for (_, tensor_rank), share in holding.items():
            assert share.span is not None
            stage = share.span[:2] if group.draft is None else (0, layers)
            shares.append((*stage, *group.heads_of_rank(total_heads, tensor, tensor_rank)))
        spans, _ = check_ranks(
            shares,
            layers,
            heads,
            layers_per_object=per_object[0],
            heads_per_object=per_object[1],
        )
        return spans

    @staticmethod
    def _check_equal(values: Mapping[tuple[int, int], Mapping[str, Any]]) -> None:
        (first_rank, first), *others = values.items()
        for rank, theirs in others:
            for name, ours in first.items():
                if theirs[name] != ours:
                    raise ConfigError(
                        f"rank {first_rank} has {name} {ours}, rank {rank} has {theirs[name]}; "
                        "all ranks must agree"
                    )

    @property
    def namespaces(self) -> tuple[bytes, ...]:
        """By group: the digest of everything that must agree before two engines share the group's
        objects."""
        return self._named().namespaces

    @property
    def pool_groups(self) -> tuple[PoolGroup, ...]:
        """By group: where the pool has its blocks.

        Computed on first use, because the engine's block-hash seed is known by then.
        """
        return self._named().pool_groups

    def _named(self) -> _Named:
        """The namespaces of the weights of now. Any thread may ask."""
        computed, last = self._computed, self._last_named
        # What another thread has named meanwhile may be of weights before.
        if last is not None and last.computed is computed:
            return last
        found = []
        for position in range(len(self._groups)):
            facts = self._facts(position, computed)
            digest = namespace_digest(facts)
            if not computed.changed:
                logger.info("Penstock: namespace %s: %s", digest.hex(), facts)
            spans, block_bytes = self.spans[position], self.block_bytes[position]
            found.append(PoolGroup(digest, spans, block_bytes=block_bytes))
        self._last_named = named = _Named(
            computed, tuple(found), tuple(group.namespace for group in found)
        )
        return named

    def renew(self, models: Mapping[Rank, ModelShares | None] | None) -> None:
        """The weights have changed: the namespaces from now on are those of the `models` that the
        ranks compute with. If any of them is not known, the namespaces are of this engine alone,
        and of these weights.

        Raises:
            ConfigError: the ranks have read different files. The namespaces are as before.
        """
        known = {rank: told for rank, told in (models or {}).items() if told is not None}
        if known.keys() == self._shares.keys():
            self._computed = _computed(known)
        else:
            self._computed = dataclasses.replace(
                self._computed, changed=f"changed:{uuid.uuid4().hex}"
            )

    def namespaces_of(self, tenant: str = "") -> list[bytes]:
        """The groups' namespaces; those of a tenant, if `tenant` names one."""
        return _of_tenant(self.namespaces, tenant)

    def describe(self, tenant: str = "") -> list[tuple[bytes, dict[str, Any]]]:
        """The groups' namespaces, each with its description for people; those of a tenant, if
        `tenant` names one. Any thread may ask."""
        named = self._named()
        # Not part of the digest: how to find blocks, which does not change what is in them.
        lookup = {
            **self._model.lookup(),
            "namespaces": [namespace.hex() for namespace in named.namespaces],
        }
        described = []
        for position, namespace in enumerate(_of_tenant(named.namespaces, tenant)):
            facts = {
                "model": self._model.name,
                "lookup": lookup | {"position": position},
                **self._facts(position, named.computed),
                **({"tenant": tenant} if tenant else {}),
            }
            described.append((namespace, facts))
        return described

    def _facts(self, position: int, computed: _Computed) -> dict[str, Any]:
        if not self._shares:
            raise ConfigError("the workers did not tell what they hold; cannot name any object")
        group = self._groups[position]
        parts = [s.groups[position] for s in self._shares.values() if s.span is not None]
        share = next(part for part in parts if part is not None)
        compression = self._settings.compression
        model, draft = computed.model, computed.draft
        return {
            "format": _FORMAT,
            **self._model.identity,
            **model,
            **({"weights": computed.changed} if computed.changed else {}),
            "kv_dtype": group.dtype,
            "group": {"index": group.index, "kind": group.kind, "window": group.window},
            **({} if group.state is None else {"state": dataclasses.asdict(group.state)}),
            **({} if group.draft is None else {"draft": {**(self._model.draft or {}), **draft}}),
            **(
                {}
                if group.packing is None
                else {"packing": {**dataclasses.asdict(group.packing), "by": share.packed_by}}
            ),
            "block_size": group.block_size,
            "hash_seed": self._hash_seed().hex(),
            "page_tokens": share.page_tokens,
            "content_bytes": share.content_bytes,
            "interior": share.interior,
            "spans": [list(span) for span in self.spans[position]],
            "salt": self._settings.salt,
            # Engines that do not share KV over updates must not find such.
            **({"weight_updates": KEEP} if self._settings.weight_updates == KEEP else {}),
            # Readers of other versions would remove compressed values. Without compression, the
            # description stays as it was before there was any.
            **({} if compression == OFF else {"compression": compression}),
        }


def _computed(models: Mapping[Rank, ModelShares | None]) -> _Computed:
    told = {rank: each for rank, each in models.items() if each is not None}
    return _Computed(
        shared_facts({rank: each.model for rank, each in told.items()}),
        shared_facts({rank: each.draft for rank, each in told.items()}),
    )


def _of_tenant(namespaces: Iterable[bytes], tenant: str) -> list[bytes]:
    """Everybody's namespaces; those of a tenant in their place, if `tenant` names one."""
    return [tenant_namespace(shared, tenant) if tenant else shared for shared in namespaces]
