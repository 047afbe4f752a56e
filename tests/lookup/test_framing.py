"""Where requests end, however their bytes come; and what is said where that is in doubt."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.lookup.framing import Framing, read_headers
from tests.lookup.test_http import CHUNKED, PLAIN, WHOLE

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
EMPTY = b"POST /x HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
WAITS = PLAIN + b"Expect: 100-continue\r\n\r\n" + WHOLE.partition(b"\r\n\r\n")[2]
REQUESTS = (WHOLE, HEALTH, EMPTY, WAITS, b"\r\n" + HEALTH)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.lists(st.sampled_from(REQUESTS), max_size=4), st.lists(st.integers(0, 10_000)))
def test_whole_requests_are_counted_however_they_are_cut(
    requests: list[bytes], places: list[int]
) -> None:
    framing = Framing()
    ends = [sum(map(len, requests[: number + 1])) for number in range(len(requests))]
    fed = 0
    for piece in cut(b"".join(requests), places):
        framing.feed(piece)
        fed += len(piece)
        assert framing.whole == sum(end <= fed for end in ends)
        # Empty lines before a request are no part of it.
        skipped = {
            end + more
            for end, request in zip([0, *ends], requests, strict=False)
            for more in range(1, 1 + len(request) - len(request.lstrip(b"\r\n")))
        }
        is_between = fed in {0, *ends, *skipped}
        assert (framing.is_in_head or framing.is_in_body) == (not is_between)
    assert not framing.is_lost


@pytest.mark.parametrize(
    "head",
    [
        CHUNKED,
        b"CONNECT x HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET /\nx HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nUpgrade: websocket\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: +1\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length : 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: " + b"0" * 5000 + b"1\r\n\r\n",
        b"GET / HTTP/1.1\r\nA:\nContent-Length: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: b\r\n c: d\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: b\n\nPOST / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: b\rContent-Length: 1\r\n\r\n",
        b"G" * (65 << 10),
    ],
)
def test_what_readers_may_take_for_different_things_is_not_told(head: bytes) -> None:
    framing = Framing()
    framing.feed(HEALTH + head)
    assert (framing.whole, framing.is_lost) == (1, True)
    framing.feed(HEALTH)
    assert (framing.whole, framing.is_in_head, framing.is_in_body) == (1, False, False)


def test_a_head_with_control_bytes_is_read_by_nobody() -> None:
    for value in (b"\x00", b"\x0b5", b"5\x0c", b"\x7f", b"\n5", b"5\r"):
        assert read_headers(b"A: " + value) is None
    assert read_headers(b"x_request.id: a\tb\r\nB:") == [(b"x_request.id", b"a\tb"), (b"b", b"")]


@given(st.binary(max_size=300), st.lists(st.integers(0, 300)))
def test_any_bytes_are_taken_the_same_however_they_are_cut(data: bytes, places: list[int]) -> None:
    whole, pieces = Framing(), Framing()
    whole.feed(data)
    for piece in cut(data, places):
        pieces.feed(piece)
    assert vars(whole) == vars(pieces)
