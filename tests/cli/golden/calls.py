"""Wrong calls of every command, and of the demo.

Most follow from a command's own parser: no argument, an option that it does not have, and for each
of its options values that are wrong for what the option takes. `own` adds what only one command can
be told wrongly. `$ROOM`, `$PORT` and `$NEWER` stand for the room's folder, the port of its
server and a pool of a newer format.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.cli.golden.room import CLOSED_PORT, PASSWORD

POOL = "file://$ROOM/pool"

NUMBERS = ("many", "0", "-1", "1.5", "nan", "100000000000000000000")
SIZES = ("much", "0", "-1", "nan", "1e3", "99999999999TiB")
SECONDS = ("soon", "0", "-1", "nan", "inf", "1e300")
POOLS = (
    "",
    "nonsense",
    f"ftp://me:{PASSWORD}@cache.example",
    f"valkey://me:{PASSWORD}@",
    f"valkey://me:{PASSWORD}@cache.example:99999",
    f"valkey://me:{PASSWORD}@cache.example/one",
    "valkey://cache.example?colour=red",
    "file:relative/path",
    "file:///",
    "file://$ROOM/empty",
    f"{POOL}?size=much",
    f"{POOL}?quota=team",
    "valkey://cache.example?quota=tenant/red:1GiB",
    "memory://",
    "shm://$NEWER",
    f"memory://?size=1MiB valkey://me:{PASSWORD}@",
)
"""URLs of pools that cannot be opened."""

SERVERS = (
    f"valkey://me:{PASSWORD}@127.0.0.1:{CLOSED_PORT}",
    "unix://$ROOM/absent.sock",
    f"valkey://me:{PASSWORD}@127.0.0.1:$PORT",
    "valkey://127.0.0.1:$PORT",
)
"""Pools that can be opened, but do not answer or refuse."""

FILES = ("absent", "folder", "unreadable", "empty", "binary")
OUTPUTS = ("folder", "empty/file", "/dev/full")

WRONG: Mapping[str, Sequence[str]] = {
    "N": NUMBERS,
    "SIZE": SIZES,
    "SIZE/s": (*SIZES, "1MiB/h"),
    "TOKENS/s": (*NUMBERS, "5/h"),
    "K": NUMBERS,
    "PRICE": ("much", "-1", "nan", "inf"),
    "SECONDS": SECONDS,
    "SIZE[,SIZE…]": (*SIZES, "64KiB,", "4B"),
    "N[,N…]": (*NUMBERS, "1,"),
    "SIZE,SIZE,...": (*SIZES, "1GiB,", "1GiB,1GiB,1GiB"),
    "N,N,...": (*NUMBERS, "1,", "1,1", "4,0"),
    "X,X,...": (*NUMBERS, "1,", "1,1,1"),
    "X": ("much", "0", "-1", "nan", "inf"),
    "SHARE": ("much", "0", "-1", "nan", "1.5"),
    "ORDINAL": ("first", "-1", "1.5", "nan", "100000000000000000000"),
    "NS": ("", "xyz", "00"),
    "NAME=EVENTS[,PART=VALUE]": ("a", "a=here", "a=tcp://*:1", "a=tcp://here:1,zone=1"),
    "ENGINE": ("", "http://user:password@host", "ftp://host", "host:0"),
    "PORT": ("many", "-1", "1.5", "65536"),
}
"""Wrong values of options, by what help calls the value."""

FREE = (
    "NAME",
    "GEOMETRY",
    "POLICY",
    "ROLE",
    "LAYOUT",
    "NAME=VALUE",
    "MODEL",
    "FOLDER",
    "FILE",
    "URL",
    "CONFIG",
    "HOST",
)
"""Options whose wrong values depend on the command: see `own`."""

BASE: Mapping[str, Sequence[str]] = {
    "serve": ("model", "--dry-run", "--pool", "unix://$ROOM/absent.sock"),
    "plan": ("config.json", "--pp", "2,2"),
    "simulate": ("trace.jsonl", "--bytes-per-token", "16KiB"),
    "top": ("127.0.0.1:1", "--count", "1"),
    "demo": (),
    "pool export": (POOL, "new.pool"),
    "pool import": ("archive.pool", POOL),
    "pool diff": ("ab", "cd", POOL),
    "pool warm": ("prompts.jsonl", "127.0.0.1:1"),
    "pool schemes": (),
}
"""A command's smallest right call. Of others it is the command with a pool."""


