"""The models in a pool: what namespaces' descriptions say about how their blocks are named."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from penstock._native import ModelVariant, PrefixHasher, PromptPrefix, Store, TokenIds
from penstock.errors import ConfigError, PenstockError
from penstock.pool.namespace import DESCRIPTIONS, DIGEST_BYTES, read_namespace
from penstock.vllm.samples import SAMPLE_BLOCKS, SAMPLE_LORA, SAMPLE_SALT

_STATE = "mamba"
"""vLLM's name for all layers that keep a state."""

_KINDS = ("full_attention", "mla_attention", "sliding_window", _STATE)
"""Groups of layers whose rules are known here."""

_MOST_DESCRIPTIONS = 4096


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
    """The models that a pool describes.

    Raises:
        StoreError: the pool failed.
    """
    described = {}
    for key, _ in store.list(DESCRIPTIONS, timeout=timeout)[:_MOST_DESCRIPTIONS]:
        digest = key[DIGEST_BYTES:][:DIGEST_BYTES]
        description = read_namespace(store, digest, timeout=timeout)
        if description is not None and "model" in description:
            described[digest] = description
    return models_of(described)


def models_of(described: Mapping[bytes, Mapping[str, Any]]) -> Models:
    """The models of some namespaces' descriptions."""
    known: list[Model] = []
    refused: dict[str, str] = {}
    # What a tenant's namespace says holds for the one that it was made from.
    shared: dict[bytes, Mapping[str, Any]] = {}
    for namespace, description in described.items():
        shared.setdefault(_shared(namespace, description), description)
    for namespace, description in shared.items():
        name = str(description["model"])
        try:
            if (model := _model(name, namespace, shared)) is not None:
                known.append(model)
        except (Refused, ConfigError) as error:
            refused[name] = str(error)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            refused[name] = f"its description in the pool cannot be read: {error!r}"
    known.sort(key=lambda model: (model.name, model.namespace))
    return Models(tuple(known), refused)


def _model(
    name: str, namespace: bytes, described: Mapping[bytes, Mapping[str, Any]]
) -> Model | None:
    """The model whose last group this is; None for other groups.

    Engines with a drafter share all other groups with those without, whose last group is one of
    these."""
    own = described[namespace]
    lookup = own.get("lookup")
    if lookup is None:
        raise Refused(
            "an older version of Penstock described it. An engine of this version describes it "
            "anew as soon as it stores a block"
        )
    digests = [bytes.fromhex(digest) for digest in lookup["namespaces"]]
    if digests[-1] != namespace:
        return None
    if not all(digest in described for digest in digests):
        raise Refused("the pool lacks the description of one of its groups of layers")
    groups = [described[digest] for digest in digests]
    hash_tokens = int(lookup["hash_tokens"])
    made = [_group(digest, group) for digest, group in zip(digests, groups, strict=True)]
    return Model(
        name=name,
        names=frozenset((name, *map(str, lookup["served"]))),
        namespace=namespace,
        block_size=math.lcm(*(group["block_size"] for group in groups)),
        variant=ModelVariant(
            # Descriptions of older versions do not tell. Their engines took all that they found.
            made,
            hash_tokens,
            drops_last=lookup.get("drops_last", False),
        ),
        groups=tuple(int(group["group"]["index"]) for group in groups),
        hashing=_hashing(own, lookup, hash_tokens),
    )


def _shared(namespace: bytes, description: Mapping[str, Any]) -> bytes:
    """The namespace that a description is of, whoever's objects it is about."""
    try:
        lookup = description["lookup"]
        return bytes.fromhex(lookup["namespaces"][lookup["position"]])
    except (KeyError, IndexError, TypeError, ValueError):
        return namespace


def _group(
    digest: bytes, described: Mapping[str, Any]
) -> tuple[bytes, int, int | None, bool, list[tuple[int, int, int, int]]]:
    kind, window = described["group"]["kind"], described["group"]["window"]
    if kind not in _KINDS or (kind == "sliding_window") != (window is not None):
        raise Refused(
            f"it has layers of the kind {kind!r}, and how far these can be loaded is not known "
            f"here: {', '.join(_KINDS)} are"
        )
    spans = [(int(a), int(b), int(c), int(d)) for a, b, c, d in described["spans"]]
    return digest, int(described["block_size"]), window, kind == _STATE, spans


def _hashing(own: Mapping[str, Any], lookup: Mapping[str, Any], tokens: int) -> Hashing:
    """How blocks are hashed, tried on the samples that the engine gave.

    Raises:
        Refused: the engine's plain hashes cannot be reproduced.
    """
    algorithm, seed = str(own["hash"]), bytes.fromhex(own["hash_seed"])
    forms = frozenset(_reproduced(algorithm, seed, lookup["samples"]))
    if "plain" not in forms:
        raise Refused(
            f"the engine hashes blocks with {algorithm!r} in a way that is not known here, so "
            "nothing that it stores can be found by hash"
        )
    hasher = PrefixHasher(algorithm, seed, tokens)
    return Hashing(algorithm, seed, tokens, forms, lookup["adapter_options"], hasher)


def _reproduced(algorithm: str, seed: bytes, samples: Mapping[str, str]) -> Iterable[str]:
    hasher = PrefixHasher(algorithm, seed, len(SAMPLE_BLOCKS[0]))
    tokens = [token for block in SAMPLE_BLOCKS for token in block]
    for form, prefix in (
        ("plain", hasher.prefix(tokens)),
        ("salted", hasher.prefix(tokens, cache_salt=SAMPLE_SALT)),
        ("lora", hasher.prefix(tokens, lora=SAMPLE_LORA)),
    ):
        theirs = bytes.fromhex(samples.get(form, ""))
        if theirs and theirs.ljust(len(prefix.hashes[1]), b"\0") == prefix.hashes[1]:
            yield form
