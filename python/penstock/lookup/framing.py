"""Where the requests of a connection begin and end, by their heads alone.

It decides nothing about a request: uvicorn reads it again, and refuses it if it has to. It only
tells whose turn it is, and whether what comes next is the beginning of a request. Where that cannot
be told beyond doubt, it says so, and says nothing more of the connection.
"""

from __future__ import annotations

import re

Headers = list[tuple[bytes, bytes]]

_MOST_HEAD_BYTES = 64 << 10
"""A longer head is none that this service has to know the end of."""
_MOST_DIGITS = 18
"""How many digits a body's length may have. No body has more bytes."""
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A header's name, as in RFC 9110, section 5.6.2."""
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
"""A header's value, with the white space around it: no control bytes."""
_METHODS = (b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH")
_END = b"\r\n\r\n"


class Framing:
    """The requests of one connection, as their bytes come."""

    def __init__(self) -> None:
        self._head = bytearray()
        """What came of a head that has not ended."""
        self._body_left = 0
        """Bytes of a body that have not come."""
        self.whole = 0
        """Requests that have come whole."""
        self.is_lost = False
        """Whether the end of some request could not be told."""

    @property
    def is_in_head(self) -> bool:
        """Whether a request has begun whose head has not ended."""
        return bool(self._head)

    @property
    def is_in_body(self) -> bool:
        """Whether a request's head has come, and its body not whole."""
        return self._body_left > 0

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the connection."""
        at = 0
        while at < len(data) and not self.is_lost:
            if self._body_left:
                taken = min(self._body_left, len(data) - at)
                self._body_left -= taken
                at += taken
                self.whole += self._body_left == 0
            else:
                at = self._feed_head(data, at)

    def _feed_head(self, data: bytes, at: int) -> int:
        """Takes bytes of a head, from `at` on. Returns where what it has not taken begins.

        Nothing is copied but a head, once: a piece may hold thousands of requests.
        """
        if self._head:
            before = len(self._head)
            self._head += data[at:]
            end = self._head.find(_END, max(0, before - len(_END) + 1))
            if end < 0:
                return self._keep_beginning(data)
            head = bytes(self._head[:end])
            self._head.clear()
            at += end + len(_END) - before
        else:
            # Empty lines before a request are allowed (RFC 9112, section 2.2).
            while at < len(data) and data[at] in b"\r\n":
                at += 1
            end = data.find(_END, at)
            if end < 0:
                self._head += data[at:]
                return self._keep_beginning(data)
            head = data[at:end]
            at = end + len(_END)
        length = _body_length(head) if len(head) <= _MOST_HEAD_BYTES else None
        self.is_lost = length is None
        self._body_left = length or 0
        self.whole += length == 0
        return at

    def _keep_beginning(self, data: bytes) -> int:
        """Takes all of a piece in which a head does not end."""
        if len(self._head) > _MOST_HEAD_BYTES:
            self.is_lost = True
            self._head.clear()
        return len(data)


def _body_length(head: bytes) -> int | None:
    """The bytes of a request's body; None if its head does not tell them beyond doubt."""
    line, _, fields = head.partition(b"\r\n")
    method, _, target = line.partition(b" ")
    if method not in _METHODS or not target.endswith(b" HTTP/1.1") or b"\n" in line:
        return None
    headers = read_headers(fields)
    if headers is None or any(name in (b"transfer-encoding", b"upgrade") for name, _ in headers):
        return None
    return content_length(headers)


def read_headers(fields: bytes) -> Headers | None:
    """The lines of a head behind its first, as names in lower case and values; None if a line is
    not what every reader takes for the same."""
    headers: Headers = []
    for line in fields.split(b"\r\n") if fields else ():
        name, _, value = line.partition(b":")
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            return None
        headers.append((name.lower(), value.strip(b" \t")))
    return headers


def content_length(headers: Headers) -> int | None:
    """The bytes of a body, 0 if no header tells them; None if that is in doubt."""
    lengths = [value for name, value in headers if name == b"content-length"]
    if not lengths:
        return 0
    length = lengths[0]
    # Python refuses to read numbers of thousands of digits.
    is_told = len(lengths) == 1 and length.isdigit() and len(length) <= _MOST_DIGITS
    return int(length) if is_told else None
