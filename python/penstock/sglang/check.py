"""What `penstock doctor --sglang` finds out: whether this SGLang can be served, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.errors import PenstockError
from penstock.sglang import compat

IN_PLACE, COPIED = "in place", "copied"
NOT_TRIED = "not tried"
LAYOUTS = ("page_first", "layer_first", "page_first_direct", "page_head")
"""SGLang's values of --hicache-mem-layout, but for those of single devices."""

_PAGE = 4


@dataclass
class Finding:
    """What there is of SGLang."""

    version: str | None
    is_tested: bool
    """Whether Penstock's tests run with this version."""
    violations: list[str] = field(default_factory=list)
    """What Penstock needs and does not find; each is a sentence."""
    layouts: dict[str, str] = field(default_factory=dict)
    """Layout of host memory → how pages move: :data:`IN_PLACE`, :data:`COPIED`, or why not. If
    SGLang has no such host pool here, it begins with :data:`NOT_TRIED`, and is no violation."""


def examine() -> Finding:
    """Imports SGLang, has its factory make the backend, and moves a page in each layout."""
    found = Finding(compat.version(), compat.is_tested(), compat.violations())
    if found.violations:
        return found
    try:
        for layout in LAYOUTS:
            found.layouts[layout] = _moved(layout)
    except Exception as error:
        # Whatever SGLang's own parts raise is what the operator has to hear of.
        found.violations.append(f"SGLang's storage factory does not take the backend: {error!r}")
    found.violations += _broken(found.layouts)
    return found


def _broken(layouts: dict[str, str]) -> list[str]:
    """A sentence for each layout in which no page moves; one, too, if none could be tried."""
    broken = [
        f"layout {layout}: {how}"
        for layout, how in layouts.items()
        if how not in (IN_PLACE, COPIED) and not how.startswith(NOT_TRIED)
    ]
    if layouts and all(how.startswith(NOT_TRIED) for how in layouts.values()):
        broken.append(
            "no layout of host memory could be tried, so nothing shows that pages come back: use a "
            f"tested version of SGLang ({', '.join(compat.SUPPORTED)})"
        )
    return broken


def _moved(layout: str) -> str:
    """Moves a page of a small host pool through the backend, as SGLang's factory makes it."""
    import torch
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    try:
        host = _host_pool(layout)
    except (AttributeError, TypeError, ValueError) as error:
        return f"{NOT_TRIED}: {error}"
    made = StorageBackendFactory.create_backend("dynamic", _storage_config(), host)
    try:
        made.register_mem_pool_host(host)
    except PenstockError as error:
        return str(error)
    memory = host.kv_buffer.view(torch.uint8)
    memory.random_(0, 256)
    page = host.get_data_page(0).clone().view(torch.uint8)
    indices = torch.arange(_PAGE)
    if made.batch_set_v1(["page"], indices) != [True]:
        return "a page was not stored"
    memory.zero_()
    if made.batch_get_v1(["page"], indices) != [True]:
        return "a page did not come back"
    if not torch.equal(host.get_data_page(0).view(torch.uint8), page):
        return "a page came back with other bytes"
    return IN_PLACE if made.moves_in_place() else COPIED


def _host_pool(layout: str) -> Any:
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls

    pool = MHATokenToKVPool(4 * _PAGE, _PAGE, torch.bfloat16, 2, 8, 2, "cpu", False)
    info = pool.get_device_pool_infos()[0].buffer_info
    with host_memory_budget_scope(1 << 20):
        return get_mha_host_pool_cls(info)(
            info,
            2.0,
            0,
            _PAGE,
            layout,
            pin_memory=False,
            device_capacity_tokens=pool.size,
            start_layer=pool.start_layer,
            end_layer=pool.end_layer,
        )


def _storage_config() -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="penstock doctor",
        extra_config={
            "backend_name": "penstock",
            "module_path": "penstock.sglang",
            "class_name": "PenstockStorage",
            "interface_v1": 1,
            "pool": "memory://?size=1MiB",
            "model_id": "penstock doctor",
        },
    )