@dataclass(frozen=True)
class Call:
    """One call: the words after `penstock`."""

    words: tuple[str, ...]
    is_other_user: bool = False
    """Whether somebody makes it who may not read the room's file `unreadable`."""


def own(command: str) -> Iterator[Sequence[str]]:
    """Wrong calls that only this command knows, without the command itself."""
    base = tuple(BASE.get(command, (POOL,)))
    match command:
        case "serve":
            for pool in POOLS:
                yield *base, "--pool", pool
            yield from (
                (*base, *wrong)
                for wrong in (
                    ("--pool", "memory://?size=1GiB"),
                    ("--kv-transfer-config", "{}"),
                    ("--no-enable-prefix-caching",),
                    ("--prefix-caching-hash-algo", "xxhash"),
                    ("--enable-pp-prop-kv-cache",),
                    ("--kv-cache-tokens", "9", "--additional-config", "no JSON"),
                    ("--additional-config", "{}", "--kv-layout", "LBH"),
                    ("--pool-geometry", "3"),
                    ("--pool-geometry", "0x0"),
                    ("--pool-geometry", "-1x2"),
                    ("--load-policy", "sometimes"),
                    ("--role", "kv_producer"),
                    ("--set", "load_timeout"),
                    ("--set", "load_timeout=nan"),
                    ("--set", "load_timeout=-1"),
                    ("--set", "get_lanes=0"),
                    ("--set", "get_lanes=many"),
                    ("--set", "host_tier=perhaps"),
                    ("--set", "colour=red"),
                    ("--set", f"pool=valkey://me:{PASSWORD}@h"),
                )
            )
        case "plan":
            for file in (
                *FILES,
                "damaged.json",
                "list.json",
                "unknown-model.json",
                "negative.json",
                "text-for-number.json",
                "missing-number.json",
            ):
                yield file, "--pp", "2,2"
            yield from (
                ("config.json",),
                ("config.json", "--pp", "2,2", "--pp-size", "2"),
                ("config.json", "--pp-size", "5"),
                (*base, "--device-speed", "1,2"),
                (*base, "--device-memory", "1MiB"),
                (*base, "--device-memory", "8GiB", "--reserve", "9GiB"),
                (*base, "--kv-cache-memory-bytes", "1GiB", "--kv-cache-tokens", "9"),
                (*base, "--kv-cache-memory-bytes", "1"),
                (*base, "--tp", "3"),
            )
        case "simulate":
            rest = base[1:]
            for trace in (*FILES, "damaged.jsonl", "damaged.gz", "other.jsonl", "negative.jsonl"):
                yield trace, *rest
            yield from (
                ("trace.jsonl",),
                (*base, "--model", "config.json"),
                ("trace.jsonl", "--model", "absent"),
                ("trace.jsonl", "--model", "damaged.json"),
                (*base, "--pool-bytes", "1GiB", "--routing", "sideways"),
                (*base, "--price-pool-gib-month", "4"),
                (*base, "--price-gpu-hour", "2"),
            )
        case "top":
            for engine in (
                "",
                "ftp://engine.example",
                f"http://me:{PASSWORD}@",
                "127.0.0.1:99999",
                f"http://me:{PASSWORD}@127.0.0.1:{CLOSED_PORT}/metrics",
                "127.0.0.1:$PORT",
            ):
                yield engine, "--count", "1"
            for pool in (*POOLS, *SERVERS):
                yield *base, "--pool", pool
        case "doctor":
            yield from (
                (POOL, "--model", "./absent"),
                (POOL, "--model", "folder"),
                (POOL, "--vllm", "absent"),
                (POOL, "--vllm", "folder"),
                (POOL, "--vllm", "empty"),
                (POOL, "--model", "config.json", "--kv-layout", "LBH"),
            )
        case "demo":
            for trace in (*FILES, "damaged.jsonl", "damaged.gz", "other.jsonl"):
                yield "--trace", trace
            yield "--conversations", "17"
            for pool in POOLS:
                yield "--pool", pool
            yield "--pool", "file:///a", "--pool-server", "valkey"
            yield "--trace", "trace.jsonl", "--conversations", "2"
            yield "--trace", "trace.jsonl", "--pd"
            yield "--pd", "--requests", "new.jsonl"
            yield "--prompts", "3"
            yield "--load", "0.5"
        case "lookup-server":
            for pool in (*POOLS, *SERVERS):
                yield (pool,)
            for file in FILES:
                yield POOL, "--token-file", file
            yield from (
                (POOL, *wrong)
                for wrong in (
                    ("--host", "0.0.0.0"),
                    ("--host", "nowhere.invalid"),
                    ("--host", "nowhere.invalid", "--no-token"),
                    ("--host", "127.0.0.1", "--port", "$PORT"),
                    ("--token-file", "keys", "--no-token"),
                    ("--tls-certificate", "keys"),
                    ("--tls-certificate", "keys", "--tls-key", "keys"),
                    ("--tls-certificate", "absent", "--tls-key", "absent"),
                    ("--tls-certificate", "", "--tls-key", ""),
                    ("--alias", "llama"),
                    ("--adapter", "=path"),
                    ("--tokenizer", "llama="),
                )
            )
        case "pool purge":
            yield (POOL,)
        case "pool verify":
            yield POOL, "--sample", "0%"
            yield POOL, "--sample", "101%"
        case "pool export":
            yield (POOL,)
            for pool in (*POOLS, *SERVERS):
                yield pool, "new.pool"
            for file in (*OUTPUTS, "archive.pool"):
                yield POOL, file
            yield f"memory://?size=1MiB {POOL}", "new.pool"
        case "pool import":
            yield ("archive.pool",)
            for file in (*FILES, "cut.pool", "damaged.pool", "newer.pool"):
                yield file, POOL
            for pool in (*POOLS, *SERVERS):
                yield "archive.pool", pool
        case "pool warm":
            yield ("prompts.jsonl",)
            for file in (*FILES, "damaged.jsonl", "other.jsonl"):
                yield file, "127.0.0.1:1"
            for engine in ("", "ftp://engine.example", "127.0.0.1:99999", "127.0.0.1:$PORT"):
                yield "prompts.jsonl", engine
            yield "prompts.jsonl", f"http://me:{PASSWORD}@127.0.0.1:{CLOSED_PORT}"


