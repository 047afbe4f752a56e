"""Mooncake's store as a pool: ``mooncake://master-host:50051``.

It needs the package ``mooncake-transfer-engine``, or ``mooncake-transfer-engine-non-cuda``. It runs
as every :class:`~penstock.pool.PythonStore` does. Values lie in the memory that Mooncake's clients
lend to its store: this one lends none.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from penstock._native import parse_size
from penstock.errors import (
    ConfigError,
    Full,
    PenstockError,
    StoreError,
    TooSmall,
    Unavailable,
    Unreachable,
    Unsupported,
)
from penstock.pool.store import Get, Listed, Put, PythonStore

__all__ = ["MooncakeStore"]

_PORT = 50051
_SCHEMES = "mooncake://HOST[:PORT][?protocol=tcp&metadata=P2PHANDSHAKE&device=&host=&buffer=256MiB]"
_RETRY_SECONDS = 1.0

# Mooncake's numbers for what can go wrong.
_NOT_THERE = -704
_NO_ROOM = -200
_RPC_FAILED = -900


class MooncakeStore(PythonStore):
    """A client of Mooncake's master and of the processes that hold its memory.

    A value gets one more byte at its end, as Mooncake keeps no empty ones. What Mooncake cannot do
    is list what it has.
    """

    shared = True
    persistent = True
    bounded = True
    pipelined = True

    def __init__(self, url: str) -> None:
        # What fails is said to us in codes. Its log would repeat it, line by line.
        os.environ.setdefault("GLOG_minloglevel", "3")
        try:
            self._native: Any = importlib.import_module("mooncake.store")
        except ImportError as error:
            raise ConfigError(
                f"a Mooncake pool needs the package mooncake-transfer-engine, or on machines "
                f"without CUDA mooncake-transfer-engine-non-cuda: {error}"
            ) from error
        self._settings = _Settings(url)
        self.shown_url = f"mooncake://{self._settings.master}"
        self.max_value_bytes = self._settings.buffer_bytes - 1
        self._memory = _Memory(self._settings.buffer_bytes)
        self._client: Any = None
        self._not_before = 0.0

    def contains(self, keys: Sequence[bytes], timeout: float) -> list[bool]:
        codes = self._connected().batch_is_exist([key.hex() for key in keys])
        for code in codes:
            if code < 0:
                raise _error(code, "looking up")
        return [code == 1 for code in codes]

    def put_many(self, batch: Sequence[Put], timeout: float) -> list[bool | StoreError]:
        outcomes: list[bool | StoreError] = []
        for part in self._parts([len(put.value) + 1 for put in batch]):
            outcomes += self._put(batch[part])
        return outcomes

    def get_many(
        self, batch: Sequence[Get], timeout: float
    ) -> list[bytes | memoryview | PenstockError | None]:
        outcomes: list[bytes | memoryview | PenstockError | None] = []
        rooms = [min(get.room, self.max_value_bytes) + 1 for get in batch]
        parts = self._parts(rooms)
        for part in parts:
            got = self._get(batch[part], rooms[part])
            # The memory is needed again for the next part.
            keep = bytes if len(parts) > 1 else memoryview
            outcomes += [keep(one) if isinstance(one, memoryview) else one for one in got]
        return outcomes

    def remove(self, keys: Sequence[bytes], timeout: float) -> int:
        # With force: a value that was just read is held for seconds otherwise. Whoever reads it
        # meanwhile may get other bytes, which do not verify.
        codes = self._connected().batch_remove([key.hex() for key in keys], True)
        for code in codes:
            if code not in (0, _NOT_THERE):
                raise _error(code, "removing")
        return sum(code == 0 for code in codes)

    def list_objects(self, namespace: bytes | None, timeout: float) -> Iterable[Listed]:
        raise Unsupported("Mooncake's store does not list what it has")

    def describe(self, timeout: float) -> dict[str, object]:
        self.contains([b"\0" * 56], timeout)
        return {"master": self._settings.master, "protocol": self._settings.protocol}

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _connected(self) -> Any:
        """The client, which is made when it is needed first.

        Raises:
            Unreachable: the master does not answer.
        """
        if self._client is None:
            if time.monotonic() < self._not_before:
                raise Unreachable(f"Mooncake's master does not answer: {self._settings.master}")
            client = self._native.MooncakeDistributedStore()
            wanted = self._settings
            status = client.setup(
                wanted.local_host(),
                wanted.metadata,
                0,
                wanted.buffer_bytes,
                wanted.protocol,
                wanted.device,
                wanted.master,
            )
            if status == 0:
                status = client.register_buffer(self._memory.address, wanted.buffer_bytes)
            if status != 0:
                self._not_before = time.monotonic() + _RETRY_SECONDS
                raise Unreachable(
                    f"Mooncake's master does not answer: {wanted.master} (code {status})"
                )
            self._client = client
        return self._client

    def _parts(self, sizes: Sequence[int]) -> list[slice]:
        """Cuts a batch so that each part's values fit into the memory."""
        parts, start, used = [], 0, 0
        for index, size in enumerate(sizes):
            if used + size > self._settings.buffer_bytes:
                parts.append(slice(start, index))
                start, used = index, 0
            used += size
        return [*parts, slice(start, len(sizes))]

    def _put(self, batch: Sequence[Put]) -> list[bool | StoreError]:
        client = self._connected()
        outcomes: list[bool | StoreError] = [False] * len(batch)
        names = [put.key.hex() for put in batch]
        new = []
        for index, code in enumerate(client.batch_is_exist(names)):
            nbytes = len(batch[index].value) + 1
            if code < 0:
                outcomes[index] = _error(code, "looking up")
            elif code == 0:
                new.append(index)
            elif client.get_size(names[index]) != nbytes:
                # A put would keep what is there.
                client.remove(names[index], True)
                new.append(index)
        at, addresses = 0, []
        for index in new:
            addresses.append(self._memory.address + at)
            at += self._memory.write(at, batch[index].value)
        sizes = [len(batch[index].value) + 1 for index in new]
        codes = client.batch_put_from([names[index] for index in new], addresses, sizes)
        for index, code in zip(new, codes, strict=True):
            outcomes[index] = True if code == 0 else _error(code, "putting")
        return outcomes

    def _get(
        self, batch: Sequence[Get], rooms: Sequence[int]
    ) -> list[memoryview | PenstockError | None]:
        client = self._connected()
        starts, at = [], 0
        for room in rooms:
            starts.append(at)
            at += room
        names = [get.key.hex() for get in batch]
        addresses = [self._memory.address + start for start in starts]
        codes = client.batch_get_into(names, addresses, list(rooms))
        return [
            self._memory.read(start, code - 1)
            if code > 0
            else None
            if code == _NOT_THERE
            else self._why_not(name, get, code)
            for name, get, start, code in zip(names, batch, starts, codes, strict=True)
        ]

    def _why_not(self, name: str, get: Get, code: int) -> PenstockError | None:
        size = self._connected().get_size(name)
        if size > get.room + 1:
            return TooSmall("the value does not fit", size - 1)
        return None if size == _NOT_THERE else _error(code, "getting")


