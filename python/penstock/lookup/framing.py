"""Where the requests of a connection begin and end, by their heads alone.

It decides nothing about a request: uvicorn reads it again, and refuses it if it has to. It only
tells whose turn it is, and whether what comes next is the beginning of a request. Where that cannot
be told beyond doubt, it says so, and says nothing more of the connection.
"""

from __future__ import annotations

Headers = list[tuple[bytes, bytes]]

_MOST_HEAD_BYTES = 64 << 10
"""A longer head is none that this service has to know the end of."""
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
        while data and not self.is_lost:
            if self._body_left:
                taken = min(self._body_left, len(data))
                self._body_left -= taken
                data = data[taken:]
                self.whole += self._body_left == 0
            else:
                data = self._feed_head(data)

    def _feed_head(self, data: bytes) -> bytes:
        """Takes bytes up to the end of a head, and returns the others."""
        self._head += data
        # Empty lines before a request are allowed (RFC 9112, section 2.2).
        head, end, rest = self._head.lstrip(b"\r\n").partition(_END)
        if not end:
            if len(self._head) > _MOST_HEAD_BYTES:
                self.is_lost = True
                self._head.clear()
            return b""
        length = _body_length(bytes(head))
        self.is_lost = length is None
        self._head.clear()
        self._body_left = length or 0
        self.whole += length == 0
        return bytes(rest)


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
        name, sign, value = line.partition(b":")
        name, value = name.lower(), value.strip()
        if not sign or not name.replace(b"-", b"").isalnum() or b"\n" in value or b"\r" in value:
            return None
        headers.append((name, value))
    return headers


def content_length(headers: Headers) -> int | None:
    """The bytes of a body, 0 if no header tells them; None if that is in doubt."""
    lengths = [value for name, value in headers if name == b"content-length"]
    if not lengths:
        return 0
    return int(lengths[0]) if len(lengths) == 1 and lengths[0].isdigit() else None
