"""The models in a pool: what namespaces' descriptions say about how their blocks are named."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from penstock._native import (
    GroupSpec,
    ModelVariant,
    PoolGroup,
    PrefixHasher,
    PromptPrefix,
    Store,
    TokenIds,
)
from penstock.errors import ConfigError, LayoutError, PenstockError
from penstock.lookup.fields import Fields, WrongField
from penstock.pool.namespace import (
    DESCRIPTIONS,
    DIGEST_BYTES,
    Unreadable,
    model_of,
    read_description,
)
from penstock.vllm.samples import SAMPLE_BLOCKS, SAMPLE_LORA, SAMPLE_SALT

_STATE = "mamba"
"""vLLM's name for all layers that keep a state."""

_KINDS = ("full_attention", "mla_attention", "sliding_window", _STATE)
"""Groups of layers whose rules are known here."""

_MOST_DESCRIPTIONS = 4096
_MOST_GROUPS = 1024
"""Groups of layers of a model. vLLM's models have a handful."""
_MOST_SPANS = 1 << 16
_HIGHEST_EDGE = (1 << 16) - 1
"""The highest layer or head of a span."""
_MOST_TOKENS = 1 << 24
"""Tokens of a block, of a window, or of what an engine loads at once."""
_MOST_NAMES = 256
_LONGEST_NAME = 4096
_LONGEST_OPTIONS = 16_384
_HASH_BYTES = 64


class Refused(PenstockError, LookupError):
    """The question cannot be answered: the model is not known, or something about it."""

    kind: ClassVar[str] = "refused"

    def __init__(self, message: str, *, is_unknown: bool = False) -> None:
        super().__init__(message)
        #: Whether no pool has this model.
        self.is_unknown = is_unknown


@dataclass(frozen=True)
class Lora:
    """A LoRA adapter, as the engine's requests name it."""

    name: str
    path: str
    """The path that the engine loads it from, as its requests have it: it is part of the hashes."""
    digest: str
    """Digest of its content, see :func:`penstock.vllm.adapters.content_digest`."""


@dataclass(frozen=True)
class Model:
    """One way to serve a model, from the descriptions of its namespaces in a pool."""

    name: str
    names: frozenset[str]
    """The name, and those that engines serve it under."""
    namespace: bytes
    """The namespace of its last group. No other way to serve a model has it as the last one."""
    block_size: int
    """What an engine loads is a multiple of so many tokens."""
    variant: ModelVariant
    groups: tuple[int, ...]
    """vLLM's number of each of its groups."""
    hashing: Hashing


@dataclass(frozen=True)
class Hashing:
    """How the engines of a model hash blocks. Equal ones give equal hashes."""

    algorithm: str
    seed: bytes
    tokens: int
    """Tokens of a block hash."""
    forms: frozenset[str]
    """Which of vLLM's hashes were reproduced: `plain`, `salted`, `lora`."""
    adapter_options: str | None
    """The engine's options that go into an adapter's digest; None if it serves no adapters."""
    hasher: PrefixHasher = field(compare=False, repr=False)

    def prefix(
        self,
        prompt: list[int] | TokenIds,
        *,
        cache_salt: str | None = None,
        lora: Lora | None = None,
    ) -> PromptPrefix:
        """The prompt's block hashes.

        Raises:
            ConfigError: the prompt, the salt or the adapter cannot be hashed.
            Refused: this engine's hashes with a salt or an adapter are not known.
        """
        if cache_salt and "salted" not in self.forms:
            raise Refused("the engine hashes the cache salt in a way that is not known here")
        if lora is None:
            return self.hasher.prefix(prompt, cache_salt=cache_salt)
        if self.adapter_options is None:
            raise Refused("no engine that described this model to the pool serves LoRA adapters")
        if "lora" not in self.forms:
            raise Refused("the engine hashes LoRA adapters in a way that is not known here")
        named = (lora.name, lora.path, lora.digest)
        return self.hasher.prefix(prompt, lora=named, cache_salt=cache_salt)


