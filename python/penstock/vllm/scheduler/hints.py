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

import logging
import math
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from penstock._native import Keeper
from penstock.vllm.advisor import NEVER
from penstock.vllm.names import KEEP, LET_GO, PREFETCH, PREFIX
from penstock.vllm.scheduler.common import Common
from penstock.vllm.scheduler.facts import Arrival
from penstock.vllm.scheduler.lookups import Lookups
from penstock.vllm.scheduler.prefetching import Prefetching
from penstock.vllm.scheduler.requests import NO_WISHES, Tracked

logger = logging.getLogger("vllm.penstock")

_TOUCHES_EVERY = 1.0
"""Seconds between two touches of a kept block. A pool that gives all its room to others in less
time keeps nothing."""
_ASSUMED_BYTES = 16 << 30
"""The size of a pool that does not tell it."""
_MOST_PROMPTS, _MOST_PROMPTS_OF_ONE = 64, 8
"""Prompts that wait to be prefetched: of all, and of one tenant."""
_MOST_TOKENS = 1 << 18
"""Tokens of such a prompt."""
_MORE_THAN_ANY = 1 << 40
"""More tokens than any request has."""

_COUNTED = {
    "touched": "touched_blocks",
    "refused": "keep_refused_blocks",
    "removed": "let_go_blocks",
    "failed": "keeper_failures",
}
"""What the keeper counts, and the counter."""


class _UnusableError(Exception):
    """A hint that is not followed, and why."""


@dataclass
class _Prompt:
    """A prompt that will come."""

    tracked: Tracked
    """The request that told."""
    name: str
    """The catalogue's name for it."""
    hashes: Future[list[bytes]]
    is_asked: bool = False
    """Whether the catalogue knows it, and the pool was asked for it."""


