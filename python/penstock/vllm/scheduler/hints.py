"""Hints: what a client knows of its next requests, and tells with a request.

- *keep*: this request's blocks will be asked for again. A native thread touches them in the pool
  until their time is over, so that the pool evicts others first.
- *let go*: some of its blocks will not be asked for again. They are not stored; those that this
  engine has stored before are removed from the pool.
- *prefetch*: another prompt comes next. Its blocks are brought into host memory.

A hint is a wish. Whatever is wrong with it, the request is served as if it had none. What one
tenant may wish for is bounded, and so is what all of them together may.
"""

from __future__ import annotations

from penstock.vllm.counters import Counters
from penstock.vllm.names import KEEP, LET_GO, PREFETCH
from penstock.vllm.scheduler.facts import Arrival
from penstock.vllm.scheduler.keeping import Keeping
from penstock.vllm.scheduler.next_prompts import NextPrompts
from penstock.vllm.scheduler.refusals import UnusableHintError, refuse
from penstock.vllm.scheduler.requests import RequestState
from penstock.vllm.scheduler.sharing import Sharing


class Hints:
    """The hints of one engine's requests, and who follows each."""

    def __init__(
        self, sharing: Sharing, keeping: Keeping, next_prompts: NextPrompts, counters: Counters
    ) -> None:
        self._sharing = sharing
        self._counters = counters
        self._followers = (
            (KEEP, keeping.keep),
            (LET_GO, keeping.let_go),
            (PREFETCH, next_prompts.expect),
        )

    def note_arrival(self, state: RequestState, arrival: Arrival) -> None:
        """A request has come. Reads its hints."""
        told = {**(arrival.hints or {}), **(arrival.params or {})}
        for name, follow in self._followers:
            # Null and false are no wishes.
            if (value := told.get(name)) is None or value is False:
                continue
            try:
                if not self._sharing.is_shared(state.request):
                    raise UnusableHintError("the blocks of its LoRA adapter are not shared")
                follow(state, value)
            except UnusableHintError as error:
                refuse(self._counters, name, str(error))
