"""A pool of values for programs without an engine: see :class:`Pool` and :class:`AsyncPool`."""

from penstock.pool.asynchronous import AsyncPool, open_async
from penstock.pool.namespace import namespace_digest, publish_namespace, read_namespace
from penstock.pool.pool import POOL_VARIABLE, Entry, NamespaceUsage, Pool, open

__all__ = [
    "POOL_VARIABLE",
    "AsyncPool",
    "Entry",
    "NamespaceUsage",
    "Pool",
    "namespace_digest",
    "open",
    "open_async",
    "publish_namespace",
    "read_namespace",
]
