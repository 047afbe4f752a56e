"""Events: tells routers which blocks this engine has brought into the pool, and which are gone.

An engine announces the blocks that it stored. A pool may evict them, and does not tell. So every
block that was announced is watched: the pool is asked for it now and then. It is reported as gone
if the pool has it no more, if a load did not find it, or if there are too many to watch.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock._native import Blocks, Lookup, Store, tenant_namespace
from penstock.vllm.agreement import Agreement
from penstock.vllm.groups import Group
from penstock.vllm.lookup_limit import LookupLimit
from penstock.vllm.names import EVENT_KEY_VARIABLE
from penstock.vllm.scheduler.facts import EngineFacts, EngineRequest
from penstock.vllm.scheduler.requests import RequestState
from penstock.vllm.settings import Settings

_MOST_WATCHED = 262_144
_ASKED_AT_ONCE = 512
_MOST_PENDING = 10_000
_SALT_DOMAIN = b"penstock event salt 1\n"
_SALT_DIGITS = 32


@dataclass(frozen=True)
class Stored:
    """Blocks of one group and prompt that came into the pool, one after the other."""

    request: EngineRequest
    group: Group
    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    """The hash of the block before them; None if they begin the prompt."""
    first: int
    """Number of the blocks' first token in the prompt."""
    salt: str | None = None
    """What stands for the request's cache salt, see :func:`shown_salt`; None without one."""


def shown_salt(salt: bytes, key: bytes) -> str:
    """What events show in place of a cache salt: the same for all engines with the same key.

    With a key, nobody without it can try guesses of the salt. Routers may have to compute it, so it
    never changes.
    """
    digest = hmac.new(key, _SALT_DOMAIN + salt, hashlib.sha256)
    return f"salt-{digest.hexdigest()[:_SALT_DIGITS]}"


@dataclass(frozen=True)
class Removed:
    """Blocks of one group that this engine does not vouch for any more."""

    group: Group
    block_hashes: tuple[bytes, ...]


_Name = tuple[int, str, bytes]
"""A group's position, the tenant that owns the block, and the block's hash."""


class Events:
    """The events of one engine that were not taken yet, and the blocks that it has announced."""

    def __init__(
        self,
        settings: Settings,
        facts: EngineFacts,
        agreement: Agreement,
        store: Store,
        limit: LookupLimit,
    ) -> None:
        self._settings = settings
        self._facts = facts
        self._agreement = agreement
        self._lookup = Lookup(store, threads=1)
        self._limit = limit
        self._announced: OrderedDict[_Name, float] = OrderedDict()
        """Block → when the pool was last known to have it, the earliest first."""
        self._asked: dict[int, list[_Name]] = {}
        self._numbers = 0
        self._key = os.fsencode(os.environ.get(EVENT_KEY_VARIABLE, ""))
        self._pending: deque[Stored | Removed] = deque(maxlen=_MOST_PENDING)

    def __len__(self) -> int:
        return len(self._announced)

    def take(self) -> list[Stored | Removed]:
        """The events since the last call."""
        taken = list(self._pending)
        self._pending.clear()
        return taken

    # --- what this engine does ------------------------------------------------------------

    def on_stored(self, state: RequestState, blocks: Blocks, unstored: Iterable[int]) -> None:
        """A store has ended on all ranks. The blocks at the positions `unstored` are not in the
        pool."""
        now, missing = time.monotonic(), set(unstored)
        run: list[bytes] = []
        at: tuple[int, int] | None = None
        begun = (0, 0)
        for position, place in enumerate(blocks.places):
            # A drafter's blocks have the names of the model's.
            if position in missing or self._facts.groups[place[0]].draft is not None:
                continue
            name = self._name(state, place)
            if place != at:
                self._tell_stored(state, begun, run)
                begun, run = place, []
            run.append(name[2])
            at = place[0], place[1] + self._facts.groups[place[0]].block_size
            self._announced[name] = now
            self._announced.move_to_end(name)
        self._tell_stored(state, begun, run)
        beyond = len(self._announced) - _MOST_WATCHED
        self._tell_removed([self._announced.popitem(last=False)[0] for _ in range(beyond)])

    def on_lost(self, state: RequestState, blocks: Blocks, positions: Iterable[int]) -> None:
        """The pool no longer has some blocks of a job, or not whole, or they were wrong."""
        places = blocks.places
        names = [self._name(state, places[position]) for position in positions]
        self._tell_removed([name for name in names if self._announced.pop(name, None) is not None])

    def _name(self, state: RequestState, place: tuple[int, int]) -> _Name:
        group, first = place
        return group, state.tenant, self._block_hash(state, group, first)

    def _block_hash(self, state: RequestState, group: int, first: int) -> bytes:
        """The hash of the block of a group that begins at a token."""
        end = first + self._facts.groups[group].block_size
        return state.request.block_hashes[end // self._facts.hash_tokens - 1]

    def _tell_stored(
        self, state: RequestState, place: tuple[int, int], run: Sequence[bytes]
    ) -> None:
        if not run:
            return
        position, first = place
        group = self._facts.groups[position]
        before = first - group.block_size
        parent = self._block_hash(state, position, before) if first else None
        salt = shown_salt(state.salt, self._key) if state.salt else None
        self._pending.append(Stored(state.request, group, tuple(run), parent, first, salt))

    def _tell_removed(self, names: Sequence[_Name]) -> None:
        by_group: dict[int, list[bytes]] = {}
        for group, _, block_hash in names:
            by_group.setdefault(group, []).append(block_hash)
        for position, block_hashes in by_group.items():
            self._pending.append(Removed(self._facts.groups[position], tuple(block_hashes)))

    # --- what the pool does ---------------------------------------------------------------

    def watch(self) -> None:
        """Takes in the pool's answers, and asks for the blocks that were not asked for longest."""
        for number, answer, _ in self._lookup.poll():
            self._take_answer(self._asked.pop(number), answer)
        if not self._asked:
            self._ask()

    def _take_answer(self, names: Sequence[_Name], answer: list[bool] | str) -> None:
        if isinstance(answer, str):
            # The pool did not answer. Nobody can load from it either, so nothing is gained by
            # calling all of them gone: they are asked for again.
            return
        gone = []
        for name, is_hit in zip(names, answer, strict=True):
            if not is_hit and self._announced.pop(name, None) is not None:
                gone.append(name)
        self._tell_removed(gone)

    def _ask(self) -> None:
        now = time.monotonic()
        due = now - self._settings.event_check
        oldest: list[_Name] = []
        for name, seen in self._announced.items():
            if seen > due or len(oldest) == _ASKED_AT_ONCE:
                break
            oldest.append(name)
        batches: dict[tuple[int, str], list[_Name]] = {}
        for name in oldest:
            batches.setdefault(name[:2], []).append(name)
            # What the pool does not answer is asked for again after the same time.
            self._announced[name] = now
            self._announced.move_to_end(name)
        for (group, tenant), names in batches.items():
            namespace = self._agreement.namespaces[group]
            if tenant:
                namespace = tenant_namespace(namespace, tenant)
            self._numbers += 1
            self._lookup.submit(
                self._numbers,
                namespace,
                [block_hash for _, _, block_hash in names],
                self._agreement.spans[group],
                self._limit.seconds,
            )
            self._asked[self._numbers] = names

    def shutdown(self) -> None:
        """Ends the thread that asks."""
        self._lookup.shutdown()
