"""The room in which wrong calls are made: a folder of bad files, and servers that refuse.

Calls name what is here by relative paths. Text that differs from machine to machine is replaced, so
that pages are the same everywhere.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import penstock
from penstock.cli.main import main
from tests.servers import Server

PASSWORD = "hunter2"
"""In every URL that has a password. No output may show it."""

CLOSED_PORT = 1
"""Of the loopback interface. Nobody listens on it."""

_VERSION_AT = 8
"""Where the segment of a pool in shared memory has its format's version."""

_ARCHIVE_VERSION_AT = 8
"""Where an archive of a pool has its format's version."""

_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}
_REQUEST = {"timestamp": 0, "input_length": 512, "output_length": 8, "hash_ids": [1]}


@dataclass(frozen=True)
class Room:
    """The folder, and the server that knows one user."""

    folder: Path
    server: Server
    newer: str
    """The name of a pool in shared memory whose format is newer."""

    def plain(self, text: str) -> str:
        """The text without what is of this machine or this run."""
        text = text.replace(f"127.0.0.1:{self.server.port}", "127.0.0.1:PORT")
        text = text.replace(str(self.folder), "/ROOM").replace(self.newer, "NEWER")
        text = text.replace(penstock.__version__, "VERSION")
        return re.sub(r"\b(median|used of) [\d.]+ \w+", r"\1 …", text)


@contextmanager
def room() -> Iterator[Room]:
    """A room that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-golden-"))
    newer = Path(f"/dev/shm/penstock-{folder.name}")
    # Readable by others, because some calls are made as another user.
    folder.chmod(0o755)
    try:
        _furnish(folder)
        penstock.open(f"shm://{folder.name}?size=16MiB").close()
        with newer.open("r+b") as segment:
            segment.seek(_VERSION_AT)
            segment.write((99).to_bytes(8, "little"))
        sockets = folder / "server"
        sockets.mkdir()
        with Server("valkey", sockets) as server:
            server.command("ACL", "SETUSER", "default", "off")
            server.command("ACL", "SETUSER", "me", "on", f">{PASSWORD}x", "~*", "+@all")
            yield Room(folder, server, folder.name)
    finally:
        newer.unlink(missing_ok=True)
        shutil.rmtree(folder)


def _furnish(folder: Path) -> None:
    # Messages tell modes, which must not come from the umask.
    (folder / "folder").mkdir()
    (folder / "folder").chmod(0o755)
    (folder / "empty").touch()
    (folder / "empty").chmod(0o644)
    (folder / "unreadable").write_text("{}")
    (folder / "unreadable").chmod(0)
    (folder / "damaged.json").write_text('{"model_type": "llama", "num_hidden')
    (folder / "list.json").write_text("[1, 2]")
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "binary").chmod(0o644)
    (folder / "damaged.gz").write_bytes(gzip.compress(b"{}" * 1000)[:30])

    (folder / "config.json").write_text(json.dumps(_CONFIG))
    for name, changes in {
        "unknown-model.json": {"model_type": "abacus"},
        "negative.json": {"num_hidden_layers": -4},
        "text-for-number.json": {"hidden_size": "wide"},
        "missing-number.json": {"vocab_size": None},
    }.items():
        (folder / name).write_text(json.dumps(_CONFIG | changes))

    request = json.dumps(_REQUEST)
    (folder / "trace.jsonl").write_text(request + "\n")
    (folder / "damaged.jsonl").write_text(f"{request}\n{request[:30]}\n")
    (folder / "other.jsonl").write_text('{"colour": "red"}\n')
    (folder / "negative.jsonl").write_text(request.replace("512", "-512") + "\n")

    (folder / "keys").write_text(f"one:{'A' * 43}=\n")
    (folder / "keys").chmod(0o600)
    (folder / "damaged-keys").write_text("one:short\n")
    (folder / "damaged-keys").chmod(0o600)

    with penstock.open(f"file://{folder}/pool?size=64MiB", namespace="docs") as pool:
        pool.put("key", bytes(1000))
    archive = folder / "archive.pool"
    with redirect_stdout(io.StringIO()):
        assert main(["pool", "export", f"file://{folder}/pool", str(archive)]) == 0
    whole = archive.read_bytes()
    (folder / "cut.pool").write_bytes(whole[:-100])
    (folder / "damaged.pool").write_bytes(whole[:-200] + b"!" + whole[-199:])
    newer = _ARCHIVE_VERSION_AT
    (folder / "newer.pool").write_bytes(whole[:newer] + b"\x63" + whole[newer + 1 :])
    (folder / "prompts.jsonl").write_text('"The penstock"\n')
