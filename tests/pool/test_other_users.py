"""A pool in a directory on a machine with other users, who really are others here."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.errors import Denied

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="only root can start a process of another user (setpriv)",
)

_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


def _as_nobody(script: str, folder: Path) -> None:
    subprocess.run([*_NOBODY, "sh", "-ec", f"umask 0\n{script}"], cwd=folder, check=True)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A folder in which every user may make files, as in /tmp."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    opened = [above for above in folder.parents if not above.stat().st_mode & 0o001]
    modes = {above: above.stat().st_mode & 0o7777 for above in opened}
    for above in opened:
        above.chmod(0o755)
    yield folder
    for above, mode in modes.items():
        above.chmod(mode)


def test_a_directory_that_another_user_made_first_is_refused(shared: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text(text := "settings of root, longer than a record of what is in use\n" * 2)
    _as_nobody(f"mkdir -p pool/tmp; ln -s '{victim}' pool/usage", shared)
    with pytest.raises(Denied, match="belongs to user 65534, who is not trusted"):
        penstock.open(f"file://{shared}/pool?size=64MiB")
    # Nor does trust in that user make a link one of the pool's files.
    with pytest.raises(Denied, match="symbolic link"):
        penstock.open(f"file://{shared}/pool?size=64MiB&trust=65534,all")
    assert victim.read_text() == text


def test_another_users_value_is_a_miss_and_so_is_a_fifo(shared: Path) -> None:
    with penstock.open(f"file://{shared}/source?size=64MiB") as pool:
        pool.put("key", b"false")
        (value,) = (shared / "source" / pool.namespace.hex()).glob("*/*")
    subprocess.run(["chmod", "-R", "a+rX", shared / "source"], check=True)
    place = shared / "pool" / value.relative_to(shared / "source")
    with penstock.open(f"file://{shared}/pool?size=64MiB") as pool:
        # As if the owner had opened it to everybody meanwhile.
        (shared / "pool").chmod(0o777)
        _as_nobody(f"mkdir -p '{place.parent}'; cp '{value}' '{place}'", shared)
        assert pool.get("key", default=None) is None
        assert pool.contains(["key"]) == [False]
        _as_nobody(f"rm '{place}'; mkfifo '{place}'", shared)
        assert pool.get("key", default=None) is None
        with pytest.raises(Denied, match="a folder of the pool belongs to user 65534"):
            pool.put("key", b"right")
        shutil.rmtree(place.parents[1])
        assert pool.put("key", b"right")
        assert bytes(pool.get("key")) == b"right"
