"""The program in which a store in Python runs, beside the process that uses it.

The other side is ``crates/penstock-store/src/registered``; its ``protocol.rs`` has the messages.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import os
import queue
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex, TypeAlias

from penstock.errors import PenstockError, ProtocolError, TooSmall
from penstock.pool.store import Get, Put, PythonStore

_MAGIC = b"PNSKHOST"
_VERSION = 1
_KEY_BYTES = 56
_LONGEST_TEXT = 1 << 16
_PR_SET_PDEATHSIG = 1

_LENGTH = struct.Struct("<I")
_REQUEST = struct.Struct("<IIQQ")
_REPLY = struct.Struct("<IIQ")
_TOUCH = struct.Struct("<56sQ")
_ITEM = struct.Struct("<56sQQ")
_GREETING = struct.Struct("<8sIBBIQ")
_PUT = struct.Struct("<II")
_GOT = struct.Struct("<IIQ")

_PUT_MANY = 3
_YES, _NO, _TOO_LARGE, _WENT_WRONG = 1, 2, 3, 4
_DONE, _FAILED = 0, 1

_Buffer: TypeAlias = "bytes | bytearray | memoryview"
_Reply: TypeAlias = "tuple[int, Sequence[_Buffer]]"
"""Number of items, and what follows."""


def main(target: str) -> None:
    """Serves the store of `target`, `module:class`, until nobody needs it any more."""
    control = _take_control()
    _die_with_owner()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # It is no terminal, and most programs end too suddenly for what is still held back.
        sys.stdout.reconfigure(line_buffering=True)
    url = _exactly(control, _LENGTH.unpack(_exactly(control, _LENGTH.size))[0]).decode()
    try:
        module, _, name = target.partition(":")
        made: Callable[[str], PythonStore] = getattr(importlib.import_module(module), name)
        store = made(url)
        greeting = _greeting(store)
    except BaseException as error:
        _greet(control, _MAGIC + _LENGTH.pack(_VERSION) + b"\1" + _error_text(error, "config"))
        _end(1)
    _greet(control, greeting)
    links: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
    _start(_receive_links, control, links)
    for _ in range(store.concurrency - 1):
        _start(_serve_links, store, links)
    _serve_links(store, links)
    with contextlib.suppress(Exception):
        store.close()
    _end(0)


def _start(work: Callable[..., None], *arguments: object) -> None:
    """Starts a thread without which this program is of no use: it ends if that fails, and is
    started again by who needs it."""

    def run() -> None:
        try:
            work(*arguments)
        except BaseException:
            traceback.print_exc()
            _end(1)

    threading.Thread(target=run, daemon=True).start()


def _end(status: int) -> NoReturn:
    """Ends this program without waiting for the threads that a store may have left behind."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


def _take_control() -> socket.socket:
    """The socket that is standard input. What the store starts must not inherit it: its end says
    that this program has ended."""
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return control


