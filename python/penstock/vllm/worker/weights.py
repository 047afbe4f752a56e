"""Which weights this rank computes with: how often they have changed, and what they are now."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import uuid
from collections.abc import Callable, Mapping
from typing import TypeVar

from penstock.vllm.messages import ModelShare, ModelShares, RankWeights

T = TypeVar("T")


class Reading(enum.Enum):
    """How much of the live tensors is read."""

    WHOLE = enum.auto()
    SAMPLE = enum.auto()
    """Some bytes of each tensor."""
    FILES = enum.auto()
    """The files that the tensors were loaded from, in place of the tensors."""


Read = Callable[[Reading], ModelShares | None]
"""Reads the live tensors of this rank's models; None if they cannot be read.

What stands for weights begins with :data:`PARTIAL` if some of them are not among the tensors."""

PARTIAL = "partial:"

_LONGEST_NAME = 200


class Weights:
    """The weights of one rank.

    What is read of them is read at three times: before their first change, so that the weights of
    the start are known again; before and after a call that may change them, and does not say so;
    and when somebody asks what they are. The start, a name and a reset read a sample.
    """

    def __init__(self, read: Read, changed: Callable[[], None]) -> None:
        """`changed` is called with each change, once that is counted."""
        self._read = read
        self._changed = changed
        self._worker = uuid.uuid4().hex
        self._changes = 0
        self._start: ModelShares | None = None
        """What the engine told of the weights that it was started with."""
        self._is_updated = False
        """Whether somebody has changed them. Sleep is none that does."""
        self._start_tensors: ModelShares | None = None
        """What their tensors were, whole; None if nobody has read them."""
        self._tensors: ModelShares | None = None
        """What the tensors are now, whole; None if nobody has read them since the last change."""
        self._files: ModelShares | None = None
        """The files that all weights have come from since the last change; None if they have not,
        or not since the start."""
        self._sample: ModelShares | None = None
        """A sample of them; None if nobody has taken one since the last change."""

    def begin(self, shares: ModelShares) -> None:
        """Takes what the models are at the start, as the other engines are told."""
        self._start = shares
        self._sample = self._read(Reading.SAMPLE)
        if all(part.weights.startswith("tensors:") for part in _parts(shares)):
            self._start_tensors = shares

    @property
    def changes(self) -> dict[str, int]:
        """A name that no other worker has, with how often this one's weights have changed."""
        return {self._worker: self._changes}

    def is_behind(self, changes: Mapping[str, int]) -> bool:
        """Whether these weights have changed since somebody knew so many `changes`."""
        return changes.get(self._worker, 0) < self._changes

    def note_change(self) -> None:
        """The weights are about to change, or have just changed."""
        self._know_start()
        self._count_change()

    def note_sleep(self) -> None:
        """Sleep is about to take the weights away. They come back as they were, unless somebody
        changes them meanwhile."""
        is_updated = self._is_updated
        self.note_change()
        self._is_updated = is_updated

    def note_reload(self) -> None:
        """All weights have come from files, and have not changed since."""
        self.note_change()
        # At once: whoever wrote the files may write others in their place.
        self._files = self._read(Reading.FILES)

    def _count_change(self) -> None:
        self._changes += 1
        self._is_updated = True
        self._tensors = self._sample = self._files = None
        self._changed()

    def _know_start(self) -> None:
        """Reads the tensors of the start, before their first change. Not if somebody has changed
        them already, whom nobody saw."""
        if self._changes or self._start is None or self._start_tensors is not None:
            return
        if self._sample is not None and self._sample == self._read(Reading.SAMPLE):
            self._tensors = self._tensors or self._read(Reading.WHOLE)
            self._start_tensors = self._tensors

    def compare(self, call: Callable[[], T]) -> T:
        """Calls something that may change weights, and notes a change if what can be read of them
        has changed. If nothing can be read, they are taken for changed."""
        self._know_start()
        before = self._tensors or self._read(Reading.WHOLE)
        self._tensors = before
        try:
            return call()
        finally:
            after = self._read(Reading.WHOLE)
            if after is None or after != before:
                # Whoever changed them may have said so.
                self._count_change()
            self._tensors = after

    def look(self) -> None:
        """Notes a change if the sample is another one than that last taken: of a change that nobody
        told of."""
        if self._sample is None:
            return
        found = self._read(Reading.SAMPLE)
        if found is None or found != self._sample:
            self._count_change()
            self._sample = found

    def tell(self, version: str, rank: tuple[int, int], *, is_updating: bool) -> RankWeights:
        """What the weights are: those of the start, or those that an update called `version`, or
        those with these bytes if that is empty. Nothing while an update goes on."""
        models: ModelShares | None = None
        if not is_updating:
            self.look()
            self._sample = self._sample or self._read(Reading.SAMPLE)
            models = self._called(version) if version else self._found()
        return RankWeights(self._worker, self._changes, rank, models)

    def _found(self) -> ModelShares | None:
        # Users may have given the start a name of their own, also if it came from these files.
        if self._files is not None and not self._has_id:
            return self._files
        if self._are_those_of_the_start():
            return self._start
        if self._files is not None:
            return self._files
        found = self._tensors
        return None if found is None or _is_partial(found) else found

    @property
    def _has_id(self) -> bool:
        return self._start is not None and self._start.model.weights.startswith("id:")

    def _are_those_of_the_start(self) -> bool:
        """Whether all that the weights are can be read, and is as at the start."""
        found = self._tensors = self._tensors or self._read(Reading.WHOLE)
        return found is not None and not _is_partial(found) and found == self._start_tensors

    def _called(self, version: str) -> ModelShares | None:
        sample = self._sample
        if sample is None or _is_partial(sample):
            return None
        # A name alone changes nothing: other engines with these weights have not slept.
        if not self._is_updated and self._are_those_of_the_start():
            return self._start
        return _called(version, sample)


def _short(version: str) -> str:
    """A name as it is, if it can be shown in a line; else a digest of it."""
    if len(version) <= _LONGEST_NAME and version.isprintable():
        return version
    return hashlib.sha256(version.encode(errors="surrogatepass")).hexdigest()


def _is_partial(shares: ModelShares) -> bool:
    """Whether these are equal for some weights that are not."""
    return any(part.weights.startswith(PARTIAL) for part in _parts(shares))


def _parts(shares: ModelShares) -> list[ModelShare]:
    return [shares.model, *([] if shares.draft is None else [shares.draft])]


def _called(version: str, sample: ModelShares) -> ModelShares:
    def called(share: ModelShare) -> ModelShare:
        return dataclasses.replace(share, weights=f"version:{_short(version)}:{share.weights}")

    return ModelShares(called(sample.model), sample.draft and called(sample.draft))
