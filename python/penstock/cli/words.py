"""How the command line writes sizes, times and namespaces, and where it writes them."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

from penstock._native import EncryptionKeys, parse_size
from penstock.errors import ConfigError, IoError
from penstock.pool import POOL_VARIABLE
from penstock.printable import printable

_PAGE_WIDTH = 160

_MOST_DIGITS = 20
"""Digits of a number that a server says: up to 2^64."""
_DESCRIPTION_CHARACTERS = 300
"""The most characters that are shown of a description."""

MOST_COUNTED = (1 << 31) - 1
"""The largest whole number on the command line."""

MOST_SECONDS = 365 * 24 * 3600
"""The longest time on the command line: a year."""

_HIGHEST_PRICE = 1e12


class _PrintableConsole(Console):
    """Writes no control characters but its own, whatever it is given. Square brackets are no
    markup: foreign text may hold them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The parts of what is written."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text, keep="\n"), segment.style)


def console() -> Console:
    """The console that a command writes to for people. It has colours only on a terminal."""
    return _PrintableConsole(width=None if sys.stdout.isatty() else _PAGE_WIDTH)


def text(said: str, style: str = "") -> Text:
    """What somebody else said, for the console: in one line, without control characters."""
    return Text(printable(said), style=style)


def progress(as_json: bool) -> Progress:
    """A progress bar on standard error. It is not shown with JSON, or if that is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=as_json or not sys.stderr.isatty(),
    )


def print_json(document: Any, to: TextIO | None = None) -> None:
    """Writes one JSON document to `to`, or to standard output, for programs."""
    print(as_json(document, indent=2), file=to)


def as_json(document: Any, *, indent: int | None = None) -> str:
    """A document as JSON, in printable ASCII. A number that JSON has no form for becomes null.

    >>> as_json({"said": "a\x1b\x7f", "rate": float("nan")})
    '{"said": "a\\\\u001b\\\\u007f", "rate": null}'
    """
    text = json.dumps(_finite(document), indent=indent, allow_nan=False)
    # JSON may hold this one as it is, and terminals act on it.
    return text.replace("\x7f", "\\u007f")


def _finite(document: Any) -> Any:
    if isinstance(document, float):
        return document if math.isfinite(document) else None
    if isinstance(document, Mapping):
        return {name: _finite(value) for name, value in document.items()}
    if isinstance(document, (list, tuple)):
        return [_finite(value) for value in document]
    return document


def number(facts: Mapping[str, str], *names: str) -> int | None:
    """The first of these facts of a server that is a whole number; None if none is.

    >>> number({"used": "garbage", "max": "12"}, "used", "max")
    12
    """
    for name in names:
        said = facts.get(name, "")
        if said.isascii() and said.isdecimal() and len(said) <= _MOST_DIGITS:
            return int(said)
    return None


def print_measurement(args: argparse.Namespace, found: Mapping[str, Any]) -> None:
    """Writes a bench's results for programs, after the environment that was taken at its start."""
    print_json({"environment": args.environment} | dict(found))


