"""A request's block hashes, handed over to the catalogue as they come."""

from __future__ import annotations

from penstock._native import Catalogue
from penstock.vllm.scheduler.requests import RequestState


def hand_over(catalogue: Catalogue, state: RequestState) -> None:
    """Hands over the hashes that have come since the last call.

    When a session goes on, the engine drops the last token of the answer, and the last hash if that
    token is in it. If that hash was handed over, the catalogue has a block by a wrong name: then
    nothing more of the request is shared. Nor is it if vLLM before 0.33 has hashed only what was
    said last: it does so if the session was preempted while its last output was under way.
    """
    request, known = state.request, state.hashes
    hashes = request.block_hashes
    if request.resumable and (
        request.num_tokens < request.num_prompt_tokens
        or (known and hashes[known - 1 : known] != [state.last_hash])
    ):
        state.is_private = True
        return
    catalogue.extend(state.id, hashes)
    if hashes:
        state.hashes, state.last_hash = len(hashes), hashes[-1]
