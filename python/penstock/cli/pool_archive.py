"""`penstock pool export` and `import`: namespaces of a pool, to a file and back."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from penstock import Pool
from penstock._native import Store
from penstock.cli import options, words
from penstock.cli.namespaces import add_rate, add_timeout, chosen, namespace_as_json
from penstock.errors import ConfigError, IoError, PenstockError
from penstock.pool.archive import Archive, export_namespaces, import_archive
from penstock.pool.namespace import DESCRIPTIONS
from penstock.pool.pace import Pace
from penstock.vllm.settings import Settings

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_STREAM = "-"


def add_parsers(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the actions to `penstock pool`'s parser."""
    exports = actions.add_parser(
        "export",
        help="write namespaces of a pool into one file",
        description="Writes namespaces of a pool into one file, with a digest behind every value. "
        "Damaged values are left out. Encrypted values stay encrypted: to use them later takes "
        "the same keys.",
    )
    imports = actions.add_parser(
        "import",
        help="store what such a file holds",
        description="Stores the values of a file that `penstock pool export` wrote. Each is "
        "verified first. A file that is cut off or damaged is refused at that place; the values "
        "before it are stored.",
    )
    exports.add_argument("url", metavar="URL", help="the pool; of several tiers, one")
    exports.add_argument(
        "file", metavar="FILE", help="a file that is not there yet, or - for standard output"
    )
    imports.add_argument("file", metavar="FILE", help="the file, or - for standard input")
    imports.add_argument("url", metavar="URL", help="the pool")
    exports.add_argument(
        "--namespace",
        metavar="NS",
        action="append",
        help="only this one: its digest as `ls` shows it, or the beginning of it; may be given "
        "several times (default: all)",
    )
    for action, dry in (
        (exports, "say what would be exported, and write no file"),
        (imports, "verify the whole file, say what would be stored, and store nothing"),
    ):
        action.add_argument("--dry-run", action="store_true", help=dry)
        action.add_argument("--json", action="store_true", help="write one JSON document instead")
        options.add(action, Settings, "encryption_key_file")
        add_rate(action)
        add_timeout(action, "listing, or a batch,")
    exports.set_defaults(run_action=run_export)
    imports.set_defaults(run_action=run_import)


def run_export(args: argparse.Namespace) -> int:
    """Exports."""
    store = _store(args)
    if len(args.url.split()) > 1:
        raise ConfigError("an export is of one tier; name the one that has everything")
    with Pool(store.unencrypted(), DESCRIPTIONS, timeout=args.timeout) as pool:
        # Descriptions go into the head of the archive.
        used = [one for one in pool.namespaces() if one.digest != DESCRIPTIONS]
    if args.namespace:
        picked = {chosen(used, beginning)[0].digest for beginning in args.namespace}
        used = [one for one in used if one.digest in picked]
    objects = sum(one.objects for one in used)
    document: dict[str, Any] = {
        "file": args.file,
        "dry_run": args.dry_run,
        "namespaces": [namespace_as_json(one) for one in used],
    }
    # Where the archive goes to standard output, the report must not.
    to = sys.stderr if args.file == _STREAM and not args.dry_run else sys.stdout
    if args.dry_run:
        nbytes = sum(one.nbytes for one in used)
        _say(
            f"{objects:,} objects, {words.size(nbytes)}, of {len(used):,} namespaces would be "
            "exported.",
            document | {"objects": objects, "bytes": nbytes},
            args.json,
            to,
        )
        return 0
    with _output(args.file) as file, words.progress(args.json) as progress:
        task = progress.add_task("exporting", total=objects)
        exported = export_namespaces(
            store,
            used,
            file,
            timeout=args.timeout,
            pace=Pace(args.rate),
            advance=lambda count: progress.advance(task, count),
        )
    sentences = [f"Exported {exported.values:,} values, {words.size(exported.nbytes)}."]
    if exported.unreadable:
        sentences.append(
            f"{exported.unreadable:,} of them are encrypted with keys or cache salts that are not "
            "known here, or are of another version: only their headers were checked."
        )
    if exported.damaged:
        sentences.append(f"{exported.damaged:,} damaged values were left out.")
    if exported.gone:
        sentences.append(f"{exported.gone:,} values went away before they were read.")
    _say(" ".join(sentences), document | asdict(exported), args.json, to)
    return 0


def run_import(args: argparse.Namespace) -> int:
    """Imports; returns 1 if values were refused."""
    store = _store(args)
    with _input(args.file) as file, words.progress(args.json) as progress:
        archive = Archive(file)
        total = sum(one.objects for one in archive.namespaces)
        task = progress.add_task("verifying" if args.dry_run else "importing", total=total)
        imported = import_archive(
            archive,
            store,
            timeout=args.timeout,
            pace=Pace(args.rate),
            dry_run=args.dry_run,
            advance=lambda count: progress.advance(task, count),
        )
    stored = "would be stored" if args.dry_run else "were stored"
    sentence = (
        f"{imported.values:,} values, {words.size(imported.nbytes)}: {imported.stored:,} {stored}, "
        f"{imported.present:,} are in the pool already, {imported.damaged:,} were refused."
    )
    document = {
        "file": args.file,
        "dry_run": args.dry_run,
        "namespaces": [namespace_as_json(one) for one in archive.namespaces],
        **asdict(imported),
    }
    _say(sentence, document, args.json, sys.stdout)
    return 1 if imported.damaged else 0


def _store(args: argparse.Namespace) -> Store:
    keys = words.encryption_keys(args.encryption_key_file)
    store = Store.open(words.named_pool(args.url), client_name="penstock-pool")
    return store if keys is None else store.encrypted(keys)


def _say(sentence: str, document: dict[str, Any], as_json: bool, to: TextIO) -> None:
    if as_json:
        words.print_json(document, to)
    else:
        print(sentence, file=to)


@contextmanager
def _output(name: str) -> Iterator[BinaryIO]:
    """The file to write. It gets its name only when all of it is there."""
    if name == _STREAM:
        if sys.stdout.isatty():
            raise ConfigError("an archive is not for a terminal: send standard output to a file")
        yield sys.stdout.buffer
        return
    path = Path(name)
    if path.exists():
        raise ConfigError(f"{name} is there already; give another name, or remove it")
    if not path.parent.is_dir():
        raise ConfigError(f"{name} cannot be written: there is no folder {path.parent}")
    try:
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            made = Path(file.name)
            try:
                yield file  # type: ignore[misc]
                file.flush()
                os.fsync(file.fileno())
                made.rename(path)
            except BaseException:
                with suppress(OSError):
                    made.unlink()
                raise
    except PenstockError:
        # Some of these are errors of the operating system too.
        raise
    except OSError as error:
        raise IoError(f"{name} cannot be written: {error.strerror or error}") from error


@contextmanager
def _input(name: str) -> Iterator[BinaryIO]:
    if name == _STREAM:
        yield sys.stdin.buffer
        return
    path = Path(name)
    if not path.exists() or path.is_dir():
        raise ConfigError(f"{name} is no file: name one that `penstock pool export` wrote")
    try:
        with path.open("rb") as file:
            yield file
    except PenstockError:
        # Some of these are errors of the operating system too.
        raise
    except OSError as error:
        raise IoError(f"{name} cannot be read: {error.strerror or error}") from error
