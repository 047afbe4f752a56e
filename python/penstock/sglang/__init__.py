"""Penstock inside SGLang: a storage backend for HiCache, over any of Penstock's pools.

SGLang loads it by name: ``--hicache-storage-backend dynamic``, with ``"module_path":
"penstock.sglang"`` and ``"class_name": "PenstockStorage"``. The backend (:mod:`.backend`) speaks
SGLang's interface. :mod:`.pages` finds the bytes of a page in SGLang's host memory. :mod:`.facts`
names what must agree before two engines share pages. :mod:`.store` moves pages and never raises.
:mod:`.compat` has what is used of SGLang beside its interface.
"""

from typing import Any

__all__ = ["PenstockStorage"]


def __getattr__(name: str) -> Any:
    # The class derives from SGLang's. The rest of this room works where SGLang is not installed.
    if name == "PenstockStorage":
        from penstock.sglang.backend import PenstockStorage

        return PenstockStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
