"""Archives: namespaces of a pool in one file, which is written and read as a stream.

| part | content |
|---|---|
| head | ``PNSKPOOL`` · version, 2 bytes, now 1 · length of the description, 4 bytes · description · digest |
| each value | ``V`` · key, 56 bytes · length, 8 bytes · digest · value, header in front · digest |
| end | ``E`` · number of values, 8 bytes · their bytes, 8 bytes · digest |

Integers are little endian. The description is JSON, see :class:`Archive`. A digest is BLAKE2b with
16 bytes, over everything before it but the other digests. So whatever was cut off, left out, moved
or changed is noticed before the value after it is used.

Values lie in an archive as they lay in the pool. Encrypted ones stay encrypted.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from penstock._native import Store
from penstock.errors import ArchiveError, ConfigError, PenstockError, Rejected
from penstock.pool.namespace import DESCRIPTIONS, DIGEST_BYTES, canonical_json, publish_namespace
from penstock.pool.pace import Pace
from penstock.pool.pool import NamespaceUsage
from penstock.pool.sweep import Finding, batches, sweep

__all__ = ["VERSION", "Archive", "Exported", "Imported", "export_namespaces", "import_archive"]

VERSION = 1
"""The version of the format that is written, and the only one that is read."""

_MAGIC = b"PNSKPOOL"
_HEAD = struct.Struct("<8sHI")
_VALUE = struct.Struct("<56sQ")
_END = struct.Struct("<QQ")
_HASH_BYTES = 16
_LONGEST_DESCRIPTION = 256 << 20
_PIECE = 1 << 20
_DESCRIPTION_TIMEOUT = 5.0


@dataclass
class Exported:
    """What an export wrote."""

    values: int = 0
    nbytes: int = 0
    """Bytes of the values, headers included."""
    unreadable: int = 0
    """Values among them that could not be verified in whole: see :attr:`Finding.UNREADABLE`."""
    damaged: int = 0
    """Values that were left out because they are damaged or cannot be read."""
    gone: int = 0
    """Values that were evicted or removed before they were read."""


@dataclass
class Imported:
    """What an import found in an archive and did with it."""

    values: int = 0
    nbytes: int = 0
    """Bytes of the values, headers included."""
    stored: int = 0
    """Values that were stored; in a dry run, that would be."""
    present: int = 0
    """Values that the pool had already."""
    damaged: int = 0
    """Values that were refused because they are damaged."""


def export_namespaces(
    store: Store,
    namespaces: Sequence[NamespaceUsage],
    file: BinaryIO,
    *,
    timeout: float,
    pace: Pace,
    advance: Callable[[int], None] = lambda objects: None,
) -> Exported:
    """Writes namespaces of a pool into a file, as a stream.

    Every value is verified before it is written. With `store`'s encryption keys, encrypted values
    are authenticated; without them, only their headers are checked. Damaged values are left out.

    Raises:
        StoreError: the store failed. The file has no end then, and cannot be imported in whole.
        OSError: the file cannot be written.
    """
    exported = Exported()
    described = [
        {
            "namespace": one.digest.hex(),
            "description": one.description,
            "objects": one.objects,
            "bytes": one.nbytes,
        }
        for one in namespaces
    ]
    writer = _Writer(file)
    head = canonical_json({"kind": "penstock archive", "namespaces": described})
    writer.write(_HEAD.pack(_MAGIC, VERSION, len(head)) + head)
    writer.sign()
    for one in namespaces:
        listed = store.list(one.digest, timeout=timeout)
        for looks in sweep(store, listed, timeout=timeout, pace=pace):
            for look in looks:
                if look.finding is Finding.GONE:
                    exported.gone += 1
                elif look.finding is Finding.DAMAGED or not look.value:
                    exported.damaged += 1
                else:
                    exported.unreadable += look.finding is Finding.UNREADABLE
                    exported.values += 1
                    exported.nbytes += len(look.value)
                    writer.write(b"V" + _VALUE.pack(look.key, len(look.value)))
                    writer.sign()
                    writer.write(look.value)
                    writer.sign()
            advance(len(looks))
    writer.write(b"E" + _END.pack(exported.values, exported.nbytes))
    writer.sign()
    file.flush()
    return exported


class _Writer:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.blake2b(digest_size=_HASH_BYTES)

    def write(self, data: bytes) -> None:
        self._hash.update(data)
        self._file.write(data)

    def sign(self) -> None:
        """Writes the digest of what was written."""
        self._file.write(self._hash.digest())


class Archive:
    """An archive that is read once, from its beginning to its end.

    Raises:
        ArchiveError: the head is no archive's, or damaged.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.blake2b(digest_size=_HASH_BYTES)
        self._values = 0
        self._nbytes = 0
        begin = self._file.read(_HEAD.size)
        if not begin.startswith(_MAGIC):
            raise ArchiveError("not an archive of a pool: it does not begin like one")
        if len(begin) < _HEAD.size:
            raise ArchiveError("the archive is cut off in its head")
        self._hash.update(begin)
        _, version, length = _HEAD.unpack(begin)
        if version != VERSION:
            raise ArchiveError(
                f"the archive has format version {version}, and this Penstock reads {VERSION}: "
                "import it with the version that wrote it, or a later one"
            )
        if length > _LONGEST_DESCRIPTION:
            raise ArchiveError("the archive is damaged in its head")
        head = self._read(length)
        self._check()
        self.namespaces = _namespaces(head)
        """The namespaces of which it has values, as they were when it was written."""

    def values(self) -> Iterator[tuple[bytes, bytes]]:
        """Keys with their values, headers in front, each after its digest was checked.

        Raises:
            ArchiveError: the archive is cut off or damaged. What was yielded before is sound.
        """
        known = {one.digest for one in self.namespaces}
        while (tag := self._read(1)) == b"V":
            key, nbytes = _VALUE.unpack(self._read(_VALUE.size))
            self._check()
            if key[:DIGEST_BYTES] not in known:
                raise ArchiveError(f"{self._place()} is of a namespace that its head does not name")
            value = self._read(nbytes)
            self._check()
            self._values += 1
            self._nbytes += nbytes
            yield key, value
        if tag != b"E":
            raise ArchiveError(f"the archive is damaged after {self._values:,} values")
        ends = _END.unpack(self._read(_END.size))
        self._check()
        if ends != (self._values, self._nbytes) or self._file.read(1):
            raise ArchiveError("the archive is damaged at its end")

    def _place(self) -> str:
        return f"the archive's value {self._values + 1:,}"

    def _read(self, nbytes: int) -> bytes:
        """The next bytes. A length that is wrong takes no more memory than the file has bytes."""
        read = bytearray()
        while len(read) < nbytes:
            piece = self._file.read(min(_PIECE, nbytes - len(read)))
            if not piece:
                raise ArchiveError(f"the archive is cut off after {self._values:,} values")
            read += piece
        data = bytes(read)
        self._hash.update(data)
        return data

    def _check(self) -> None:
        """Compares the digest of what was read with the one that follows."""
        expected = self._hash.digest()
        found = self._file.read(_HASH_BYTES)
        if len(found) < _HASH_BYTES:
            raise ArchiveError(f"the archive is cut off after {self._values:,} values")
        if found != expected:
            raise ArchiveError(f"the archive is damaged after {self._values:,} values")


