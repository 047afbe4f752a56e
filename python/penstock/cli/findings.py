"""Findings about a pool: what its settings mean for KV caching, and what to change."""

from __future__ import annotations

import ipaddress
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import parse_qs, urlsplit

from penstock._native import EncryptionKeys
from penstock.cli import words
from penstock.vllm import lookup_limit

Level = Literal["ok", "note", "warn", "fail"]
"""`note`: may be as wanted. `warn`: should be changed. `fail`: the pool cannot serve."""

_MEMORY_SHARE = 0.75
_SMALL_VALUE_BYTES = 64 << 20

_NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "ceph", "glusterfs", "lustre", "gpfs", "9p")


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    level: Level
    message: str
    advice: str = ""
    """What to do next, if anything."""


def of_url(url: str) -> Iterator[Finding]:
    """Findings about the connection to the server. The URL is without credentials."""
    parts = urlsplit(url)
    scheme, _, topology = parts.scheme.partition("+")
    if scheme not in ("redis", "valkey") or topology == "unix":
        return
    hosts = [_host(place) for place in parts.netloc.split(",")]
    if not all(_is_this_machine(host) for host in hosts):
        yield Finding(
            "encryption",
            "warn",
            f"KV goes to {', '.join(hosts)} without TLS: who can read the network can read prompts "
            "from it",
            f"use TLS ({scheme}s{'+' if topology else ''}{topology}://), or keep the pool on a "
            "network that only the engines are in",
        )
    elif not topology:
        yield Finding(
            "transport",
            "note",
            "TCP to this machine",
            "a unix socket is faster here: `unixsocket /path.sock` in the server's configuration, "
            "then unix:///path.sock",
        )


def of_round_trip(seconds: float) -> Finding:
    """What the round trip to the pool, in seconds, means for engines' look-ups."""
    message = f"median {words.milliseconds(seconds)}"
    limit = lookup_limit.needed(seconds)
    nearer = "a pool nearer to the engines"
    if lookup_limit.TIMES * seconds > lookup_limit.LONGEST:
        least = math.ceil(lookup_limit.TIMES * seconds)
        return Finding(
            "round trip",
            "warn",
            f"{message}: look-ups may take {limit:.2g} s at most, which is too short for it",
            f"{nearer}; or penstock.lookup_timeout={least} and a longer penstock.load_timeout",
        )
    if limit > lookup_limit.FIRST:
        return Finding(
            "round trip",
            "note",
            f"{message}: far away. Engines wait {limit:.2g} s for a look-up, if its load pays",
            f"{nearer} makes more loads worth it",
        )
    return Finding("round trip", "ok", message)


def is_object_store(url: str) -> bool:
    """Whether a pool's URL names an object store."""
    return url.partition(":")[0] in ("s3", "gs", "az")


def of_object_store(url: str, facts: Mapping[str, str]) -> Iterator[Finding]:
    """Findings about a pool in an object store, from what the bucket tells. The URL is without
    credentials."""
    endpoint = parse_qs(urlsplit(url).query).get("endpoint", ["https:"])[0]
    if endpoint.startswith("http:") and not _is_this_machine(urlsplit(endpoint).hostname or ""):
        yield Finding(
            "encryption",
            "warn",
            "KV goes over the network without TLS: who can read the network can read prompts from "
            "it",
            "an endpoint with https://",
        )
    yield from _lifetime(facts)
    if words.number(facts, "damaged_packs"):
        yield Finding(
            "packs",
            "warn",
            f"{facts['damaged_packs']} objects are damaged, and nothing is loaded from them",
            "delete them, or leave them to the bucket's rules",
        )
    yield Finding(
        "round trip",
        "note",
        "a look-up of what is known makes no request; what others put is found a second later",
    )


def _lifetime(facts: Mapping[str, str]) -> Iterator[Finding]:
    days = facts.get("expire_days")
    if days is None:
        yield Finding(
            "expiry",
            "note",
            "the bucket does not tell its rules to these credentials",
            "make sure that a rule expires old objects, as nothing else bounds this pool",
        )
    elif days == "never":
        yield Finding(
            "expiry",
            "warn",
            "no rule of the bucket expires old objects: the pool grows without end",
            "a lifecycle rule for the prefix: Expiration after 7 days, "
            "AbortIncompleteMultipartUpload after 1",
        )
    else:
        yield Finding("expiry", "ok", f"objects expire after {days} days")
    if days is not None and facts.get("parts_days") == "never":
        yield Finding(
            "unfinished uploads",
            "note",
            "no rule deletes the parts of uploads that never ended",
            "a lifecycle rule: AbortIncompleteMultipartUpload after 1 day",
        )