def _die_with_owner() -> None:
    """Ends this program with the one that started it, and before it where memory is short."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if str(os.getppid()) != os.environ.get("_PENSTOCK_OWNER"):
        os._exit(1)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _greeting(store: PythonStore) -> bytes:
    can = (store.shared, store.persistent, store.bounded, store.pipelined)
    flags = sum(1 << bit for bit, yes in enumerate(can) if yes)
    facts = (flags, store.concurrency, store.max_value_bytes)
    return _GREETING.pack(_MAGIC, _VERSION, _DONE, *facts) + store.shown_url.encode()


def _greet(control: socket.socket, greeting: bytes) -> None:
    control.sendall(_LENGTH.pack(len(greeting)) + greeting)


def _receive_links(control: socket.socket, links: queue.SimpleQueue[socket.socket | None]) -> None:
    """Hands on the sockets that arrive, and at the end tells everybody that it is over."""
    with contextlib.suppress(OSError):
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 64, 64)
            if not message:
                break
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
                links.put(socket.socket(fileno=descriptor))
    links.put(None)


def _serve_links(store: PythonStore, links: queue.SimpleQueue[socket.socket | None]) -> None:
    while (link := links.get()) is not None:
        with link, contextlib.suppress(OSError, EOFError):
            _Server(store, link).serve()
    links.put(None)


class _Server:
    """Answers the requests of one link, one after the other."""

    def __init__(self, store: PythonStore, link: socket.socket) -> None:
        self._store = store
        self._link = link
        self._values = bytearray()
        self._operations: dict[int, Callable[[int, bytes, float], _Reply]] = {
            1: self._contains,
            2: self._touch,
            4: self._get,
            5: self._remove,
            6: self._list,
            7: self._describe,
        }

    def serve(self) -> None:
        """Until the link is closed.

        Raises:
            EOFError: it is.
        """
        while True:
            operation, items, microseconds, nbytes = _REQUEST.unpack(
                _exactly(self._link, _REQUEST.size)
            )
            timeout = microseconds / 1e6
            if operation == _PUT_MANY:
                self._put(items, nbytes, timeout)
            else:
                body = _exactly(self._link, nbytes)
                self._answer(partial(self._operations[operation], items, body, timeout))

    def _answer(self, work: Callable[[], _Reply]) -> None:
        """Answers with what `work` makes, or with its exception."""
        try:
            count, parts = work()
            head = _REPLY.pack(_DONE, count, sum(map(len, parts)))
        except Exception as error:
            parts = [_error_text(error)]
            head = _REPLY.pack(_FAILED, 0, len(parts[0]))
        _send(self._link, [head, *parts])

    def _contains(self, items: int, body: bytes, timeout: float) -> _Reply:
        return _answers(items, self._store.contains(_keys(body), timeout))

    def _touch(self, items: int, body: bytes, timeout: float) -> _Reply:
        return _answers(items, self._store.touch(list(_TOUCH.iter_unpack(body)), timeout))

    def _put(self, items: int, nbytes: int, timeout: float) -> None:
        """Receives values into memory that is used again for the next ones, unless the store holds
        on to it."""
        heads = list(_ITEM.iter_unpack(_exactly(self._link, items * _ITEM.size)))
        nbytes -= items * _ITEM.size
        if len(self._values) < nbytes:
            self._values = bytearray(nbytes)
        whole = memoryview(self._values)
        _fill(self._link, whole[:nbytes])
        batch, at = [], 0
        for key, position, length in heads:
            batch.append(Put(key, whole[at : at + length].toreadonly(), position))
            at += length
        self._answer(partial(self._put_many, items, batch, timeout))
        try:
            for put in batch:
                put.value.release()
            whole.release()
        except BufferError:
            self._values = bytearray()

    def _put_many(self, items: int, batch: list[Put], timeout: float) -> _Reply:
        heads, texts = [], []
        for outcome in _as_many(items, self._store.put_many(batch, timeout)):
            text = _error_text(outcome) if isinstance(outcome, Exception) else b""
            how = _WENT_WRONG if text else _YES if outcome else _NO
            heads.append(_PUT.pack(how, len(text)))
            texts.append(text)
        return items, [*heads, *texts]

    def _get(self, items: int, body: bytes, timeout: float) -> _Reply:
        batch = [Get(key, room, position) for key, position, room in _ITEM.iter_unpack(body)]
        parts: list[_Buffer] = []
        outcomes = _as_many(items, self._store.get_many(batch, timeout))
        for wanted, outcome in zip(batch, outcomes, strict=True):
            if outcome is None:
                parts.append(_GOT.pack(_NO, 0, 0))
            elif isinstance(outcome, TooSmall):
                parts.append(_GOT.pack(_TOO_LARGE, 0, outcome.nbytes))
            elif isinstance(outcome, Exception):
                text = _error_text(outcome)
                parts += _GOT.pack(_WENT_WRONG, len(text), 0), text
            else:
                value = memoryview(outcome).cast("B")
                if len(value) > wanted.room:
                    parts.append(_GOT.pack(_TOO_LARGE, 0, len(value)))
                else:
                    parts += _GOT.pack(_YES, 0, len(value)), value
        return items, parts

    def _remove(self, items: int, body: bytes, timeout: float) -> _Reply:
        removed: object = self._store.remove(_keys(body), timeout)
        if not isinstance(removed, SupportsIndex) or not 0 <= index(removed) <= items:
            raise ProtocolError(f"the store says that it removed {removed!r} of {items} values")
        return index(removed), []

    def _list(self, items: int, body: bytes, timeout: float) -> _Reply:
        namespace = body if items else None
        listed = self._store.list_objects(namespace, timeout)
        parts = [_ITEM.pack(each.key, each.nbytes, each.last_use) for each in listed]
        return len(parts), [b"".join(parts)]

    def _describe(self, items: int, body: bytes, timeout: float) -> _Reply:
        facts = self._store.describe(timeout).items()
        lines = [f"{_one_line(name)}\t{_one_line(fact)}\n" for name, fact in facts]
        return len(lines), ["".join(lines).encode()[:_LONGEST_TEXT]]


def _answers(items: int, found: Sequence[bool]) -> _Reply:
    return items, [bytes(map(bool, _as_many(items, found)))]


def _as_many(items: int, outcomes: Sequence[Any]) -> Sequence[Any]:
    """The outcomes, if there is one for each item.

    Raises:
        ProtocolError: there is not.
    """
    if len(outcomes) != items:
        raise ProtocolError(f"the store gave {len(outcomes)} answers to {items} questions")
    return outcomes


def _keys(joined: bytes) -> list[bytes]:
    return [joined[at : at + _KEY_BYTES] for at in range(0, len(joined), _KEY_BYTES)]


def _one_line(fact: object) -> str:
    return " ".join(str(fact).split())


def _error_text(error: BaseException, default: str = "unavailable") -> bytes:
    """Kind and message of an exception, of which nobody can be sure that it has either."""
    if isinstance(error, PenstockError):
        kind, message = error.kind, str(error)
    else:
        kind, message = default, f"{type(error).__name__}: {error}"
    return f"{kind}\n{_one_line(message)}".encode(errors="replace")[:_LONGEST_TEXT]


def _exactly(link: socket.socket, nbytes: int) -> bytes:
    received = bytearray(nbytes)
    with memoryview(received) as into:
        _fill(link, into)
    return bytes(received)


def _fill(link: socket.socket, into: memoryview) -> None:
    """Receives until the memory is full.

    Raises:
        EOFError: the other side has closed the link.
    """
    have = 0
    while have < len(into):
        some = link.recv_into(into[have:])
        if not some:
            raise EOFError
        have += some


def _send(link: socket.socket, parts: Sequence[_Buffer]) -> None:
    """Sends all parts, small ones together."""
    together = bytearray()
    for part in parts:
        if len(part) < 1 << 14:
            together += part
        else:
            link.sendall(together)
            together.clear()
            link.sendall(part)
    link.sendall(together)
