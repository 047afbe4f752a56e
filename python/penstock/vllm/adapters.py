"""LoRA adapters, identified by their content. The content goes into the hashes of their blocks.

vLLM's block hashes hold an adapter's name and path. But the files under a path may change, and a
pool outlives servers. So an adapter that was trained again would hit the KV of its predecessor. To
prevent this, the engine core adds the digest of the adapter's files to every block's hash. Before a
worker stores or loads a block, it compares that digest with the adapter that it has loaded.

If the content under an adapter's number is replaced, the old content is *retired*. Blocks from
before and after may have the same hash in the engine's own prefix cache, so no block of retired
content is shared any more.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger("vllm.penstock")

_FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "adapter_model.pt",
)
"""The files that vLLM reads in an adapter's folder."""

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Adapter:
    """An adapter as a request names it."""

    number: int
    """vLLM's ``lora_int_id``."""
    folder: str
    variant: str
    """Options that change the result of computing with the same files."""
    digest: str
    """Digest of its content; empty if the content is not known. Then its blocks are not shared."""


def variant(options: str, *, is_3d: bool) -> str:
    """The variant of an adapter, from the engine's options and the form of its weights."""
    return f"{options} is_3d={is_3d}"


def content_digest(folder: Path, variant: str) -> str:
    """SHA-256 of all files that vLLM reads of an adapter, and of the options that it reads them
    with (`variant`). Empty if the files are missing, or change meanwhile.

    Reads the files whole, as vLLM does when it loads them.
    """
    digest = hashlib.sha256(variant.encode())
    try:
        before = files_state(folder)
        for name, *_ in before:
            digest.update(f"\0{name}\0".encode())
            with (folder / name).open("rb") as file:
                while piece := file.read(_READ_BYTES):
                    digest.update(piece)
        is_same = before == files_state(folder)
    except OSError:
        return ""
    return digest.hexdigest() if before and is_same else ""


def files_state(folder: Path) -> list[tuple[str, int, int, int]]:
    """Name, size, time of change and inode of each file. The result differs after a file was
    replaced.

    Raises:
        OSError: the folder cannot be read.
    """
    found = []
    for name in _FILES:
        try:
            facts = (folder / name).stat()
        except FileNotFoundError:
            continue
        found.append((name, facts.st_size, facts.st_mtime_ns, facts.st_ino))
    return found


@dataclass
class NamedAdapters:
    """The engine core's side: the content that goes into the block hashes of requests.

    Two threads use it: the one that takes requests in, and the scheduler's.
    """

    _known: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Adapter's number → folder and digest."""
    _retired: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def name(self, number: int, folder: str, variant: str) -> Adapter:
        """The adapter of a new request. Its files are read when its number is new."""
        with self._lock:
            if number not in self._known:
                self._known[number] = folder, content_digest(Path(folder), variant)
            known, digest = self._known[number]
            # A worker that has this number loaded goes on with the old folder.
            return Adapter(number, folder, variant, digest if folder == known else "")

    def on_loaded(self, number: int, folder: str, variant: str) -> None:
        """The operator loaded an adapter, for the first time or in place of an older one."""
        digest = content_digest(Path(folder), variant)
        with self._lock:
            _, previous = self._known.get(number, ("", digest))
            if previous != digest:
                self._retired.add(previous)
            self._known[number] = folder, digest

    def shares(self, adapter: Adapter) -> bool:
        """Whether blocks computed with this adapter may be stored and loaded."""
        return bool(adapter.digest) and adapter.digest not in self._retired


class LoadedAdapters:
    """A worker's side: the content that the worker computes with."""

    def __init__(self) -> None:
        self._loaded: dict[int, str] = {}
        self._retired: set[str] = set()
        self._warned: set[int] = set()

    def on_loaded(self, number: int, digest: str) -> None:
        """The model has read an adapter's files, with this content."""
        previous = self._loaded.get(number, digest)
        if previous != digest:
            self._retired.add(previous)
        self._loaded[number] = digest

    def agrees(self, adapter: Adapter) -> bool:
        """Whether this worker computes with the same content as the adapter in the block hashes.

        If the model has not read the adapter yet, which is so before its first step, this reads
        the files.
        """
        loaded = self._loaded.get(adapter.number)
        if loaded is None:
            loaded = content_digest(Path(adapter.folder), adapter.variant)
        if loaded == adapter.digest and adapter.digest not in self._retired:
            return True
        self._retired.add(adapter.digest)
        if adapter.number not in self._warned:
            self._warned.add(adapter.number)
            logger.warning(
                "Penstock: the LoRA adapter %d in %s is not the one that its requests' blocks are "
                "named by: its files have changed since. Its blocks are neither stored nor loaded. "
                "Unload it and load it again to share them",
                adapter.number,
                adapter.folder,
            )
        return False