class _Settings:
    """What the URL says.

    Raises:
        ConfigError: it is not a Mooncake pool's.
    """

    def __init__(self, url: str) -> None:
        wrong = ConfigError(f"a Mooncake pool is {_SCHEMES}")
        try:
            parts = urlsplit(url)
            options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=False))
            port = parts.port or _PORT
        except ValueError:
            raise wrong from None
        if not parts.hostname or parts.username or parts.path not in ("", "/"):
            raise wrong
        self.host = parts.hostname
        self.port = port
        self.protocol = options.pop("protocol", "tcp")
        self.metadata = options.pop("metadata", "P2PHANDSHAKE")
        self.device = options.pop("device", "")
        self._local = options.pop("host", "")
        self.buffer_bytes = parse_size(options.pop("buffer", "256MiB"))
        if options or self.buffer_bytes < 1 << 20:
            raise wrong

    @property
    def master(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def local_host(self) -> str:
        """This machine's address, as those see it who see the master.

        Raises:
            Unreachable: the master's name has no address.
        """
        if self._local:
            return self._local
        try:
            family, kind, _, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            raise Unreachable(f"no way to {self.host}: {error.strerror}") from error


class _Memory:
    """Memory that Mooncake transfers from and to."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self._view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def write(self, at: int, value: memoryview) -> int:
        """Writes a value with its last byte; returns how many bytes that are."""
        end = at + len(value)
        self._view[at:end] = value
        self._view[end] = 0
        return len(value) + 1

    def read(self, at: int, nbytes: int) -> memoryview:
        return self._view[at : at + nbytes]


def _error(code: int, doing: str) -> StoreError:
    message = f"Mooncake failed in {doing}, code {code}"
    if code == _NO_ROOM:
        return Full(message)
    return Unreachable(message) if code == _RPC_FAILED else Unavailable(message)