def calls(command: str, parser: argparse.ArgumentParser) -> Iterator[Call]:
    """All wrong calls of a command, or of a group of commands, as `penstock`, `penstock pool`."""
    seen = set()
    for words in _calls(command, parser):
        made = (*command.split(), *words)
        if made not in seen:
            seen.add(made)
            yield Call(made, is_other_user="unreadable" in made)


def _calls(command: str, parser: argparse.ArgumentParser) -> Iterator[Sequence[str]]:
    if parser._subparsers is not None:
        yield ()
        yield ("paint",)
        yield ("--colour", "red")
        return
    base = tuple(BASE.get(command, (POOL,)))
    if base:
        yield ()
    if command != "serve":
        yield *base, "--colour", "red"
    if command not in BASE and any(action.dest == "url" for action in parser._actions):
        for pool in (*POOLS, *SERVERS):
            yield (pool,)
    yield from own(command)
    read: set[object] = set()
    for action in parser._actions:
        if not action.option_strings or action.nargs == 0:
            continue
        wrong = list(_wrong(command, action))
        # What reads the value is tried with all values once. Of other options that it reads, one
        # wrong value shows that it does.
        if action.type in read:
            wrong = wrong[1:2]
        elif action.type is not None:
            read.add(action.type)
        yield from ((*base, *words) for words in wrong)


def _wrong(command: str, action: argparse.Action) -> Iterator[Sequence[str]]:
    """Calls with one option: without a value, then with wrong ones."""
    option = action.option_strings[-1]
    if action.nargs is None:
        yield (option,)
    if action.choices is not None:
        yield option, "nonsense"
    elif option == "--encryption-key-file":
        for file in (*FILES, "damaged-keys", ""):
            yield option, file
    elif option == "--plot":
        for file in OUTPUTS:
            yield option, file
    elif (metavar := str(action.metavar)) in WRONG:
        for value in WRONG[metavar]:
            yield option, value
    elif metavar not in FREE:
        raise LookupError(f"`penstock {command}` {option} {metavar}: name wrong values in WRONG")