def _namespaces(head: bytes) -> list[NamespaceUsage]:
    try:
        described: dict[str, Any] = json.loads(head)
        namespaces = [
            NamespaceUsage(
                bytes.fromhex(one["namespace"]),
                int(one["objects"]),
                int(one["bytes"]),
                dict(one["description"]) if one["description"] is not None else None,
            )
            for one in described["namespaces"]
        ]
        if any(len(one.digest) != DIGEST_BYTES for one in namespaces):
            raise ValueError(f"a namespace has {DIGEST_BYTES} bytes")
        return namespaces
    except (ArithmeticError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ArchiveError(f"the archive's description is not as it should be: {error}") from error


def import_archive(
    archive: Archive,
    store: Store,
    *,
    timeout: float,
    pace: Pace,
    dry_run: bool = False,
    advance: Callable[[int], None] = lambda objects: None,
) -> Imported:
    """Stores the values of an archive in a pool, as a stream. Each is verified first.

    With `store`'s encryption keys, encrypted values are authenticated; without them, only their
    headers are checked. Values that the pool has already stay as they are.

    Args:
        archive: the archive.
        store: the pool.
        timeout: seconds for each batch of values.
        pace: bound on the bytes of values.
        dry_run: verifies everything and stores nothing.
        advance: is called with the number of values read since the last call.

    Raises:
        ArchiveError: the archive is cut off or damaged. The sound values before that are stored.
        StoreError: the store failed. The values before that are stored.
    """
    imported = Imported()
    failure: list[ArchiveError] = []
    try:
        if not dry_run:
            _describe(archive, store)
        for batch in batches(_until_failure(archive, failure), lambda one: len(one[1])):
            nbytes = sum(len(value) for _, value in batch)
            imported.values += len(batch)
            imported.nbytes += nbytes
            _import_batch(batch, store, imported, timeout, dry_run)
            advance(len(batch))
            pace.spend(nbytes)
    except ConfigError as error:
        raise ArchiveError(f"the pool cannot take what the archive holds: {error}") from error
    if failure:
        done = "nothing was stored" if dry_run else f"{imported.stored:,} values before were stored"
        raise ArchiveError(f"{failure[0]}; {done}") from failure[0]
    return imported


def _describe(archive: Archive, store: Store) -> None:
    for one in archive.namespaces:
        if one.description is not None and one.digest != DESCRIPTIONS:
            publish_namespace(store, one.digest, one.description, timeout=_DESCRIPTION_TIMEOUT)


def _until_failure(archive: Archive, failure: list[ArchiveError]) -> Iterator[tuple[bytes, bytes]]:
    """The archive's values until one cannot be read, so that those before it are stored."""
    try:
        yield from archive.values()
    except ArchiveError as error:
        failure.append(error)


def _import_batch(
    batch: list[tuple[bytes, bytes]], store: Store, imported: Imported, timeout: float, dry: bool
) -> None:
    present = store.contains([key for key, _ in batch], timeout=timeout)
    absent = [one for one, is_there in zip(batch, present, strict=True) if not is_there]
    imported.present += len(batch) - len(absent)
    if dry:
        findings = [Finding(finding) for finding, _ in store.examine(absent)]
        damaged = findings.count(Finding.DAMAGED)
        imported.damaged += damaged
        imported.stored += len(absent) - damaged
        return
    for outcome in store.put_whole(absent, timeout=timeout):
        if isinstance(outcome, Rejected):
            imported.damaged += 1
        elif isinstance(outcome, PenstockError):
            raise outcome
        elif outcome:
            imported.stored += 1
        else:
            imported.present += 1
