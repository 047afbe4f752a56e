"""The clients that are compared, as ways to put and to get values."""

from __future__ import annotations

import hashlib
import importlib
import select
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import penstock
from benches.shared.stores import Values, Way
from penstock._native import Store

TIMEOUT = 120.0


@dataclass(frozen=True)
class Address:
    """Where the server is: a unix socket or a loopback port."""

    kind: str
    port: int
    socket: str | None


def batches(values: Values, nbytes: int) -> list[Values]:
    """The values in batches of so many bytes, of one value at least."""
    step = max(1, nbytes // len(values[0][1]))
    return [values[i : i + step] for i in range(0, len(values), step)]


class Threads:
    """A fixed number of threads that share the work."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count)

    def run(self, work: Callable[[int, Values], None], values: Values) -> None:
        """Runs `work(thread, its share)` in every thread."""
        if self.count == 1:
            work(0, values)
            return
        shares = [(i, values[i :: self.count]) for i in range(self.count)]
        for done in [self._pool.submit(work, i, share) for i, share in shares if share]:
            done.result()

    def close(self) -> None:
        self._pool.shutdown()


def penstock_key(name: str) -> bytes:
    """A key in Penstock's fixed-width form: namespace, chunk, and a span of one layer."""
    digest = hashlib.sha256(name.encode()).digest()
    return b"penstock-benches" + digest + b"\0\0\1\0" * 2


class Penstock(Way[Values]):
    """Penstock's native store. Values have headers and checksums, and every get verifies them."""

    name = "Penstock"

    def __init__(self, url: str, threads: int = 1, batch_bytes: int = 8 << 20) -> None:
        """The checksums of the next batch overlap with the transfer of this one only if there is
        more than one thread."""
        self.setting = f"{threads} threads"
        self._store = Store.open(url)
        self._threads = Threads(threads)
        self._batch_bytes = batch_bytes

    def put(self, values: Values) -> None:
        self._threads.run(self._put_share, values)

    def get(self, values: Values) -> None:
        self._threads.run(self._get_share, values)

    def _put_share(self, _: int, values: Values) -> None:
        for batch in batches(values, self._batch_bytes):
            keyed = [(penstock_key(name), buffer) for name, buffer in batch]
            for outcome in self._store.put_many(keyed, timeout=TIMEOUT):
                if outcome is not True:
                    raise OSError(f"not stored: {outcome}")

    def _get_share(self, _: int, values: Values) -> None:
        for batch in batches(values, self._batch_bytes):
            keyed = [(penstock_key(name), buffer) for name, buffer in batch]
            found = self._store.get_many(keyed, timeout=TIMEOUT)
            for (_key, buffer), outcome in zip(keyed, found, strict=True):
                if outcome != len(buffer):
                    raise LookupError(f"{outcome} instead of {len(buffer)} bytes")

    def close(self) -> None:
        self._threads.close()


class Pool(Way[Values]):
    """Penstock's pool in Python, one call for all values."""

    name = "Penstock"

    def __init__(self, url: str) -> None:
        self._pool = penstock.open(url, timeout=TIMEOUT)

    def put(self, values: Values) -> None:
        if not all(self._pool.put_many(list(values))):
            raise OSError("not stored")

    def get(self, values: Values) -> None:
        names, buffers = map(list, zip(*values, strict=True))
        if None in self._pool.get_many(names, into=buffers):
            raise LookupError("a value is missing")

    def end(self, values: Values) -> None:
        self._pool.remove([name for name, _ in values])

    def close(self) -> None:
        self._pool.close()


class RedisPy(Way[Values]):
    """redis-py with hiredis: one connection for each thread; commands pipelined where it helps."""

    name = "redis-py + hiredis"

    def __init__(self, address: Address, threads: int, pipeline_bytes: int) -> None:
        import redis

        self.setting = f"{threads} threads" + (", pipelined" if pipeline_bytes else "")
        self._pipeline_bytes = pipeline_bytes
        self._threads = Threads(threads)
        where: dict[str, Any] = (
            {"unix_socket_path": address.socket}
            if address.socket
            else {"host": "127.0.0.1", "port": address.port}
        )
        self._connections = [redis.Redis(**where, socket_timeout=TIMEOUT) for _ in range(threads)]

    def put(self, values: Values) -> None:
        self._threads.run(self._put_share, values)

    def get(self, values: Values) -> None:
        self._threads.run(self._get_share, values)

    def _put_share(self, thread: int, values: Values) -> None:
        connection = self._connections[thread]
        for batch in batches(values, self._pipeline_bytes):
            if len(batch) == 1:
                connection.set(*batch[0])
                continue
            pipeline = connection.pipeline(transaction=False)
            for name, buffer in batch:
                pipeline.set(name, buffer)
            pipeline.execute()

    def _get_share(self, thread: int, values: Values) -> None:
        connection = self._connections[thread]
        for batch in batches(values, self._pipeline_bytes):
            if len(batch) == 1:
                found: list[Any] = [connection.get(batch[0][0])]
            else:
                pipeline = connection.pipeline(transaction=False)
                for name, _ in batch:
                    pipeline.get(name)
                found = pipeline.execute()
            for (name, buffer), value in zip(batch, found, strict=True):
                if value is None:
                    raise LookupError(name)
                buffer[:] = value

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._threads.close()


class LMCache(Way[Values]):
    """LMCache's native client: worker threads in C++ share a batch. TCP only."""

    name = "LMCache"

    def __init__(self, address: Address, workers: int) -> None:
        # By name: type checkers, and the other clients, do without the peers.
        native: Any = importlib.import_module("lmcache.lmcache_redis")

        self.setting = f"{workers} workers"
        self._client = native.LMCacheRedisClient("127.0.0.1", address.port, workers)
        self._poll = select.poll()
        self._poll.register(self._client.event_fd(), select.POLLIN)

    def put(self, values: Values) -> None:
        names, buffers = map(list, zip(*values, strict=True))
        self._wait(self._client.submit_batch_set(names, buffers))

    def get(self, values: Values) -> None:
        names, buffers = map(list, zip(*values, strict=True))
        self._wait(self._client.submit_batch_get(names, buffers))

    def _wait(self, number: int) -> None:
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            self._poll.poll(1000)
            for done, succeeded, error, _ in self._client.drain_completions():
                if done == number:
                    if not succeeded:
                        raise OSError(error)
                    return
        raise TimeoutError("LMCache's client did not answer")

    def close(self) -> None:
        self._client.close()


def open_all(address: Address) -> list[Way[Values]]:
    """Opens every client that can reach the address, with each of its settings."""
    tcp = f"{address.kind}://127.0.0.1:{address.port}"
    url = f"unix://{address.socket}" if address.socket else tcp
    clients: list[Way[Values]] = [Penstock(url, threads) for threads in (1, 2, 4)]
    clients += [RedisPy(address, threads, 0) for threads in (1, 2, 4)]
    clients.append(RedisPy(address, 1, 1 << 20))
    if address.socket is None:
        clients += [LMCache(address, workers) for workers in (1, 4, 8)]
    return clients
