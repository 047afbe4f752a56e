"""A store for Penstock in a SQLite database: ``sqlite:///absolute/path.db?size=10GiB``."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from urllib.parse import parse_qs, unquote, urlsplit

from penstock.errors import ConfigError, Full, StoreError, TimedOut, Unavailable
from penstock.pool import Get, Listed, Put, PythonStore, parse_size

_SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (
    key BLOB PRIMARY KEY, value BLOB NOT NULL, used INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS by_use ON objects (used);
"""
_NO_USE = 2**64 - 1
_PATIENCE = 10.0
"""Seconds that others may have a new database for themselves."""


class SqliteStore(PythonStore):
    """Values in one table of a database. Several processes may use it at once."""

    persistent = True

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        options = parse_qs(parts.query, keep_blank_values=True)
        sizes = options.pop("size", [])
        if parts.netloc or not parts.path.startswith("/") or options or len(sizes) > 1:
            raise ConfigError(
                "a SQLite pool is sqlite:///absolute/path.db, with ?size=10GiB or not"
            )
        self._size = parse_size(sizes[0]) if sizes else None
        self._path = unquote(parts.path)
        self.bounded = self._size is not None
        self.shown_url = f"sqlite://{parts.path}" + (f"?size={sizes[0]}" if sizes else "")
        # SQLite's own limit is 1 GB for a row.
        self.max_value_bytes = min(self._size or 900 << 20, 900 << 20)
        try:
            self._database = sqlite3.connect(self._path, isolation_level=None)
            self._write_ahead()
            self._database.executescript("PRAGMA synchronous=OFF;" + _SCHEMA)
        except sqlite3.Error as error:
            raise ConfigError(f"the database cannot be used: {error} ({self._path})") from error

    def _write_ahead(self) -> None:
        """Changes to a log that is written ahead. The first one to do so needs the database alone.
        SQLite does not wait for that, whatever its timeout is. So if several processes open a new
        database at once, we wait here."""
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                self._database.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > until:
                    raise
                time.sleep(0.02)

    def contains(self, keys: Sequence[bytes], timeout: float) -> list[bool]:
        with self._within(timeout):
            return [self._length(key) is not None for key in keys]

    def put_many(self, batch: Sequence[Put], timeout: float) -> list[bool | StoreError]:
        with self._within(timeout), self._transaction():
            outcomes: list[bool | StoreError] = [self._put(put) for put in batch]
            self._evict()
        return outcomes

    def get_many(self, batch: Sequence[Get], timeout: float) -> list[bytes | StoreError | None]:
        with self._within(timeout):
            values: list[bytes | StoreError | None] = []
            for get in batch:
                row = self._one("SELECT value FROM objects WHERE key = ?", get.key)
                values.append(None if row is None else row[0])
            if self.bounded:
                used = [(get.key, get.position) for get in batch if get.position != _NO_USE]
                self._use(used)
            return values

    def touch(self, batch: Sequence[tuple[bytes, int]], timeout: float) -> list[bool]:
        with self._within(timeout):
            self._use(batch)
            return [self._length(key) is not None for key, _ in batch]

    def remove(self, keys: Sequence[bytes], timeout: float) -> int:
        with self._within(timeout), self._transaction():
            removed = [
                self._database.execute("DELETE FROM objects WHERE key = ?", (key,)).rowcount
                for key in keys
            ]
        return sum(removed)

    def list_objects(self, namespace: bytes | None, timeout: float) -> list[Listed]:
        query, bounds = "SELECT key, length(value), used FROM objects", ()
        if namespace is not None:
            query += " WHERE key BETWEEN ? AND ?"
            bounds = (namespace, namespace + b"\xff" * 40)
        with self._within(timeout):
            return [Listed(*row) for row in self._database.execute(query, bounds)]

    def describe(self, timeout: float) -> dict[str, object]:
        with self._within(timeout):
            count, used = self._one("SELECT count(*), total(length(value)) FROM objects")
        facts = {"database": self._path, "objects": count, "used_bytes": int(used)}
        return facts if self._size is None else {**facts, "capacity_bytes": self._size}

    def close(self) -> None:
        self._database.close()

    def _one(self, query: str, *values: object) -> tuple | None:
        return self._database.execute(query, values).fetchone()

    def _length(self, key: bytes) -> int | None:
        row = self._one("SELECT length(value) FROM objects WHERE key = ?", key)
        return None if row is None else row[0]

    def _put(self, put: Put) -> bool:
        if self._length(put.key) == len(put.value):
            return False
        self._database.execute(
            "INSERT OR REPLACE INTO objects VALUES (?, ?, ?)",
            (put.key, put.value, _use_of(put.position)),
        )
        return True

    def _use(self, batch: Sequence[tuple[bytes, int]]) -> None:
        with self._transaction():
            self._database.executemany(
                "UPDATE objects SET used = ? WHERE key = ?",
                [(_use_of(position), key) for key, position in batch],
            )

    def _evict(self) -> None:
        """Removes what was used least recently, until the rest is within the bound."""
        if self._size is None:
            return
        (used,) = self._one("SELECT total(length(value)) FROM objects")
        for key, nbytes in self._database.execute(
            "SELECT key, length(value) FROM objects ORDER BY used"
        ).fetchall():
            if used <= self._size:
                break
            self._database.execute("DELETE FROM objects WHERE key = ?", (key,))
            used -= nbytes

    def _within(self, timeout: float) -> _Waiting:
        self._database.execute(f"PRAGMA busy_timeout = {int(timeout * 1000)}")
        return _Waiting()

    def _transaction(self) -> _Transaction:
        return _Transaction(self._database)


def _use_of(position: int) -> int:
    """When a value counts as used: the end of a prompt is of no use without its beginning."""
    return time.time_ns() // 1000 - position


class _Waiting:
    """Turns SQLite's exceptions into Penstock's."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, sqlite3.Error):
            return
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            raise TimedOut(f"another process has the database: {error}") from error
        if name == "SQLITE_FULL":
            raise Full(str(error)) from error
        raise Unavailable(str(error)) from error


class _Transaction:
    """All or nothing, and the only one that writes."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._database.execute("COMMIT" if error is None else "ROLLBACK")
