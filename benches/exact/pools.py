"""Where KV is kept between engines: Penstock's pools, and the stores of other connectors."""

from __future__ import annotations

import contextlib
import os
import random
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from benches.shared.connectors import Connector
from benches.shared.peers import LMCache, Mooncake
from lab.engines.node import new_process
from lab.servers import PoolServer

ROOMY = 2 << 30
LEAST_VALUE = 2000
"""Bytes. What is shorter is a description of a namespace, not KV."""
_SERVER_BYTES = 4 << 20
"""What a Valkey server uses beside values, with some connections."""


class Pool(ABC):
    """A place for KV that outlives engines."""

    name: str

    @abstractmethod
    def start(self, folder: Path, room: int = ROOMY) -> None:
        """Begins, empty, with room for so many bytes."""

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Options of a node that uses it."""

    def stop(self) -> None:
        """Ends what was started, if it was a process."""
        return

    def evicted(self) -> int:
        """How many values it has evicted so far."""
        return 0

    def damage(self, rng: random.Random, share: float) -> int:
        """Flips a bit in this share of the values; returns how many it was."""
        raise NotImplementedError(f"{self.name}: values at rest are out of reach")


class Files(Pool):
    """A directory."""

    name = "file"

    def start(self, folder: Path, room: int = ROOMY) -> None:
        self._folder = folder / "pool"
        self._url = f"file://{self._folder}?size={room}"
        self._ever: set[Path] = set()
        self._gone: set[Path] = set()

    def options(self) -> dict[str, Any]:
        return {"pool": self._url}

    def _values(self) -> list[Path]:
        found = []
        for path in self._folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and path.stat().st_size > LEAST_VALUE:
                    found.append(path)
        return sorted(found)

    def evicted(self) -> int:
        """Values that were there when this was called before, and are no more. So it has to be
        called often, and is at most what was evicted."""
        here = set(self._values())
        self._gone |= self._ever - here
        self._ever |= here
        return len(self._gone)

    def damage(self, rng: random.Random, share: float) -> int:
        values = self._values()
        chosen = rng.sample(values, round(share * len(values)))
        for path in chosen:
            with contextlib.suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:
                place = rng.randrange(os.fstat(file.fileno()).st_size)
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        return len(chosen)


class Valkey(Pool):
    """A Valkey server over a unix socket."""

    name = "valkey"

    def start(self, folder: Path, room: int = ROOMY) -> None:
        self._server = PoolServer(
            "valkey",
            folder,
            *("--maxmemory", str(room + _SERVER_BYTES)),
            *("--maxmemory-policy", "allkeys-lru"),
        )
        self._server.start()

    def options(self) -> dict[str, Any]:
        return {"pool": self._server.unix_url}

    def stop(self) -> None:
        self._server.kill()

    def evicted(self) -> int:
        said = self._server.command("INFO", "stats")
        return int(said.partition(b"evicted_keys:")[2].partition(b"\r\n")[0])

    def damage(self, rng: random.Random, share: float) -> int:
        count = round(share * int(self._server.command("DBSIZE")[1:]))
        damaged = 0
        for _ in range(count):
            key = self._server.command("RANDOMKEY").split(b"\r\n", 1)[1][:-2]
            length = int(self._server.command("STRLEN", key)[1:])
            if length <= LEAST_VALUE:
                continue
            place = str(rng.randrange(length))
            byte = self._server.command("GETRANGE", key, place, place).split(b"\r\n", 1)[1][0]
            self._server.command("SETRANGE", key, place, bytes([byte ^ 1 << rng.randrange(8)]))
            damaged += 1
        return damaged


class Peer(Pool):
    """The store of another connector, as its documentation sets it up."""

    def __init__(self, name: str, connector: Connector) -> None:
        self.name = name
        self._connector = connector

    def start(self, folder: Path, room: int = ROOMY) -> None:
        self._connector.start(folder)

    def options(self) -> dict[str, Any]:
        return {
            "kv_transfer_config": self._connector.transfer(),
            "env": self._connector.environment(),
            # Their threads and libraries need not stand a fork.
            "launch": new_process,
        }

    def stop(self) -> None:
        self._connector.stop()


POOLS = ("file", "valkey")
PEERS = ("lmcache", "mooncake")


def named(name: str) -> Pool:
    """A pool of this name, not started yet."""
    match name:
        case "file":
            return Files()
        case "valkey":
            return Valkey()
        case "lmcache":
            return Peer(name, LMCache(redis=False))
        case "mooncake":
            return Peer(name, Mooncake())
    raise ValueError(f"no pool is named {name}: choose one of {POOLS + PEERS}")
