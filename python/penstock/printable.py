"""Foreign text made printable: what a pool, a server or another process says may hold anything.

Control characters would move a terminal's cursor, set its title, or feign lines of a log. So all
that is shown to people passes through :func:`printable` on its way out: what commands print
(`penstock.cli.words`), and what Penstock logs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable


def printable(text: str, *, keep: str = "") -> str:
    r"""The text with an escape for each character that is not printable, but for those of `keep`.

    >>> print(printable("a\x1b[2Jb\nc\u202ed"))
    a\x1b[2Jb\nc\u202ed
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else repr(each)[1:-1] for each in text
    )


class _Printable(logging.Filter):
    """Makes a record's message printable, and what it shows of an exception."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Changes the record. Every record is logged."""
        try:
            record.msg, record.args = printable(record.getMessage()), None
            if record.exc_info and not record.exc_text:
                # A formatter takes this text instead of making its own. No line of it begins as a
                # record does.
                text = printable(_formatter.formatException(record.exc_info), keep="\n")
                record.exc_text = text.replace("\n", "\n  ")
        except Exception:
            # Whoever shows the record reports what is wrong with it. A filter's error would reach
            # the one who logs.
            return True
        return True


_formatter = logging.Formatter()
_filter = _Printable()


def watch_logs(names: Iterable[str]) -> None:
    """Makes everything printable that these loggers log."""
    for name in names:
        logging.getLogger(name).addFilter(_filter)
