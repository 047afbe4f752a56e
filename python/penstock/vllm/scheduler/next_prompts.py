"""Next prompts: those that clients tell of ahead. Their blocks are brought into host memory."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from penstock._native import Catalogue
from penstock.vllm.advisor import NEVER
from penstock.vllm.agreement import Agreement
from penstock.vllm.counters import Counters
from penstock.vllm.names import PREFETCH
from penstock.vllm.roles import Role
from penstock.vllm.scheduler.facts import EngineFacts
from penstock.vllm.scheduler.lookups import Lookups
from penstock.vllm.scheduler.prefetches import Prefetches
from penstock.vllm.scheduler.refusals import UnusableHintError, refuse
from penstock.vllm.scheduler.requests import RequestState

_MOST_PROMPTS, _MOST_PROMPTS_OF_ONE = 64, 8
"""Prompts that wait to be prefetched: of all, and of one tenant."""
_MOST_TOKENS = 1 << 18
"""Tokens of such a prompt."""


@dataclass
class _Prompt:
    """A prompt that will come."""

    state: RequestState
    """The request that told."""
    name: str
    """The catalogue's name for it."""
    block_hashes: Future[list[bytes]]
    is_asked: bool = False
    """Whether the catalogue knows it, and the pool was asked for it."""


class NextPrompts:
    """The prompts that clients of one engine have told of."""

    def __init__(
        self,
        catalogue: Catalogue,
        facts: EngineFacts,
        role: Role,
        agreement: Agreement,
        lookups: Lookups,
        prefetches: Prefetches,
        counters: Counters,
    ) -> None:
        self._catalogue = catalogue
        self._facts = facts
        self._role = role
        self._agreement = agreement
        self._lookups = lookups
        self._prefetches = prefetches
        self._counters = counters
        self._prompts: deque[_Prompt] = deque()
        self._hashing: ThreadPoolExecutor | None = None
        self._numbers = 0

    @property
    def waits(self) -> bool:
        """Whether some prompt waits to be prefetched."""
        return bool(self._prompts)

    def expect(self, state: RequestState, tokens: Any) -> None:
        """A prompt of these tokens will come, as the request tells.

        Raises:
            UnusableHintError: these are no tokens, or this engine does not prefetch them.
        """
        if not isinstance(tokens, list) or not tokens:
            raise UnusableHintError("not a list of token ids")
        if len(tokens) > _MOST_TOKENS:
            raise UnusableHintError(f"more than {_MOST_TOKENS} tokens")
        hash_prompt = self._facts.hash_prompt
        if hash_prompt is None:
            raise UnusableHintError("the hashes of this engine's blocks are not known")
        if not self._role.loads or state.policy == NEVER or not self._room:
            raise UnusableHintError("this engine, or this request, loads nothing")
        own = sum(prompt.state.account == state.account for prompt in self._prompts)
        if len(self._prompts) >= _MOST_PROMPTS or own >= _MOST_PROMPTS_OF_ONE:
            raise UnusableHintError("too many prompts wait")
        self._counters.count("prefetch_hints")
        if self._hashing is None:
            self._hashing = ThreadPoolExecutor(1, thread_name_prefix="penstock-hash")
        self._numbers += 1
        # Not a name that the engine gives to a request.
        name = f"\0next {self._numbers}"
        block_hashes = self._hashing.submit(hash_prompt, state.request, tokens)
        self._prompts.append(_Prompt(state, name, block_hashes))

    @property
    def _room(self) -> int:
        """The blocks that one prompt may bring: waiting requests have the other half."""
        return self._agreement.prefetch_blocks // 2

    def order(self) -> None:
        """Goes on with the prompt that came first. Only one is brought at a time."""
        prompt = self._prompts[0]
        if not prompt.is_asked and prompt.block_hashes.done():
            self._ask(prompt)
        if prompt.is_asked and not self._lookups.is_asked(prompt.name):
            if self._prefetches.is_ahead:
                return
            self._fetch(prompt)
            self._drop(prompt)

    def _ask(self, prompt: _Prompt) -> None:
        try:
            block_hashes = prompt.block_hashes.result()
        except Exception as error:
            # Whatever is wrong with a client's tokens, its salt or its adapter's name: a hint must
            # not stop the engine. Not the error's text: that is the client's, and another one each
            # time.
            reason = f"its token ids cannot be hashed ({type(error).__name__})"
            refuse(self._counters, PREFETCH, reason)
            self._prompts.popleft()
            return
        end = len(block_hashes) * self._facts.hash_tokens
        self._catalogue.add(prompt.name, end, tenant=prompt.state.tenant)
        self._catalogue.extend(prompt.name, block_hashes)
        self._lookups.ask(prompt.name)
        prompt.is_asked = True

    def _fetch(self, prompt: _Prompt) -> None:
        tokens = len(prompt.block_hashes.result()) * self._facts.hash_tokens
        last = self._catalogue.last_end(tokens + 1)
        if last and (reaches := self._catalogue.reaches(prompt.name, 0, last)):
            self._prefetches.fetch_ahead(prompt.state, prompt.name, reaches[-1].end, self._room)

    def _drop(self, prompt: _Prompt) -> None:
        self._catalogue.remove(prompt.name)
        self._prompts.popleft()

    def shutdown(self) -> None:
        """Ends the thread that hashes. Prompts that wait are not brought."""
        if self._hashing is not None:
            self._hashing.shutdown(cancel_futures=True)