def _host(place: str) -> str:
    return urlsplit(f"//{place}").hostname or ""


def of_keys(keys: EncryptionKeys) -> Finding:
    """The encryption keys, with fingerprints by which machines can be compared."""
    (first, fingerprint), *others = keys.fingerprints
    also = "".join(f", also {name} ({mark})" for name, mark in others)
    return Finding("keys", "ok", f"encrypts with {first} ({fingerprint}){also}")


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def of_server(facts: Mapping[str, str]) -> Iterator[Finding]:
    """Findings about a Valkey or Redis server, from its own report."""
    yield _version(facts)
    yield from _state(facts)
    if not any(name.startswith("config:") for name in facts):
        yield Finding(
            "settings",
            "note",
            "the server does not let this user read its settings; some checks are left out",
            "grant +config|get to this user, or ask the server's operator",
        )
    yield from _memory(facts)
    yield from _persistence(facts)
    yield from _threads(facts)
    longest = words.number(facts, "config:proto-max-bulk-len")
    if longest is not None and longest < _SMALL_VALUE_BYTES:
        yield Finding(
            "value size",
            "warn",
            f"values may have {words.size(longest)} at most",
            "CONFIG SET proto-max-bulk-len 512mb",
        )


def _version(facts: Mapping[str, str]) -> Finding:
    for name in ("valkey", "redis"):
        version = facts.get(f"{name}_version")
        if version:
            mode = facts.get(f"{name}_mode") or facts.get("server_mode") or "standalone"
            return Finding("server", "ok", f"{name.capitalize()} {version}, {mode}")
    return Finding("server", "note", "a server that does not tell its version")


def _state(facts: Mapping[str, str]) -> Iterator[Finding]:
    if facts.get("loading") == "1":
        yield Finding(
            "state", "fail", "the server is loading its data set", "wait until it has, then retry"
        )
    if facts.get("role") in ("slave", "replica"):
        primary = facts.get("master_host", "?")
        yield Finding(
            "state",
            "fail",
            "this server is a read-only replica",
            f"use its primary, {primary}:{facts.get('master_port', '?')}",
        )


def _memory(facts: Mapping[str, str]) -> Iterator[Finding]:
    limit = words.number(facts, "config:maxmemory", "maxmemory")
    used = words.number(facts, "used_memory")
    policies = facts.get("config:maxmemory-policy") or facts.get("maxmemory_policy") or ""
    # A cluster's nodes may differ. The worst one matters.
    policy = min(policies.split(" | "), key=lambda each: each.startswith("allkeys-"))
    if limit == 0:
        total = words.number(facts, "total_system_memory") or 0
        share = f"{int(total * _MEMORY_SHARE) >> 20}mb" if total else "64gb"
        yield Finding(
            "memory",
            "warn",
            f"no maxmemory: the server grows (now {words.size(used or 0)}) until it is killed",
            f"CONFIG SET maxmemory {share}",
        )
    elif limit is not None:
        yield Finding("memory", "ok", f"{words.size(used or 0)} used of {words.size(limit)}")
    if policy.startswith("allkeys-"):
        yield Finding("eviction", "ok", f"{policy}: a full pool makes room by itself")
    elif policy:
        why = (
            "a full pool refuses new blocks"
            if policy == "noeviction"
            else "it evicts only keys that expire, which Penstock's do not"
        )
        full = bool(limit) and used is not None and used >= (limit or 0)
        yield Finding(
            "eviction",
            "fail" if full else "warn",
            f"maxmemory-policy is {policy}: {why}" + (", and it is full now" if full else ""),
            "CONFIG SET maxmemory-policy allkeys-lru",
        )


def _persistence(facts: Mapping[str, str]) -> Iterator[Finding]:
    saves = facts.get("config:save", "")
    if saves:
        yield Finding(
            "snapshots",
            "warn",
            f'save is "{saves}": every snapshot forks the server, which stalls it and may take '
            "twice its memory",
            'CONFIG SET save ""',
        )
    if facts.get("config:appendonly") == "yes" or facts.get("aof_enabled") == "1":
        yield Finding(
            "append-only file",
            "warn",
            "appendonly is yes: every block is written to disk as well",
            "CONFIG SET appendonly no",
        )
    elif not saves and "config:save" in facts:
        yield Finding("persistence", "ok", "off, as a cache wants it")


