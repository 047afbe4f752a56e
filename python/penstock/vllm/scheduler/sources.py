"""Cache hit sources: where the tokens of a load come from, in vLLM's words."""

from __future__ import annotations

HOST, DISK, EXTERNAL_UNSPECIFIED = "host", "disk", "external_unspecified"
"""vLLM's names of cache hit sources. It has none for a store on the network."""

_SOURCES = {"shm": HOST, "memory": HOST, "file": DISK}


def source_of(pool: str) -> str:
    """The cache hit source of a pool, by its URL.

    >>> source_of("file:///var/cache/penstock?size=1GiB")
    'disk'
    >>> source_of("valkey://host:6379")
    'external_unspecified'

    Of several URLs with spaces between, nobody knows which one a value comes from.
    """
    sources = {_SOURCES.get(url.partition(":")[0], EXTERNAL_UNSPECIFIED) for url in pool.split()}
    return sources.pop() if len(sources) == 1 else EXTERNAL_UNSPECIFIED


def is_local(pool: str) -> bool:
    """Whether all URLs of a pool are of this machine's memory or directories.

    >>> is_local("shm://pool file:///var/cache/penstock"), is_local("shm://pool valkey://host")
    (True, False)
    """
    return all(url.partition(":")[0] in _SOURCES for url in pool.split())


def split(tokens: int, host_bytes: int, pool_bytes: int, pool: str) -> dict[str, int]:
    """Tokens of a load by their cache hit sources: in proportion to the bytes.

    >>> split(100, 3, 1, DISK)
    {'host': 75, 'disk': 25}
    >>> split(100, 3, 1, HOST)
    {'host': 100}
    """
    of_host = round(tokens * host_bytes / max(host_bytes + pool_bytes, 1))
    found = {HOST: of_host}
    found[pool] = found.get(pool, 0) + tokens - of_host
    return {source: count for source, count in found.items() if count}
