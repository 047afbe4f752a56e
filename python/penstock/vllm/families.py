"""Families of models, by the kinds of their layers: what is served, refused, and was tried.

This table is the only one: `penstock doctor --model` and the engine's log name its rows, and a test
holds the tables of docs/guides/models.md against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.vllm.groups import Groups

TRIED = ("float32", "bfloat16", "float16", "FP8", "TP", "PP", "TP and PP", "DP")
"""Types of KV, and ways to divide a model over devices: tensor- and pipeline-parallel ranks,
both, data-parallel ranks."""

NOT_TRIED = "not tried"
ON_GPU = "not confirmed"
"""What is said of every family on a GPU."""


@dataclass(frozen=True)
class Family:
    """Models whose layers are of the same kinds."""

    layers: str
    examples: str
    kinds: frozenset[str]
    """vLLM's names for the kinds of layers. Layers that keep a state have the name of the state."""
    on_cpu: str
    """What vLLM's CPU build and Penstock do."""
    shown_by: str = ""
    """The test; empty if there is none."""
    is_refused: bool = False
    in_each_layer: bool = False
    """Whether every layer both attends and keeps a state."""
    tried: Mapping[str, str] = field(default_factory=dict)
    """Item of :data:`TRIED` → the test or measurement that shows it."""

    @property
    def keeps_state(self) -> bool:
        """Whether some layers keep a state."""
        return bool(self.kinds & _STATES)

    @property
    def speculation(self) -> str:
        """What speculative decoding does beside it."""
        if self.keeps_state:
            return "refused, with layers that keep a state"
        if self.kinds == {"full_attention"}:
            return "n-grams, EAGLE, EAGLE-3, MTP and draft models work"
        return "n-grams work; EAGLE, MTP and draft models were not tried"

    def how(self, what: str) -> str:
        """What shows one of :data:`TRIED`, or that nothing does."""
        return self.tried.get(what, NOT_TRIED)


_STATES = frozenset({"mamba1", "mamba2", "short_conv", "gdn_attn", "linear"})

_KV_TYPES, _PARALLEL = "tests/e2e/test_kv_types.py", "tests/e2e/test_parallel.py"
_MLA, _WINDOWS, _STATE = (f"tests/e2e/test_{name}.py" for name in ("mla", "hybrid", "states"))
_IDENTITY = "tests/e2e/test_identity.py"

FAMILIES = (
    Family(
        "full attention: MHA, GQA, MQA",
        "Llama, Qwen3, Mistral",
        frozenset({"full_attention"}),
        "works",
        "tests/e2e/test_sharing.py",
        tried={
            "float32": "tests/e2e/test_sharing.py",
            "bfloat16": _KV_TYPES,
            "float16": _KV_TYPES,
            "FP8": _KV_TYPES,
            "TP": _PARALLEL,
            "PP": _PARALLEL,
            "TP and PP": _PARALLEL,
        },
    ),
    Family(
        "MLA",
        "DeepSeek-V2 and V3",
        frozenset({"mla_attention"}),
        "works",
        _MLA,
        tried={"float32": _MLA, "bfloat16": _MLA, "TP": _MLA},
    ),
    Family(
        "full attention and sliding windows",
        "Gemma 2, 3 and 4",
        frozenset({"full_attention", "sliding_window"}),
        "works",
        _WINDOWS,
        tried={"float32": _WINDOWS, "PP": "tests/e2e/test_pipeline_memory.py"},
    ),
    Family(
        "full attention and short convolutions",
        "LFM2",
        frozenset({"full_attention", "short_conv"}),
        "works",
        _STATE,
        tried={"float32": _STATE, "bfloat16": "docs/benchmarks/accuracy.md"},
    ),
    Family(
        "full attention and gated delta net",
        "Qwen3-Next",
        frozenset({"full_attention", "gdn_attn"}),
        "works, in bfloat16",
        _STATE,
        tried={"bfloat16": _STATE},
    ),
    Family(
        "full attention and Mamba-2",
        "Granite 4, Nemotron-H",
        frozenset({"full_attention", "mamba2"}),
        "works, in steps of a block",
        _STATE,
        tried={"float32": _STATE, "TP": _STATE},
    ),
    Family(
        "full attention and Mamba-2, both in each layer",
        "Falcon-H1",
        frozenset({"full_attention", "mamba2"}),
        "works, in steps of a block",
        _STATE,
        in_each_layer=True,
        tried={"float32": _STATE},
    ),
    Family(
        "full attention and Mamba-1",
        "Jamba",
        frozenset({"full_attention", "mamba1"}),
        "vLLM has no CPU kernels for it",
        "tests/e2e/test_doctor_agrees.py",
    ),
    Family(
        "chunks",
        "Llama 4",
        frozenset({"chunked_local_attention"}),
        "refused",
        _IDENTITY,
        is_refused=True,
    ),
    Family(
        "cross attention",
        "Whisper",
        frozenset({"cross_attention"}),
        "refused",
        _IDENTITY,
        is_refused=True,
    ),
    Family(
        "sparse attention, with an index of each token",
        "DeepSeek-V3.2",
        frozenset({"indexer"}),
        "refused",
        _IDENTITY,
        is_refused=True,
    ),
    Family(
        "sinks that vLLM keeps apart",
        "openPangu",
        frozenset({"sink_full_attention"}),
        "refused",
        _IDENTITY,
        is_refused=True,
    ),
)


def family_of(kinds: Iterable[str], *, in_each_layer: bool = False) -> Family | None:
    """The family of a model with layers of these kinds; None if nobody has tried such a model. Of a
    refused family one kind is enough.

    >>> family_of(["full_attention", "sliding_window"]).examples
    'Gemma 2, 3 and 4'
    >>> family_of(["full_attention", "cross_attention"]).on_cpu
    'refused'
    >>> family_of(["mla_attention", "sliding_window"]) is None
    True
    """
    found = frozenset(kinds)
    for family in FAMILIES:
        if family.is_refused and family.kinds & found:
            return family
    for family in FAMILIES:
        if family.kinds == found and family.in_each_layer == in_each_layer:
            return family
    return None


def kinds_of(groups: Groups) -> tuple[str, ...]:
    """The kinds of the layers that an engine transfers, each once."""
    found = (group.kind if group.state is None else group.state.kind for group in groups)
    return tuple(sorted(set(found)))
