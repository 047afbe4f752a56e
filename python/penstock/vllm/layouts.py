"""The KV layout inside vLLM: which layouts the backends can address, and which one is chosen.

vLLM resolves one layout for the whole model in the engine core, from the lists that its workers
report. Penstock wraps both ends, but only acts in an engine whose connector is Penstock. A worker
then reports all layouts that its kernels can address, not only those that vLLM lists. The engine
core decides with :func:`penstock.layout.negotiate.negotiate` and logs the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.layout.negotiate import AUTO, Decision, SpecFacts, negotiate
from penstock.vllm import compat
from penstock.vllm.settings import Settings

logger = logging.getLogger("vllm.penstock")

_CPU_KERNELS = "CPU_ATTN"
_CPU_ADDS = "BLHNC"
"""vLLM's CPU attention lists only LBHNC. But its kernels take the strides of blocks and heads from
the tensor, and a cross-layer tensor differs only in the stride of blocks."""

_CPU_MLA_VIEW = (
    "vLLM's CPU kernels for MLA flatten a layer's blocks with Tensor.view, which needs each "
    "layer in one piece"
)


def reported(vllm_config: Any, listed: list[str]) -> list[str]:
    """The layouts that a worker reports, from those that vLLM's backends list."""
    if not compat.is_penstock(vllm_config):
        return listed
    backends, specs = compat.attention_backends(vllm_config), compat.own_specs(vllm_config)
    return _reported(vllm_config, backends, specs, listed)


def _reported(
    vllm_config: Any, backends: Sequence[Any], specs: Sequence[Any], listed: list[str]
) -> list[str]:
    names = list(listed)
    choosers = {b.get_name() for b in backends if not compat.takes_any_layout(b)}
    if choosers == {_CPU_KERNELS} and _CPU_ADDS not in names:
        names.append(_CPU_ADDS)
    return _without_shared(vllm_config, specs, _without_split(vllm_config, backends, names))


def _without_shared(vllm_config: Any, specs: Sequence[Any], names: list[str]) -> list[str]:
    """The layouts that remain if layers use the KV of others, and pages differ in size. In layouts
    that begin with the block, vLLM packs such pages, and then looks for pages of all layers."""
    if len({spec.page_size_bytes for spec in specs}) <= 1:
        return names
    if not compat.has_shared_layers(vllm_config):
        return names
    kept = [name for name in names if name[0] != "B"]
    if kept != names:
        logger.info(
            "Penstock: layers use the KV of others, and pages differ in size, for which vLLM needs "
            "each layer in one piece"
        )
    return kept or names


def _without_split(vllm_config: Any, backends: Sequence[Any], names: list[str]) -> list[str]:
    """The layouts that remain if vLLM has to split its blocks for the backends' kernels. vLLM does
    this in layer-compact layouts only."""
    size = vllm_config.cache_config.block_size
    kernel_size = compat.kernel_block_size(vllm_config, backends)
    if kernel_size != size:
        kept = [name for name in names if name[0] != "B"]
        if kept != names:
            logger.info(
                "Penstock: blocks of %d tokens are split for kernels that take %d, which vLLM "
                "does in layer-compact layouts only; --block-size %d allows a cross-layer one",
                size,
                kernel_size,
                kernel_size,
            )
        return kept or names
    return names


def decide(vllm_config: Any, supported: Sequence[Sequence[str]], specs: Iterable[Any]) -> None:
    """Decides the layout of an engine whose connector is Penstock, and records it where vLLM
    reads it. Leaves other engines alone, and layouts that are already decided.

    Raises:
        ConfigError: the operator asks for a layout that is not possible, or for two different ones.
    """
    is_ours = compat.is_penstock(vllm_config)
    if not is_ours or not supported or vllm_config.cache_config.kv_cache_layout is not None:
        return
    wanted = wanted_layout(vllm_config)
    # Workers of one engine run the same backends; vLLM itself checks that their lists are equal.
    decision = negotiate(spec_facts(specs), wanted, supported[0])
    logger.info("Penstock: KV layout %s: %s", decision.layout, decision.reason)
    vllm_config.cache_config.kv_cache_layout = decision.layout


def required(vllm_config: Any) -> str | None:
    """The layout to ask vLLM for in an engine core without the plugin (VLLM_PLUGINS leaves it out,
    or the package is not installed). None leaves the layout to vLLM.

    It follows the rule of :func:`decide`. So the order of heads and tokens is the same, and engines
    with and without the plugin share objects. Without the plugin, workers report only the layouts
    that vLLM lists, so `auto` asks only for one of those.

    Raises:
        ConfigError: the operator asks for two different layouts.
    """
    wanted = wanted_layout(vllm_config)
    if wanted != AUTO:
        return wanted
    backends = compat.attention_backends(vllm_config)
    listed = _without_split(vllm_config, backends, compat.listed_layouts(backends))
    try:
        specs = compat.expected_specs(vllm_config)
    except ConfigError:
        # The model keeps other kinds of state. It is refused later, so vLLM's own choice will do.
        return None
    listed = _without_shared(vllm_config, specs, listed)
    return negotiate(spec_facts(specs), AUTO, listed).layout


def explain(vllm_config: Any) -> Decision:
    """The decision of :func:`decide`, from the configuration alone. Loads no model.

    Raises:
        ConfigError: as for `decide`.
    """
    specs = compat.expected_specs(vllm_config)
    backends = compat.expected_backends(vllm_config, specs)
    listed = _reported(vllm_config, backends, specs, compat.listed_layouts(backends))
    names = [backend.get_name() for backend in backends]
    return negotiate(spec_facts(specs), wanted_layout(vllm_config), listed, names)


def wanted_layout(vllm_config: Any) -> str:
    """The operator's wish: the connector's setting, or vLLM's environment variable.

    Raises:
        ConfigError: both are set, and they differ.
    """
    transfer = vllm_config.kv_transfer_config
    setting = Settings.parse(transfer.kv_connector_extra_config).kv_layout if transfer else AUTO
    forced = compat.forced_layout()
    if forced is None:
        return setting
    if setting not in (AUTO, forced):
        raise ConfigError(
            f"the connector's kv_layout is {setting}, but VLLM_KV_CACHE_LAYOUT is {forced}: unset "
            "one of the two"
        )
    return forced


def spec_facts(specs: Iterable[Any]) -> SpecFacts:
    """The facts about the specs of all layers that decide the layout."""
    found = list(specs)
    viewed = [spec for spec in found if compat.has_layer_views(spec)]
    kinds = tuple(sorted({compat.spec_kind(spec) for spec in found}))
    lengths = sorted({spec.block_size for spec in found})
    if "mla_attention" in kinds and compat.is_cpu():
        layer_compact_because = _CPU_MLA_VIEW
    elif len(lengths) > 1:
        # Otherwise it groups layers whose specs differ, and the connector knows no such groups.
        layer_compact_because = (
            f"the model has blocks of {' and '.join(map(str, lengths))} tokens, which vLLM makes "
            "equal in layouts that keep each layer in one piece"
        )
    else:
        layer_compact_because = ""
    return SpecFacts(
        kinds=kinds,
        page_shapes=len({(s.num_heads, s.num_states, s.page_size_bytes) for s in viewed}),
        has_layer_views=len(viewed) == len(found),
        layer_compact_because=layer_compact_because,
    )


def install() -> None:
    """Wraps both ends in this process; does nothing the second time."""

    def report(vllm_config: Any, listed: Callable[[], list[str]]) -> list[str]:
        return reported(vllm_config, listed())

    compat.wrap_layout_resolution(report, decide)