def size(nbytes: float) -> str:
    """Bytes in words.

    >>> size(0), size(1536), size(1 << 20), size(3 << 40)
    ('0 B', '1.5 KiB', '1 MiB', '3 TiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def milliseconds(seconds: float) -> str:
    """A short time in words.

    >>> milliseconds(0.0000421), milliseconds(0.0123), milliseconds(2.5)
    ('0.042 ms', '12.3 ms', '2500 ms')
    """
    thousandths = seconds * 1000
    return f"{thousandths:.3f} ms" if thousandths < 1 else f"{thousandths:.4g} ms"


def age(then: float | None, now: float) -> str:
    """How long ago a time was, in words.

    >>> [age(100.0 - ago, 100.0) for ago in (-5, 59, 60, 3 * 3600 - 1, 72 * 3600)]
    ['0 s', '59 s', '1 min', '179 min', '3 d']
    >>> age(None, 100.0)
    '-'
    """
    if then is None:
        return "-"
    seconds = int(max(0.0, now - then))
    for unit, length, most in (("s", 1, 60), ("min", 60, 180), ("h", 3600, 72)):
        if seconds < most * length:
            return f"{seconds // length} {unit}"
    return f"{seconds // 86_400} d"


def description(described: Mapping[str, Any] | None) -> str:
    """A namespace's description in one line. Whoever may write to the pool may have written it: it
    can hold anything, and what is shown of it is printable and not too long.

    >>> description({"kind": "pool", "name": "docs"})
    'pool "docs"'
    >>> description({"model": "m", "kv_dtype": "torch.bfloat16", "block_size": 128, "spans": []})
    'model m, KV bfloat16, blocks of 128 tokens'
    >>> description({"model": "m", "tenant": "red"})
    'model m, tenant red'
    >>> description({"model": "m", "weights": "files:1a2b3c4d5e", "options": {"x.seed": 1}})
    'model m, weights 1a2b3c4d, with x.seed'
    >>> description({"model": "m", "weights": "changed:1a2b3c4d5e"})
    'model m, weights changed in place (1a2b3c4d)'
    >>> description({"model": "m", "weights": "version:step 40:files:1a2b3c4d5e"})
    'model m, weights step 40 (1a2b3c4d)'
    >>> description({"model": "m", "group": {"kind": "sliding_window", "window": 512}})
    'model m, sliding window of 512'
    >>> description(None)
    'not described'
    """
    if described is None:
        return "not described"
    said = printable(_described(described))
    is_long = len(said) > _DESCRIPTION_CHARACTERS
    return f"{said[:_DESCRIPTION_CHARACTERS]}…" if is_long else said


def _described(described: Mapping[str, Any]) -> str:
    if described.get("kind") == "pool":
        return f'pool "{described.get("name", "")}"'
    if "model" not in described:
        return ", ".join(
            str(value) if name == "kind" else f"{name} {value}"
            for name, value in described.items()
            if isinstance(value, (str, int))
        )
    words = [f"model {described['model']}"]
    if "kv_dtype" in described:
        words.append(f"KV {str(described['kv_dtype']).removeprefix('torch.')}")
    if "block_size" in described:
        words.append(f"blocks of {described['block_size']} tokens")
    group = described.get("group")
    if isinstance(group, Mapping) and group.get("kind") not in (None, "full_attention"):
        window = f" of {group['window']}" if group.get("window") else ""
        words.append(f"{str(group['kind']).replace('_', ' ')}{window}")
    if isinstance(weights := described.get("weights"), str):
        words.append(f"weights {_weights(weights)}")
    if isinstance(options := described.get("options"), Mapping) and options:
        words.append(f"with {' and '.join(map(str, sorted(options)))}")
    if described.get("engine") == "sglang":
        words.append(f"SGLang's {described.get('pool')} pages, {described.get('layout')}")
    if described.get("salt"):
        words.append("salted")
    if "tenant" in described:
        words.append(f"tenant {described['tenant']}")
    return ", ".join(words)


def _weights(said: str) -> str:
    """What stands for a model's weights, in words.

    >>> _weights("tensors:1a2b3c4d5e"), _weights("id:my model"), _weights("version:a:b:id:mine")
    ('1a2b3c4d', 'my model', 'a:b (mine)')
    """
    how, _, rest = said.partition(":")
    match how:
        case "id":
            return rest
        case "changed":
            return f"changed in place ({rest[:8]})"
        case "version":
            version, kind, name = [*rest.rsplit(":", 2), "", ""][:3]
            return f"{version} ({name if kind == 'id' else name[:8]})" if name else version
        case _:
            return said.rpartition(":")[2][:8]


def add_pool_url(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that names the pool."""
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        default=None,
        help=f"the pool, as valkey://host:6379, unix:///path.sock, file:///directory, shm://NAME "
        f"or s3://bucket/prefix (default: ${POOL_VARIABLE})",
    )


