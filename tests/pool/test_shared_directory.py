"""A pool in a directory that two hosts have mounted, without locks between them."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import penstock
from lab.waiting import LIMIT, eventually
from penstock.errors import Full, PenstockError, TooSmall
from tests.mounts import Mount, needs_mounts

pytestmark = needs_mounts

NAMESPACE = {"test": "shared directory"}
KEYS = 300
VALUE_BYTES = 20_000
STEPS = 3_000
"""What each host does at least."""
ENOUGH = Counter(right=101, stored=51)


def value(number: int) -> bytes:
    return random.Random(number).randbytes(VALUE_BYTES + number % 5_000)


def work(url: str, host: int) -> None:
    """Puts and gets at random, and prints what came of it. Each host leaves a third of the keys for
    the other one to put: the faster one cannot put them all."""
    rng, counts = random.Random(host), Counter[str]()
    with penstock.open(url, namespace=NAMESPACE, timeout=LIMIT) as pool:
        # Until a pool has counted what lies there, it is full.
        eventually(lambda: stores(pool, b"of host %d" % host), pause=0.1)
        print("ready", flush=True)
        sys.stdin.readline()
        for step in itertools.count():
            if step >= STEPS and counts >= ENOUGH:
                break
            number = rng.randrange(KEYS)
            key = b"key %d" % number
            try:
                if rng.random() < 0.5 and number % 3 != host:
                    counts["stored" if pool.put(key, value(number)) else "present"] += 1
                elif (got := pool.get(key, default=None)) is None:
                    counts["missed"] += 1
                else:
                    counts["right" if got == value(number) else "wrong"] += 1
            except PenstockError as error:
                counts[f"failed: {error.kind}"] += 1
        counts["rejected"] = pool.stats()["rejected"]
    print(json.dumps(counts))


def stores(pool: penstock.Pool, key: bytes) -> bool:
    try:
        return pool.put(key, b"")
    except Full:
        return False


def on(host: str | None, call: str) -> subprocess.Popen[str]:
    """Runs a function of this module on a host of this name, or on this one."""
    command = [sys.executable, "-c", f"from {__name__} import *; {call}"]
    if host is not None:
        rename = f'hostname {host} && exec "$@"'
        command = ["unshare", "--uts", "sh", "-c", rename, "sh", *command]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


def exchange(url: str, expected: int | None, put: int | None) -> None:
    """Gets what another host has put, removes it, and puts another value in its place."""
    with penstock.open(url, namespace=NAMESPACE, timeout=LIMIT) as pool:

        def found() -> int | None:
            got = pool.get(b"key", default=b"")
            return next((number for number in range(9) if got == value(number)), None)

        eventually(lambda: found() == expected, found, pause=0.1)
        pool.remove([b"key"])
        if put is not None:
            pool.put(b"key", value(put))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Mount]]:
    shared = tmp_path / "shared"
    shared.mkdir()
    with Mount(shared, tmp_path / "a") as a, Mount(shared, tmp_path / "b") as b:
        yield [a, b]


def values_in(folder: Path) -> dict[str, int]:
    """The values in the pool of a folder: where they lie in it, and their bytes."""
    found = {}
    for path in (folder / "pool").rglob("*"):
        # What another host has removed may still be listed.
        with suppress(FileNotFoundError):
            if path.parent.name != "tmp" and path.is_file():
                found[str(path.relative_to(folder))] = path.stat().st_size
    return found


def bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        # It may be evicted meanwhile.
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


@pytest.mark.parametrize(
    ("mib", "names"),
    [(64, ("one", "another")), (4, ("one", "another")), (4, (None, None))],
    ids=["room for all", "little room", "little room, one host with two mounts"],
)
def test_two_hosts_share_values_and_damage_none(
    hosts: list[Mount], tmp_path: Path, mib: int, names: tuple[str | None, str | None]
) -> None:
    """With room for all values, and with room for less than two thirds of them."""
    urls = [f"file://{host.path}/pool?size={mib}MiB" for host in hosts]
    running = [on(names[n], f"work({url!r}, {n})") for n, url in enumerate(urls)]
    # They work at the same time, however long each takes to start.
    for each in running:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    for each in running:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    counts = [Counter(json.loads(each.communicate(timeout=4 * LIMIT)[0])) for each in running]
    print(counts)
    for each in counts:
        assert each >= ENOUGH, counts
        assert each["wrong"] == each["rejected"] == 0, counts
        assert not [name for name in each if name.startswith("failed")], counts
    if mib == 64:
        # What one host had stored, the other one found: of the keys that both put, not half are
        # there twice.
        assert sum(each["stored"] for each in counts) < KEYS + KEYS / 3 / 2
    # Nothing is left in the making, and a host that comes later brings the pool within its bound.
    pool = tmp_path / "shared" / "pool"
    assert {path.suffix for path in (pool / "tmp").iterdir()} == {".usage", ".evict"}
    with penstock.open(urls[0], namespace=NAMESPACE) as last:
        numbers = itertools.count(KEYS)

        def is_within_its_bound() -> bool:
            if bytes_in(pool) <= mib << 20:
                return True
            number = next(numbers)
            # It is full, until it has counted what lies there.
            with suppress(Full):
                last.put(b"key %d" % number, value(number))
            return False

        eventually(is_within_its_bound, lambda: bytes_in(pool), pause=0.5)
        assert last.describe()["hosts"] == "several"


def test_a_value_that_another_host_replaces(hosts: list[Mount], tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    values = [None, 1, 2, 3, None, None]
    for number, (expected, put) in enumerate(itertools.pairwise(values)):
        host = number % 2
        url = f"file://{hosts[host].path}/pool?size=64MiB"
        # A host believes for a moment what it has seen. Until then it does not find what has
        # another length: see decision 37.
        eventually(lambda at=hosts[host].path: values_in(at) == values_in(shared), pause=0.1)
        exchanging = on(f"host-{host}", f"exchange({url!r}, {expected}, {put})")
        exchanging.communicate(timeout=2 * LIMIT)
        assert exchanging.returncode == 0
    assert hosts[0].path.stat().st_dev != hosts[1].path.stat().st_dev


@pytest.mark.parametrize("later", [500, 1500, 9000])
def test_what_a_host_takes_for_damaged_is_looked_at_anew_before_it_is_removed(
    tmp_path: Path, later: int
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    old, new = b"o" * 1000, b"n" * later
    with (
        Mount(shared, tmp_path / "a") as a,
        Mount(shared, tmp_path / "b", believed=3600) as b,
        penstock.open(f"file://{a.path}/pool?size=64MiB", timeout=LIMIT) as first,
        penstock.open(f"file://{b.path}/pool?size=64MiB", timeout=LIMIT) as second,
    ):
        eventually(lambda: stores(first, b"counted"), pause=0.1)
        first.put("key", old)
        assert second.get("key") == old
        assert "key" in second
        first.remove(["key"])
        first.put("key", new)
        # The second host still believes the length that it saw.
        for into in (None, bytearray(4096), None):
            with suppress(TooSmall):
                second.get("key", into=into, default=None)
            assert first.get("key") == new
        # What is shorter than believed cannot be read to its end: no value was looked at.
        assert (second.stats()["rejected"] > 0) == (later > len(old))
        assert second.get("key") == new