def _threads(facts: Mapping[str, str]) -> Iterator[Finding]:
    threads = facts.get("config:io-threads")
    if threads == "1":
        yield Finding(
            "io-threads",
            "note",
            "one thread reads and writes all sockets: about 4 GiB/s at most",
            "on a machine with 4 cores or more, `io-threads 4` in the server's configuration",
        )
    elif threads:
        yield Finding("io-threads", "ok", threads)


def of_directory(facts: Mapping[str, str]) -> Iterator[Finding]:
    """Findings about a directory pool, from its own report and from its file system."""
    path = Path(facts["path"])
    capacity, free = int(facts["capacity_bytes"]), int(facts["disk_free_bytes"])
    used = words.number(facts, "used_bytes")
    yield Finding(
        "capacity", "ok", f"{words.size(used or 0)} used of {words.size(capacity)}, shared by all"
    )
    if free < capacity - (used or 0):
        yield Finding(
            "free space",
            "warn",
            f"the disk has {words.size(free)} free, less than the pool may still take",
            f"a smaller bound: ?size={max(1, (free + (used or 0)) * 9 // 10 >> 20)}MiB",
        )
    yield from _filesystem(mount_of(path), facts["hosts"] == "several")
    yield _permissions(path)


def of_shared_memory(facts: Mapping[str, str]) -> Iterator[Finding]:
    """Findings about a pool in shared memory, from its own report."""
    capacity, used = int(facts["capacity_bytes"]), int(facts["used_bytes"])
    yield Finding("capacity", "ok", f"{words.size(used)} used of {words.size(capacity)}")
    yield Finding(
        "memory",
        "note",
        f"{words.size(int(facts['size_bytes']))} of this machine, set aside whether used or not, "
        "empty after a restart",
        f"`rm {facts['path']}` gives them back once nobody needs the pool",
    )
    yield _permissions(Path(facts["path"]))


class Mount(NamedTuple):
    """A file system as it is mounted here."""

    kind: str
    """The file system's type; empty if it is not known."""
    options: frozenset[str]


def mount_of(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> Mount:
    """The mount that holds a path."""
    path = path.resolve()
    best, found = -1, Mount("", frozenset())
    try:
        lines = mountinfo.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        mount, _, source = line.partition(" - ")
        # The file writes spaces and the like as octal escapes.
        point = Path(mount.split()[4].encode().decode("unicode_escape"))
        # If one point has several mounts, the last one counts.
        if path.is_relative_to(point) and len(point.parts) >= best:
            options = f"{mount.split()[5]},{source.split()[2]}".split(",")
            best, found = len(point.parts), Mount(source.split()[0], frozenset(options))
    return found


def _filesystem(mount: Mount, is_shared: bool) -> Iterator[Finding]:
    kind = mount.kind
    is_on_network = kind in _NETWORK_FILESYSTEMS or kind.startswith("fuse")
    if is_shared:
        yield Finding(
            "file system",
            "ok" if is_on_network else "note",
            f"{kind}: shared by all hosts that have mounted it, without locks between them. Each "
            "counts what the others put every ten seconds; until then the bound may be exceeded",
            "" if is_on_network else "hosts=several is for file systems that other hosts mount",
        )
        if kind in ("nfs", "nfs4") and not mount.options & {"soft", "softerr"}:
            yield Finding(
                "mount",
                "warn",
                "hard: a server that hangs holds this pool's threads until it answers. Engines "
                "compute meanwhile, but cannot end",
                "mount it with softerr,timeo=50,retrans=1: a read that breaks off costs a hit, as "
                "every value is verified",
            )
    elif is_on_network:
        yield Finding(
            "file system",
            "warn",
            f"{kind}, as one machine's alone (hosts=one): other hosts' values in the making may be "
            "removed",
            "leave hosts=one out of the URL",
        )
    else:
        yield _local(kind)


def _local(kind: str) -> Finding:
    if kind == "tmpfs":
        return Finding(
            "file system",
            "note",
            "tmpfs: fast, takes memory of this machine, empty after a restart",
            "make sure that the bound leaves memory for the engines",
        )
    if kind == "overlay":
        return Finding(
            "file system",
            "note",
            "overlay: gone with the container, and seen by it alone",
            "mount a volume there to share the pool or keep it",
        )
    return Finding("file system", "ok", kind or "of unknown type")


def _permissions(path: Path) -> Finding:
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IXOTH):
        return Finding(
            "permissions",
            "warn",
            f"every user of this machine may enter it (mode {mode:o}), and prompts can be read "
            "from KV",
            f"chmod o-rwx {path}",
        )
    owner = "yours" if status.st_uid == os.geteuid() else f"of user {status.st_uid}"
    return Finding("permissions", "ok", f"mode {mode:o}, {owner}")