class Hints:
    """The hints of one engine's requests."""

    def __init__(self, common: Common, lookups: Lookups, prefetching: Prefetching) -> None:
        self._common = common
        self._catalogue = common.catalogue
        self._lookups = lookups
        self._prefetching = prefetching
        self._keeper: Keeper | None = None
        """Made for the first hint that needs it."""
        self._counted: Counter[str] = Counter()
        """What the keeper had counted at the last look."""
        self._prompts: deque[_Prompt] = deque()
        self._hashing: ThreadPoolExecutor | None = None
        self._numbers = 0

    @property
    def waits(self) -> bool:
        """Whether some prompt waits to be prefetched."""
        return bool(self._prompts)

    # --- hints that come ------------------------------------------------------------------

    def note_arrival(self, tracked: Tracked, arrival: Arrival) -> None:
        """A request has come. Reads its hints."""
        told = {**(arrival.hints or {}), **(arrival.params or {})}
        follow = ((KEEP, self._keep), (LET_GO, self._let_go), (PREFETCH, self._expect))
        for name, take in follow:
            # Null and false are no wishes.
            if (value := told.get(name)) is None or value is False:
                continue
            try:
                if not self._common.is_shared(tracked.request):
                    raise _UnusableError("the blocks of its LoRA adapter are not shared")
                take(tracked, value)
            except _UnusableError as error:
                self._common.counters.count("hints_refused")
                _warn(name, str(error))

    def _keep(self, tracked: Tracked, seconds: Any) -> None:
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not is_number or not 0 < seconds < math.inf:
            raise _UnusableError("not a number of seconds over 0")
        settings = self._common.settings
        if not settings.keep_share:
            raise _UnusableError(f"{PREFIX}keep_share is 0: this engine keeps nothing")
        self._common.counters.count("keep_hints")
        tracked.wishes = replace(tracked.wishes, keep=float(min(seconds, settings.keep_limit)))

    def _let_go(self, tracked: Tracked, tokens: Any) -> None:
        if not isinstance(tokens, int) or tokens < 0:
            raise _UnusableError("not a number of tokens, nor true")
        if tracked.is_handed_over:
            raise _UnusableError("another engine goes on with the request")
        self._common.counters.count("let_go_hints")
        first = 0 if tokens is True else min(tokens, _MORE_THAN_ANY)
        tracked.wishes = replace(tracked.wishes, let_go=first)
        self._catalogue.limit_stores(tracked.id, first)

    # --- prompts that come next -----------------------------------------------------------

    def _expect(self, tracked: Tracked, tokens: Any) -> None:
        if not isinstance(tokens, list) or not tokens:
            raise _UnusableError("not a list of token ids")
        if len(tokens) > _MOST_TOKENS:
            raise _UnusableError(f"more than {_MOST_TOKENS} tokens")
        hash_prompt = self._common.facts.hash_prompt
        if hash_prompt is None:
            raise _UnusableError("the hashes of this engine's blocks are not known")
        if not self._common.role.loads or tracked.policy == NEVER or not self._room:
            raise _UnusableError("this engine, or this request, loads nothing")
        own = sum(_account(prompt.tracked) == _account(tracked) for prompt in self._prompts)
        if len(self._prompts) >= _MOST_PROMPTS or own >= _MOST_PROMPTS_OF_ONE:
            raise _UnusableError("too many prompts wait")
        self._common.counters.count("prefetch_hints")
        if self._hashing is None:
            self._hashing = ThreadPoolExecutor(1, thread_name_prefix="penstock-hash")
        self._numbers += 1
        # Not a name that the engine gives to a request.
        name = f"\0next {self._numbers}"
        hashes = self._hashing.submit(hash_prompt, tracked.request, tokens)
        self._prompts.append(_Prompt(tracked, name, hashes))

    @property
    def _room(self) -> int:
        """The blocks that one prompt may bring: waiting requests have the other half."""
        return self._common.agreement.prefetch_blocks // 2

    def order(self) -> None:
        """Goes on with the prompt that came first. Only one is brought at a time."""
        prompt = self._prompts[0]
        if not prompt.is_asked and prompt.hashes.done():
            self._ask(prompt)
        if prompt.is_asked and not self._lookups.is_asked(prompt.name):
            if self._prefetching.is_ahead:
                return
            self._fetch(prompt)
            self._drop(prompt)

    def _ask(self, prompt: _Prompt) -> None:
        try:
            hashes = prompt.hashes.result()
        except Exception as error:
            # Whatever is wrong with a client's tokens, its salt or its adapter's name: a hint must
            # not stop the engine.
            self._common.counters.count("hints_refused")
            # Not the error's text: that is the client's, and another one each time.
            _warn(PREFETCH, f"its token ids cannot be hashed ({type(error).__name__})")
            self._prompts.popleft()
            return
        end = len(hashes) * self._common.facts.hash_tokens
        self._catalogue.add(prompt.name, end, tenant=prompt.tracked.tenant)
        self._catalogue.extend(prompt.name, hashes)
        self._lookups.ask(prompt.name)
        prompt.is_asked = True

    def _fetch(self, prompt: _Prompt) -> None:
        tokens = len(prompt.hashes.result()) * self._common.facts.hash_tokens
        last = self._catalogue.last_end(tokens + 1)
        if last and (reaches := self._catalogue.reaches(prompt.name, 0, last)):
            self._prefetching.fetch_ahead(prompt.tracked, prompt.name, reaches[-1].end, self._room)

    def _drop(self, prompt: _Prompt) -> None:
        self._catalogue.remove(prompt.name)
        self._prompts.popleft()

    # --- requests that end ----------------------------------------------------------------

    def on_finished(self, tracked: Tracked) -> None:
        """The request is over. Its blocks are let go, or kept from now on."""
        wishes = tracked.wishes
        if wishes is NO_WISHES:
            return
        request, catalogue = tracked.request, self._catalogue
        catalogue.extend(tracked.id, request.block_hashes)
        end = request.num_computed_tokens
        if wishes.let_go is not None:
            end = min(end, wishes.let_go)
            catalogue.let_go(tracked.id, self.keeper, wishes.let_go)
        if wishes.keep is not None:
            end = end // catalogue.alignment * catalogue.alignment
            catalogue.keep(
                tracked.id,
                self.keeper,
                end=end,
                account=_account(tracked),
                seconds=wishes.keep,
            )

    @property
    def keeper(self) -> Keeper:
        """The thread that touches and removes blocks. Starts it."""
        if self._keeper is None:
            settings = self._common.settings
            self._keeper = Keeper(
                self._common.store,
                self._common.agreement.pool_groups,
                share=settings.keep_share,
                account_share=settings.keep_share_of_one,
                assumed_bytes=_ASSUMED_BYTES,
                every=_TOUCHES_EVERY,
            )
        return self._keeper

    def count(self) -> None:
        """Counts what the keeper has done since the last call."""
        if self._keeper is None:
            return
        stats = self._keeper.stats()
        for name, counter in _COUNTED.items():
            self._common.counters.count(counter, stats[name] - self._counted[name])
        self._counted = Counter(stats)

    def shutdown(self) -> None:
        """Ends the threads. Nothing is kept any more."""
        if self._keeper is not None:
            self._keeper.shutdown()
        if self._hashing is not None:
            self._hashing.shutdown(cancel_futures=True)


def _account(tracked: Tracked) -> bytes:
    """Whose room the request's wishes take: its tenant's, or that of all who give its salt."""
    return tracked.tenant.encode() or (b"\0" + tracked.salt if tracked.salt else b"")


@lru_cache(maxsize=64)
def _warn(name: str, reason: str) -> None:
    # Once for each reason: a client may send such with every request.
    logger.warning("Penstock: a request's hint %s is not followed: %s", name, reason)