@dataclass(frozen=True)
class Models:
    """The models that a pool describes."""

    known: tuple[Model, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """Name of a model that cannot be looked up → why."""


def read_models(store: Store, *, timeout: float) -> Models:
    """The models that a pool describes. Each call of the pool may take `timeout` seconds.

    A description that cannot be used is refused, with the reason; the others count.

    Raises:
        StoreError: the pool failed.
    """
    described = {}
    refused = {}
    for key, _ in store.list(DESCRIPTIONS, timeout=timeout)[:_MOST_DESCRIPTIONS]:
        digest = key[DIGEST_BYTES:][:DIGEST_BYTES]
        try:
            description = read_description(store, digest, timeout=timeout)
        except Unreadable as error:
            refused[_unnamed(digest)] = f"its description in the pool cannot be read: {error}"
            continue
        if description is not None and "model" in description:
            described[digest] = description
    models = models_of(described)
    return Models(models.known, {**refused, **models.refused})


def models_of(described: Mapping[bytes, Mapping[str, Any]]) -> Models:
    """The models of some namespaces' descriptions."""
    known: list[Model] = []
    refused: dict[str, str] = {}
    # What a tenant's namespace says holds for the one that it was made from.
    shared: dict[bytes, Mapping[str, Any]] = {}
    for namespace, description in described.items():
        shared.setdefault(_shared(namespace, description), description)
    for namespace, description in shared.items():
        name = model_of(description)
        if name is None or not 0 < len(name) <= _LONGEST_NAME:
            name = _unnamed(namespace)
        try:
            if (model := _model(namespace, shared)) is not None:
                known.append(model)
        except Refused as error:
            refused[name] = str(error)
        # What is right by itself may not fit together. Native code says so with these.
        except (WrongField, ConfigError, LayoutError) as error:
            refused[name] = f"its description in the pool cannot be read: {error}"
    known.sort(key=lambda model: (model.name, model.namespace))
    return Models(tuple(known), refused)


def _unnamed(namespace: bytes) -> str:
    """What stands for the name of a model whose description has none."""
    return f"namespace {namespace.hex()}"


def _model(namespace: bytes, described: Mapping[bytes, Mapping[str, Any]]) -> Model | None:
    """The model whose last group this is; None for other groups.

    Engines with a drafter share all other groups with those without, whose last group is one of
    these.

    Raises:
        Refused, WrongField, ConfigError, LayoutError: it cannot be looked up.
    """
    own = Fields(described[namespace])
    name = own.text("model", _LONGEST_NAME)
    if not own.has("lookup"):
        raise Refused(
            "an older version of Penstock described it. An engine of this version describes it "
            "anew as soon as it stores a block"
        )
    lookup = own.part("lookup")
    digests = lookup.digests("namespaces", _MOST_GROUPS, DIGEST_BYTES)
    if digests[-1] != namespace:
        return None
    if not all(digest in described for digest in digests):
        raise Refused("the pool lacks the description of one of its groups of layers")
    groups = [_group(digest, Fields(described[digest])) for digest in digests]
    hash_tokens = lookup.number("hash_tokens", 0, _MOST_TOKENS)
    block_size = math.lcm(*(group.spec.block_tokens for group in groups))
    if block_size > _MOST_TOKENS:
        raise Refused(
            f"what an engine loads would be a multiple of {block_size} tokens; at most "
            f"{_MOST_TOKENS} can be looked up"
        )
    return Model(
        name=name,
        names=frozenset((name, *lookup.texts("served", _MOST_NAMES, _LONGEST_NAME))),
        namespace=namespace,
        block_size=block_size,
        variant=ModelVariant(
            [(group.spec, group.pool) for group in groups],
            hash_tokens,
            # Descriptions of older versions do not tell. Their engines took all that they found.
            drops_last=lookup.flag("drops_last"),
        ),
        groups=tuple(group.index for group in groups),
        hashing=_hashing(own, lookup, hash_tokens),
    )


def _shared(namespace: bytes, description: Mapping[str, Any]) -> bytes:
    """The namespace that a description is of, whoever's objects it is about."""
    try:
        lookup = Fields(description).part("lookup")
        digests = lookup.digests("namespaces", _MOST_GROUPS, DIGEST_BYTES)
        return digests[lookup.number("position", 0, len(digests) - 1)]
    except WrongField:
        return namespace


@dataclass(frozen=True)
class _Group:
    """A group of layers."""

    index: int
    """vLLM's number of it."""
    spec: GroupSpec
    pool: PoolGroup


def _group(digest: bytes, described: Fields) -> _Group:
    group = described.part("group")
    kind = group.text("kind", _LONGEST_NAME)
    window = group.number("window", 1, _MOST_TOKENS) if group.has("window") else None
    if kind not in _KINDS or (kind == "sliding_window") != (window is not None):
        raise Refused(
            f"it has layers of the kind {kind!r}, and how far these can be loaded is not known "
            f"here: {', '.join(_KINDS)} are"
        )
    block_tokens = described.number("block_size", 1, _MOST_TOKENS)
    rows = described.rows("spans", _MOST_SPANS, 4, _HIGHEST_EDGE)
    spans = [(a, b, c, d) for a, b, c, d in rows]
    index = group.number("index", 0, _MOST_GROUPS)
    spec = GroupSpec(block_tokens, window=window, keeps_state=kind == _STATE)
    return _Group(index, spec, PoolGroup(digest, spans))


def _hashing(own: Fields, lookup: Fields, tokens: int) -> Hashing:
    """How blocks are hashed, tried on the samples that the engine gave.

    Raises:
        Refused: the engine's plain hashes cannot be reproduced.
    """
    algorithm, seed = own.text("hash", _LONGEST_NAME), own.binary("hash_seed", _HASH_BYTES)
    forms = frozenset(_reproduced(algorithm, seed, lookup.part("samples")))
    if "plain" not in forms:
        raise Refused(
            f"the engine hashes blocks with {algorithm!r} in a way that is not known here, so "
            "nothing that it stores can be found by hash"
        )
    hasher = PrefixHasher(algorithm, seed, tokens)
    options = None
    if lookup.has("adapter_options"):
        options = lookup.text("adapter_options", _LONGEST_OPTIONS)
    return Hashing(algorithm, seed, tokens, forms, options, hasher)


def _reproduced(algorithm: str, seed: bytes, samples: Fields) -> Iterable[str]:
    hasher = PrefixHasher(algorithm, seed, len(SAMPLE_BLOCKS[0]))
    tokens = [token for block in SAMPLE_BLOCKS for token in block]
    for form, prefix in (
        ("plain", hasher.prefix(tokens)),
        ("salted", hasher.prefix(tokens, cache_salt=SAMPLE_SALT)),
        ("lora", hasher.prefix(tokens, lora=SAMPLE_LORA)),
    ):
        theirs = samples.binary(form, _HASH_BYTES) if samples.has(form) else b""
        if theirs and theirs.ljust(len(prefix.hashes[1]), b"\0") == prefix.hashes[1]:
            yield form
