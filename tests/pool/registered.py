"""Distributions that bring stores, for tests: on the path, as if they were installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lab.distributions import SQLITE, bring

TROUBLED = '''
"""The example's store. With a file POOL.trouble, it does what that says instead of its work.

It says in POOL.trouble.asked that a get has come that it does not answer at once. A late answer is
sent once POOL.trouble is gone, and POOL.trouble.answered says that it was sent. With "waiting", it
waits for others for as long as they like, and says in POOL.trouble.waits that it does."""

import ctypes
import os
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import penstock_store_sqlite
from penstock.errors import Unreachable
from penstock.pool import Listed
from penstock_store_sqlite import SqliteStore


class Sent(bytes):
    """A value that says when the program has sent it: nobody needs it any more."""

    def __del__(self):
        self.said.touch()


class Patience:
    """A clock that stands still, for a store that sleeps while it waits."""

    def __init__(self, waits):
        self.waits = waits

    def monotonic(self):
        return 0.0

    def sleep(self, seconds):
        self.waits.touch()
        time.sleep(seconds)

    time_ns = time.time_ns


class TroubledStore(SqliteStore):
    def __init__(self, url):
        self._url = url
        self._file = Path(urlsplit(url).path + ".trouble")
        if self._trouble().startswith("opening"):
            with self._says("tries").open("a") as tries:
                tries.write(".")
                count = tries.tell()
        if self._trouble() == "opening":
            raise RuntimeError(f"no way to open {url}")
        if self._trouble() == "opening at the third try" and count < 3:
            os._exit(1)
        if self._trouble() == "opening never":
            raise Unreachable("nobody is there")
        while self._trouble() == "opening for long":
            time.sleep(0.05)
        if self._trouble() == "waiting":
            penstock_store_sqlite.time = Patience(self._says("waits"))
        super().__init__(f"sqlite://{urlsplit(url).path}")
        print("what a store prints is not for standard output")

    def close(self):
        print("its last words", end="")
        super().close()

    def _trouble(self):
        try:
            return self._file.read_text()
        except FileNotFoundError:
            return ""

    def _says(self, what):
        return Path(f"{self._file}.{what}")

    def get_many(self, batch, timeout):
        trouble = self._trouble()
        if trouble in ("sleeping", "holding", "late"):
            self._says("asked").touch()
        if trouble == "raising":
            raise RuntimeError(f"no way to get from {self._url}")
        if trouble == "sleeping":
            time.sleep(3600)
        if trouble == "holding":
            ctypes.PyDLL(None).sleep(3600)
        if trouble == "dying":
            os._exit(3)
        if trouble == "leaving a child":
            child = subprocess.Popen(["sleep", "3600"])
            self._says("child").write_text(str(child.pid))
            os._exit(3)
        if trouble == "exiting":
            raise SystemExit
        if trouble == "late":
            while self._trouble() == "late":
                time.sleep(0.01)
            values = [Sent(value) for value in super().get_many(batch, timeout)]
            for value in values:
                value.said = self._says("answered")
            return values
        if trouble == "miscounting":
            return []
        if trouble == "mistyping":
            return ["text"] * len(batch)
        if trouble == "corrupting":
            return [b"x" * len(value) for value in super().get_many(batch, timeout)]
        return super().get_many(batch, timeout)

    def remove(self, keys, timeout):
        removed = super().remove(keys, timeout)
        return {"removing nothing": None, "removing less": -1}.get(self._trouble(), removed)

    def list_objects(self, namespace, timeout):
        if self._trouble() == "listing":
            yield Listed(b"no key".ljust(56, b"."), 1)
        yield from super().list_objects(namespace, timeout)
'''

MEETING = '''
"""A store in memory that gets several values at a time, and none before as many are asked for."""

import threading

from penstock.errors import Unavailable
from penstock.pool import Listed, PythonStore


class MeetingStore(PythonStore):
    shared = False
    concurrency = 4

    def __init__(self, url):
        self.values = {}
        self.calls = threading.Condition()
        self.most = 0
        self.running = []

    def contains(self, keys, timeout):
        return [key in self.values for key in keys]

    def put_many(self, batch, timeout):
        for put in batch:
            self.values[put.key] = bytes(put.value)
        return [True] * len(batch)

    def get_many(self, batch, timeout):
        me = object()
        with self.calls:
            self.running.append(me)
            self.most = max(self.most, len(self.running))
            self.calls.notify_all()
            # Nobody goes before all are there, and then the last one goes first.
            met = self.calls.wait_for(
                lambda: self.most >= self.concurrency and self.running[-1] is me, 60
            )
            values = [self.values.get(get.key) for get in batch]
            self.running.remove(me)
            self.calls.notify_all()
        if not met:
            raise Unavailable("nobody else has come")
        return values

    def remove(self, keys, timeout):
        return sum(self.values.pop(key, None) is not None for key in keys)

    def list_objects(self, namespace, timeout):
        return [Listed(key, len(value)) for key, value in self.values.items()]

    def describe(self, timeout):
        return {"most": self.most}
'''

LEAKY = '''
"""A store that says whatever it has in its URL, in every spelling, and does nothing else."""

from urllib.parse import parse_qs, quote, quote_plus, unquote, unquote_plus, urlsplit

from penstock.errors import ConfigError, Unavailable
from penstock.pool import PythonStore


class LeakyStore(PythonStore):
    def __init__(self, url):
        parts = urlsplit(url)
        found = [parts.netloc, parts.path, unquote(url), unquote_plus(url)]
        for value in (parts.password or "", *sum(parse_qs(parts.query).values(), [])):
            meant = unquote(value)
            found += [value, meant, quote(meant), quote(meant, "").lower(), quote_plus(meant)]
        self.said = " ".join(map(repr, [url, *found]))
        if parts.path.endswith("/opening"):
            raise ConfigError(self.said)
        if parts.path.endswith("/shown"):
            self.shown_url = f"leaky://{unquote_plus(url)}"

    def _says(self, *_):
        raise Unavailable(self.said)

    contains = put_many = get_many = remove = list_objects = _says

    def describe(self, timeout):
        return {self.said: self.said}
'''


def bring_troubled(folder: Path) -> list[Path]:
    """Brings the example's store as `sqlite`, and in trouble as `troubled`. Returns the folders to
    put on the path."""
    stores = {
        "sqlite": "penstock_store_sqlite:SqliteStore",
        "troubled": "troubled:TroubledStore",
    }
    return [bring(folder, "penstock-test", stores, troubled=TROUBLED), SQLITE]


PATH_VARIABLE = "PENSTOCK_TEST_STORES"


def onto_path() -> None:
    """Puts the folders that the environment names on this process's path."""
    sys.path[:0] = os.environ[PATH_VARIABLE].split(os.pathsep)
