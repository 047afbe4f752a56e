"""What events of the pool say, in vLLM's own words and bytes: nothing of what requests hold, unless
the operator asks for it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from penstock.vllm import compat
from penstock.vllm.groups import Group

BLOCK = 16
FULL = Group(0, "full_attention", BLOCK, None, "float32", ("layer",))
HASHES = [b"h" * 32, b"i" * 32]
SALT, SESSION, IMAGE = (
    "a tenant's secret salt",
    "a client's session",
    "what a client calls its image",
)
TOKENS = [50_000 + number for number in range(2 * BLOCK + 3)]


def request(**more: Any) -> Request:
    image = MultiModalFeatureSpec(
        data=None, modality="image", identifier=IMAGE, mm_position=PlaceholderRange(4, 8)
    )
    return Request(
        request_id="r",
        prompt_token_ids=TOKENS,
        sampling_params=SamplingParams(max_tokens=2),
        pooling_params=None,
        mm_features=[image],
        cache_salt=SALT,
        **more,
    )


def written(event: Any) -> bytes:
    return msgspec.msgpack.encode(event)


def test_an_event_holds_nothing_of_what_a_request_holds() -> None:
    asked = request()
    asked.session_id = SESSION
    event = compat.stored_event(asked, FULL, HASHES, None, 0, compat.LOCAL, salt="salt-1")
    assert len(event.block_hashes) == len(HASHES)
    assert event.token_ids == []
    assert event.extra_keys == [("salt-1",), None]
    for secret in (SALT, SESSION, IMAGE):
        assert secret.encode() not in written(event)
    assert written(TOKENS[0]) not in written(event)
    # vLLM's own block hashes still hold the salt.
    assert asked.cache_salt == SALT


def test_an_event_without_a_salt_of_its_own_shows_none() -> None:
    event = compat.stored_event(request(), FULL, HASHES, None, 0, compat.LOCAL)
    assert event.extra_keys == [None, None]


def test_content_is_there_if_it_is_asked_for_and_the_salt_never() -> None:
    asked = request()
    asked.session_id = SESSION
    event = compat.stored_event(
        asked, FULL, HASHES, None, 0, compat.LOCAL, salt="salt-1", has_content=True
    )
    assert event.token_ids == TOKENS[: 2 * BLOCK]
    assert event.extra_keys == [((IMAGE, 4), "salt-1"), None]
    assert event.session_id == SESSION
    assert SALT.encode() not in written(event)


@pytest.mark.parametrize("first", [0, BLOCK])
def test_later_blocks_are_as_before(first: int) -> None:
    event = compat.stored_event(
        request(), FULL, HASHES[:1], None, first, compat.LOCAL, salt="salt-1"
    )
    assert event.extra_keys == [("salt-1",) if first == 0 else None]
