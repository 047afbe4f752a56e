"""All faults at random, under a seed, while every byte is checked: `make soak`.

A pool of three tiers, in shared memory, in a directory and on a server behind a bad network, is
written and read by several threads. Meanwhile the server is frozen, killed, filled up and started
again, the network slows down, stalls and is cut, and files are damaged, removed and cut short. A
get may miss or fail; one that yields bytes must yield those that were put. In the end all is
mended, and everything has to be hits again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import random
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import penstock
from lab.network import Way
from lab.waiting import LIMIT, eventually
from penstock.errors import PenstockError
from tests.servers import Server

KEYS = 400
LARGEST = 300_000
TIMEOUT = 2.0


def content(number: int) -> bytes:
    """What is put under a key, of a length of its own."""
    size = 1 + number * 7919 % LARGEST
    return hashlib.shake_128(number.to_bytes(4, "little")).digest(size)


CONTENTS = [content(number) for number in range(KEYS)]


class Wrong(AssertionError):
    """Bytes came that were never put."""


class Client(threading.Thread):
    """Puts, gets, looks up and removes at random, and checks what comes."""

    def __init__(self, pool: penstock.Pool, seed: int, stop: threading.Event) -> None:
        super().__init__(name=f"client {seed}")
        self._pool, self._random, self._stop_event = pool, random.Random(seed), stop
        self.counts: collections.Counter[str] = collections.Counter()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stop_event.is_set():
                self._step()
        except BaseException as error:
            self.failure = error
            self._stop_event.set()

    def _step(self) -> None:
        numbers = self._random.sample(range(KEYS), self._random.randint(1, 8))
        operation = self._random.choices(("put", "get", "contains", "remove"), (5, 10, 3, 1))[0]
        began = time.monotonic()
        try:
            getattr(self, f"_{operation}")(numbers)
        except PenstockError as error:
            self.counts[f"{operation}: {error.kind}"] += 1
        taken = time.monotonic() - began
        # A batch has one deadline; what comes on top is this machine's scheduling.
        if taken > TIMEOUT + LIMIT:
            raise Wrong(f"{operation} took {taken:.1f} s with a deadline of {TIMEOUT} s")

    def _put(self, numbers: list[int]) -> None:
        for number in numbers:
            self._pool.put(str(number), CONTENTS[number])
            self.counts["put"] += 1

    def _get(self, numbers: list[int]) -> None:
        for number in numbers:
            value = self._pool.get(str(number), default=None)
            if value is None:
                self.counts["miss"] += 1
            elif bytes(value) == CONTENTS[number]:
                self.counts["hit"] += 1
            else:
                raise Wrong(f"key {number} yielded other bytes than were put")

    def _contains(self, numbers: list[int]) -> None:
        self._pool.contains([str(number) for number in numbers])
        self.counts["contains"] += 1

    def _remove(self, numbers: list[int]) -> None:
        self._pool.remove([str(number) for number in numbers[:2]])
        self.counts["remove"] += 1


class Faults:
    """What goes wrong; each ends by itself, or by :meth:`mend`."""

    def __init__(self, server: Server, way: Way, folder: Path, seed: int) -> None:
        self._server, self._way, self._folder = server, way, folder
        self._random = random.Random(seed)
        self.kinds: dict[str, Callable[[], None]] = {
            "freeze": self._freeze,
            "kill": self._kill,
            "fill up": self._fill_up,
            "slow": lambda: self._for_a_while(lambda: way.be(delay=0.02, mbit=20)),
            "stalls": lambda: self._for_a_while(lambda: way.be(loss=0.05)),
            "cut": self._cut,
            "damage": self._damage,
            "flush": lambda: self._ask("FLUSHALL"),
        }

    def strike(self) -> str:
        """Brings one about; returns when it is over."""
        name = self._random.choice(sorted(self.kinds))
        self.kinds[name]()
        return name

    def _pause(self) -> None:
        time.sleep(self._random.uniform(0.05, 3.0))

    def _ask(self, *words: str) -> None:
        with contextlib.suppress(OSError):
            self._server.command(*words)

    def _freeze(self) -> None:
        self._server.freeze()
        self._pause()
        self._server.thaw()

    def _kill(self) -> None:
        self._server.kill()
        self._pause()
        self._server.start()

    def _fill_up(self) -> None:
        self._ask("CONFIG", "SET", "maxmemory", "1")
        self._pause()
        self._ask("CONFIG", "SET", "maxmemory", "0")

    def _for_a_while(self, change: Callable[[], None]) -> None:
        change()
        self._pause()
        self._way.be()

    def _cut(self) -> None:
        self._way.cut()
        self._pause()
        self._way.mend()

    def _damage(self) -> None:
        files = [path for path in self._folder.rglob("*.l*") if path.is_file()]
        for path in self._random.sample(files, min(len(files), 20)):
            with contextlib.suppress(OSError):
                data = bytearray(path.read_bytes())
                match self._random.randrange(3):
                    case 0 if data:
                        data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
                    case 1:
                        del data[self._random.randrange(len(data) + 1) :]
                    case _:
                        path.unlink()
                        continue
                path.write_bytes(data)


def soak(seconds: float, seed: int, folder: Path) -> collections.Counter[str]:
    """Runs for so long; returns what was done and what was met, by name.

    Raises:
        Wrong: bytes came that were never put, or the pool did not recover.
    """
    segment = f"soak-{uuid.uuid4().hex}"
    directory = folder / "pool"
    with contextlib.ExitStack() as stack:
        stack.callback(Path(f"/dev/shm/penstock-{segment}").unlink, missing_ok=True)
        server = stack.enter_context(Server("redis", folder))
        way = stack.enter_context(Way(server.port))
        url = (
            f"shm://{segment}?size=16MiB file://{directory}?size=64MiB redis://127.0.0.1:{way.port}"
        )
        pool = stack.enter_context(penstock.open(url, namespace="soak", timeout=TIMEOUT))
        faults, stop = Faults(server, way, directory, seed), threading.Event()
        clients = [Client(pool, seed + 1 + number, stop) for number in range(3)]
        counts: collections.Counter[str] = collections.Counter()
        end = time.monotonic() + seconds
        for client in clients:
            client.start()
        try:
            while time.monotonic() < end and not stop.is_set():
                counts[f"fault: {faults.strike()}"] += 1
                time.sleep(0.2)
        finally:
            stop.set()
            for client in clients:
                client.join()
        for client in clients:
            counts += client.counts
            if client.failure is not None:
                raise client.failure
        counts["rejected"] = pool.stats()["rejected"]
        _recover(url)
    return counts


def _recover(url: str) -> None:
    """Everything is put and is a hit, in the farthest tier too."""
    server = url.split()[-1]

    def is_all_there() -> bool:
        with (
            penstock.open(url, namespace="soak", timeout=LIMIT) as pool,
            penstock.open(server, namespace="soak", timeout=LIMIT) as far,
        ):
            for number, expected in enumerate(CONTENTS):
                far.put(str(number), expected)
            got = [pool.get(str(number), default=None) for number in range(KEYS)]
            return [value and bytes(value) for value in got] == CONTENTS

    try:
        eventually(is_all_there)
    except TimeoutError as error:
        raise Wrong("not everything is a hit again after the last fault") from error


def main() -> int:
    parser = argparse.ArgumentParser(description="Random faults under a seed, every byte checked.")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    print(f"seed {seed}, {args.seconds:.0f} seconds", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        counts = soak(args.seconds, seed, Path(folder))
    for name, count in sorted(counts.items()):
        print(f"{count:9,}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
