"""Every exception that Penstock raises, under one root class.

If Python has a builtin exception for the same situation, the class also derives from that builtin.
So code that knows nothing of Penstock still handles it (``except TimeoutError``).
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "ArchiveError",
    "Closed",
    "ConfigError",
    "Denied",
    "Full",
    "InternalError",
    "IoError",
    "LayoutError",
    "NotFound",
    "OverQuota",
    "PenstockError",
    "ProtocolError",
    "Rejected",
    "StoreError",
    "TimedOut",
    "TooSmall",
    "Unavailable",
    "Unreachable",
    "Unsupported",
]


class PenstockError(Exception):
    """Root of every exception that Penstock raises on purpose."""

    #: Stable lower-case name of the situation, as used in counters and in JSON output.
    kind: ClassVar[str] = "penstock"


class ConfigError(PenstockError, ValueError):
    """A URL, an option or an argument is wrong. Nothing works until the user changes it."""

    kind = "config"


class Closed(PenstockError, ValueError):
    """The pool was closed. A closed file raises :class:`ValueError` too."""

    kind = "closed"


class LayoutError(PenstockError, ValueError):
    """Sizes, strides or tensors do not describe a layout. The message has the reason."""

    kind = "layout"


class NotFound(PenstockError, KeyError):
    """The store has no verified value under the key."""

    kind = "not_found"

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which is for keys, not for sentences.
        return Exception.__str__(self)


class Rejected(PenstockError):
    """A value arrived and failed verification, so none of it may be used."""

    kind = "rejected"

    def __init__(self, message: str, reason: str = "unknown", is_foreign: bool = False) -> None:
        super().__init__(message)
        #: Which check failed, as a stable lower-case name.
        self.reason = reason
        #: Whether readers with other encryption keys may be able to use the value. If so, it stays.
        self.is_foreign = is_foreign


class TooSmall(PenstockError, ValueError):
    """A value does not fit the destination it was to be fetched into."""

    kind = "too_small"

    def __init__(self, message: str, nbytes: int = 0) -> None:
        super().__init__(message)
        #: Bytes of the value.
        self.nbytes = nbytes


class ArchiveError(PenstockError, ValueError):
    """A file is no archive of a pool, or is cut off or damaged. The message says where."""

    kind = "archive"


class StoreError(PenstockError):
    """A store failed; subclasses say how."""

    kind = "store"


class Unreachable(StoreError, ConnectionError):
    """The store cannot be reached, or went away in the middle of an operation."""

    kind = "unreachable"


class TimedOut(StoreError, TimeoutError):
    """The deadline passed, and the operation was given up."""

    kind = "timed_out"


class Denied(StoreError, PermissionError):
    """Credentials are missing, wrong, or do not permit the operation."""

    kind = "denied"


class Full(StoreError):
    """The store has no room, and its policy does not make any."""

    kind = "full"


class OverQuota(Full):
    """The account that the object counts for has no room in its quota now. Others have."""

    kind = "over_quota"


class Unavailable(StoreError):
    """The store answers but cannot serve now (loading, read-only replica, cluster down)."""

    kind = "unavailable"


class ProtocolError(StoreError):
    """The peer said something that the protocol does not allow."""

    kind = "protocol"


class IoError(StoreError, OSError):
    """The operating system refused (files, directories)."""

    kind = "io"


class InternalError(StoreError):
    """Penstock itself failed: a thread of it panicked. The store is not to blame. Report it."""

    kind = "internal"


class Unsupported(StoreError):
    """The store has no way to do this, now or later."""

    kind = "unsupported"