def add_counts(parser: argparse.ArgumentParser, *counts: tuple[str, int, str]) -> None:
    """Adds options that are whole numbers. `counts` has for each: name, default, help text."""
    for name, default, text in counts:
        parser.add_argument(
            f"--{name}",
            metavar="N",
            type=count_argument,
            default=default,
            help=f"{text} (default: %(default)s)",
        )


def add_measurement(
    parser: argparse.ArgumentParser, *, passes: int, timed: str | None = None
) -> None:
    """Adds options that all benches have: passes, JSON, and a timeout if something is `timed`."""
    add_counts(parser, ("passes", passes, "passes, whose median counts"))
    if timed is not None:
        parser.add_argument(
            "--timeout",
            metavar="SECONDS",
            type=seconds_argument,
            default=30.0,
            help=f"longest that {timed} may take (default: %(default)s)",
        )
    parser.add_argument("--json", action="store_true", help="write one JSON document instead")


def pool_url(args: argparse.Namespace) -> str:
    """The pool that the command line or the environment names.

    Raises:
        ConfigError: neither names one.
    """
    url: str | None = os.environ.get(POOL_VARIABLE) if args.url is None else named_pool(args.url)
    if not url:
        raise ConfigError(f"no pool: give its URL, or set {POOL_VARIABLE}")
    return url


def named_pool(url: str) -> str:
    """The URL of a pool as it was given on the command line.

    Raises:
        ConfigError: it is empty, as a shell's variable is that nobody has set. The command must not
            go on with another pool.
    """
    if not url.strip():
        raise ConfigError(
            "the pool's URL is empty: is a variable not set? Give it, or leave it out"
        )
    return url


def encryption_keys(file: str | None) -> EncryptionKeys | None:
    """The keys of the file that the command line names, or of the environment.

    Raises:
        ConfigError: the file cannot be read, or holds no keys.
    """
    if file == "":
        raise ConfigError("--encryption-key-file is empty: name a file, or leave it out")
    try:
        return EncryptionKeys.load(file)
    except IoError as error:
        raise ConfigError(f"{error}: name a file that you may read") from None


def write_file(path: Path, text: str) -> None:
    """Writes a file that the command line names, and the folders above it.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; name another file"
        ) from None


def size_argument(text: str) -> int:
    """A size on the command line, over 0 bytes."""
    try:
        nbytes = parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if nbytes == 0:
        raise argparse.ArgumentTypeError("must be over 0 bytes")
    return nbytes


def rate_argument(text: str) -> int:
    """A rate on the command line, in bytes a second."""
    return size_argument(text.strip().removesuffix("/s"))


def tokens_argument(text: str) -> int:
    """A rate on the command line, in tokens a second."""
    return count_argument(text.strip().removesuffix("/s"))


def share_argument(text: str) -> float:
    """A share on the command line, over 0 and up to 1: a number, or percent."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a share: {text!r}; write 10% or 0.1") from None
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"must be over 0 and at most 100%, not {text}")
    return share


def count_argument(text: str) -> int:
    """A whole number from 1 to `MOST_COUNTED` on the command line."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a whole number: {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    if number > MOST_COUNTED:
        raise argparse.ArgumentTypeError(f"must be at most {MOST_COUNTED:,}, not {number:,}")
    return number


def seconds_argument(text: str) -> float:
    """A time on the command line, over 0 seconds and up to `MOST_SECONDS`."""
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a number of seconds: {text!r}") from None
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"must be over 0 seconds, not {text}")
    if seconds > MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"must be at most a year ({MOST_SECONDS} s), not {text}")
    return seconds


def price_argument(text: str) -> float:
    """A price on the command line, in whatever currency."""
    try:
        price = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a price: {text!r}") from None
    if not 0 <= price <= _HIGHEST_PRICE:
        raise argparse.ArgumentTypeError(f"must be from 0 to {_HIGHEST_PRICE:g}, not {text}")
    return price
