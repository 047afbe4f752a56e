"""What a model gets from Penstock, from its configuration alone: `penstock doctor --model`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.layout.negotiate import Decision
from penstock.vllm import compat, layouts
from penstock.vllm.families import Family, family_of
from penstock.vllm.names import PREFIX


@dataclass(frozen=True)
class Prospect:
    """What an engine on this machine would find in a model, and do with it."""

    kinds: tuple[str, ...]
    """The kinds of its layers, by vLLM's names."""
    family: Family | None
    """The model's row in the guide; None if nobody has tried such a model."""
    refusal: str | None
    """Why an engine with Penstock does not start with it, and what to do; None if it does."""
    layout: Decision | None
    """The model's KV layout; None if it is refused."""
    dtypes: tuple[str, ...]
    """The types of its KV, and of its states."""
    takes_images: bool


def describe(model: str, wanted_layout: str) -> Prospect:
    """What a model gets that is served with Penstock on this machine, with vLLM's defaults.

    Raises:
        ConfigError: the layout is not possible; or the configuration is not enough to tell.
    """
    transfer = {
        "kv_connector": compat.CONNECTOR,
        "kv_connector_module_path": "penstock.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            PREFIX + "pool": "memory:",
            PREFIX + "kv_layout": wanted_layout,
        },
    }
    return prospect(compat.engine_config(model, transfer))


def prospect(vllm_config: Any) -> Prospect:
    """What the model of this configuration gets.

    Raises:
        ConfigError: as for `describe`.
    """
    specs = compat.expected_specs(vllm_config)
    kinds = compat.expected_kinds(specs)
    in_each_layer = compat.attends_in_each_layer(vllm_config)
    refusal = compat.expected_refusal(vllm_config, specs)
    return Prospect(
        kinds=kinds,
        family=family_of(kinds, in_each_layer=in_each_layer),
        refusal=refusal,
        layout=layouts.explain(vllm_config) if refusal is None else None,
        dtypes=compat.expected_dtypes(specs),
        takes_images=compat.takes_images(vllm_config),
    )
