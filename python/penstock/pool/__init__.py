"""A pool of values for programs without an engine: see :class:`Pool` and :class:`AsyncPool`.

Authors of stores write a :class:`PythonStore`.
"""

from penstock._native import find_stores_with, parse_size
from penstock.pool.asynchronous import AsyncPool, open_async
from penstock.pool.namespace import namespace_digest, publish_namespace, read_namespace
from penstock.pool.pool import (
    CONNECT_TIMEOUT,
    POOL_VARIABLE,
    Entry,
    NamespaceUsage,
    Pool,
    open,
)
from penstock.pool.registry import (
    RegisteredStore,
    is_registered,
    programs,
    registered_stores,
)
from penstock.pool.store import Get, Listed, Put, PythonStore

__all__ = [
    "CONNECT_TIMEOUT",
    "POOL_VARIABLE",
    "AsyncPool",
    "Entry",
    "Get",
    "Listed",
    "NamespaceUsage",
    "Pool",
    "Put",
    "PythonStore",
    "RegisteredStore",
    "is_registered",
    "namespace_digest",
    "open",
    "open_async",
    "parse_size",
    "publish_namespace",
    "read_namespace",
    "registered_stores",
]

find_stores_with(programs)
