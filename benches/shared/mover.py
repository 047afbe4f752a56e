"""A load for benches: an engine that stores and loads blocks at full rate."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

from benches.shared.layouts import Shape, describe
from penstock._native import Blocks, Buffer, Engine, Event, Outcome, Store
from penstock.errors import StoreError
from penstock.pool.namespace import namespace_digest

_SHAPE = Shape(layers=16, heads=8, tokens=16, content_bytes=512, blocks=64)
"""Blocks of 1 MiB."""
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


def seconds_queued() -> float:
    """Seconds in which this thread was ready to run but did not run (proc(5), `schedstat`)."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except OSError:
        # This kernel does not keep the figure.
        return 0.0


class _Half:
    """Every other block, in a namespace of its own."""

    def __init__(self, group: int, salt: str) -> None:
        self.group = group
        self.namespace = namespace_digest(
            {"kind": "penstock bench mover", "run": salt, "half": group}
        )
        self.blocks = Blocks(
            [
                (group, block, hashlib.sha256(bytes([block])).digest(), None)
                for block in range(group, _SHAPE.blocks, 2)
            ]
        )
        self._keys: list[bytes] = []

    def clear(self, store: Store, timeout: float) -> None:
        """Removes this half's values from the store."""
        if not self._keys:
            self._keys = [key for key, _ in store.list(self.namespace, timeout=timeout)]
        store.remove(self._keys, timeout=timeout)


class Mover:
    """Stores blocks and loads them again. One half of them is stored while the other is loaded."""

    def __init__(self, url: str, timeout: float) -> None:
        self._timeout = timeout
        self._store = Store.open(url, client_name="penstock-bench")
        self.url = self._store.url
        self._memory = mmap.mmap(-1, _SHAPE.blocks * _SHAPE.block_bytes)
        self._memory.write(os.urandom(len(self._memory)))
        self._engine = Engine(
            self._store,
            slot_bytes=_SHAPE.block_bytes,
            # Some slots are kept for loads. A store that finds no free slot is dropped.
            slots=2 * _SHAPE.blocks,
            # Every load goes to the pool.
            keep=False,
            get_lanes=1,
        )
        address = Buffer(self._memory, writable=True).address
        # Only for this run.
        salt = os.urandom(8).hex()
        self._halves = [_Half(half, salt) for half in range(2)]
        for half in self._halves:
            self._engine.register(describe(_SHAPE, "BLHNC", address), half.group)
            self._engine.name_group(half.group, half.namespace)
        self._jobs = 0
        self._under_way: dict[int, tuple[Event, int]] = {}
        """Job → the event that ends it, and the half that it moves."""
        self._going = False
        self._moved = 0
        self._began = 0.0

    def __enter__(self) -> Mover:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.shutdown(self._timeout)

    def go(self) -> None:
        """Starts moving blocks."""
        self._going, self._moved, self._began = True, 0, time.perf_counter()
        for half in range(2):
            self._submit(Event.STORED, half)

    def step(self) -> float:
        """For each job that has ended, starts the next job of its half. Does not wait for a block.

        Returns the seconds that it spent on removing values, which only a bench does. Seconds in
        which the thread waited for its core are not in it.

        Raises:
            StoreError: a block was not stored, or not loaded.
        """
        clearing = 0.0
        for done in self._engine.poll():
            wanted, half = self._under_way[done.job]
            if done.event != wanted:
                continue
            del self._under_way[done.job]
            # Which blocks failed and which were dropped depends on when the lanes gave up.
            if wanted == Event.STORED and set(done.outcomes) != {Outcome.STORED}:
                raise StoreError("the pool did not take all blocks: `penstock doctor` says why")
            if wanted == Event.LOADED and set(done.outcomes) != {Outcome.LOADED}:
                raise StoreError(
                    "the pool did not give back all blocks: it may be too small; "
                    "`penstock doctor` tells more"
                )
            self._moved += done.stored_bytes + done.loaded_bytes
            if wanted == Event.STORED:
                self._submit(Event.LOADED, half)
            else:
                start, queued = time.perf_counter(), seconds_queued()
                self._halves[half].clear(self._store, self._timeout)
                clearing += time.perf_counter() - start - (seconds_queued() - queued)
                if self._going:
                    self._submit(Event.STORED, half)
        return clearing

    def wait(self) -> None:
        """Waits until a job has ended.

        Raises:
            StoreError: no job has ended for too long.
        """
        if not self._engine.wait(self._timeout):
            raise StoreError(f"no block was moved in {self._timeout} seconds")

    def rest(self) -> float:
        """Stops, and waits until nothing moves any more. Returns the bytes stored and loaded per
        second since `go`.

        Raises:
            StoreError: as for `step` and `wait`.
        """
        self._going = False
        while self._under_way:
            self.wait()
            self.step()
        return self._moved / (time.perf_counter() - self._began)

    def _submit(self, wanted: Event, half: int) -> None:
        self._jobs += 1
        self._under_way[self._jobs] = (wanted, half)
        blocks = self._halves[half].blocks
        if wanted == Event.STORED:
            self._engine.submit_store(self._jobs, blocks)
        else:
            self._engine.submit_load(self._jobs, blocks, self._timeout)


class OtherProcess:
    """A mover in a process of its own."""

    def __init__(self, url: str, timeout: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, url, timeout), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def __enter__(self) -> OtherProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.close()
        self._process.join()

    def go(self) -> None:
        """Starts moving blocks, see :meth:`Mover.go`."""
        self._ask("go")

    def rest(self) -> float:
        """Stops, and returns what :meth:`Mover.rest` returns."""
        return self._ask("rest")

    def _ask(self, order: str) -> float:
        # The process may have failed and ended since the last order. Its last answer says why.
        with contextlib.suppress(BrokenPipeError):
            self._orders.send(order)
        return self._answer()

    def _answer(self) -> float:
        try:
            answer: float | Exception = self._orders.recv()
        except EOFError:
            raise StoreError("the other process died") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(orders: Connection, url: str, timeout: float) -> None:
    try:
        with Mover(url, timeout) as mover:
            orders.send(0.0)
            while True:
                orders.recv()
                mover.go()
                orders.send(0.0)
                while not orders.poll():
                    mover.wait()
                    mover.step()
                orders.recv()
                orders.send(mover.rest())
    except EOFError:
        pass
    except Exception as error:
        orders.send(error)
