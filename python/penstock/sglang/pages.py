"""The pages of one of SGLang's host pools, as bytes that a store reads and writes.

SGLang tells addresses and sizes of a page's pieces (`get_page_buffer_meta`). Here they become views
of the pool's own memory, so native code reads and writes the pages in place. Every view keeps the
memory alive and lies inside it, whatever address SGLang tells. A pool that cannot tell its pieces,
or tells pieces outside its memory, is copied page by page instead (`get_data_page`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from penstock.errors import ConfigError

FLAT, PIECES = "flat", "pieces"
"""How the bytes of a page are put together: as SGLang copies them, or as it tells its pieces. The
two orders differ in some layouts, so they never share an object."""


class Cut(NamedTuple):
    """How each page is cut by heads, into objects that other tensor-parallel sizes find too."""

    shares: int
    """Objects of each page; 0 if pages are not cut."""
    first: int
    """Place of the first of them among all shares of the model's heads."""


WHOLE = Cut(0, 0)

_NOT_OFFERED = (AssertionError, AttributeError, RuntimeError, TypeError, ValueError)
"""What host pools raise if their layout does not offer something."""


class Loan(NamedTuple):
    """The memory of one object: the buffers that hold it, in order."""

    parts: Sequence[Any]
    nbytes: int


class Pages(Protocol):
    """The pages of a host pool. `indices` are SGLang's: one for each token, page after page."""

    @property
    def page_tokens(self) -> int:
        """Indices of a page."""

    @property
    def description(self) -> dict[str, Any]:
        """How the bytes of an object are made up. Plain JSON."""

    def sources(self, indices: Any) -> list[Loan]:
        """The objects to read, page after page."""

    def targets(self, indices: Any) -> list[Loan]:
        """The objects to write to, page after page."""

    def arrived(self, indices: Any, page: int, loans: Sequence[Loan]) -> None:
        """A page's objects, lent by :meth:`targets`, were written and verified."""


def pages_of(pool: Any, cut: Cut = WHOLE) -> Pages:
    """The pages of a host pool, in place if it can be.

    Raises:
        ConfigError: it tells neither pieces nor whole pages.
    """
    try:
        return PiecePages(pool, cut)
    except _NOT_OFFERED as error:
        if cut.shares:
            raise ConfigError(f"the host pool cannot be cut by heads: {error}") from error
    try:
        return FlatPages(pool)
    except _NOT_OFFERED as error:
        raise ConfigError(
            f"SGLang's host pool {type(pool).__name__} with layout {pool.layout} gives its pages "
            f"neither as pieces nor as copies: {error}"
        ) from error


class PiecePages:
    """Pages in place: the pieces that SGLang tells, as views of the pool's memory."""

    def __init__(self, pool: Any, cut: Cut) -> None:
        self._pool = pool
        self._shares = max(1, cut.shares)
        self.page_tokens = _page_tokens(pool)
        addresses, self._sizes = self._tell(torch.arange(self.page_tokens, dtype=torch.int64))
        if not addresses or len(addresses) % self._shares:
            raise ValueError(f"{len(addresses)} pieces for {self._shares} objects")
        self._memory = _Memory(_tensors(pool))
        self._memory.keep_only(addresses, self._sizes)
        self._pieces = len(addresses) // self._shares

    def _tell(self, indices: Any) -> tuple[list[int], list[int]]:
        if self._shares > 1:
            told = self._pool.get_split_heads_page_buffer_meta(indices, self._shares)
        else:
            told = self._pool.get_page_buffer_meta(indices)
        addresses, sizes = told
        return list(addresses), [int(size) for size in sizes]

    @property
    def description(self) -> dict[str, Any]:
        """How the bytes of an object are made up: pieces of these sizes. Plain JSON."""
        return {"form": PIECES, "sizes": self._sizes[: self._pieces]}

    def sources(self, indices: Any) -> list[Loan]:
        """The objects to read or to write to, page after page, in place.

        Raises:
            ValueError: SGLang tells pieces of other sizes, or outside the pool's memory.
        """
        addresses, sizes = self._tell(indices)
        pages = len(indices) // self.page_tokens
        if sizes != self._sizes * pages:
            raise ValueError("SGLang tells pieces of other sizes than at registration")
        views = list(map(self._memory.view, addresses, sizes))
        nbytes = [sum(sizes[i : i + self._pieces]) for i in range(0, len(sizes), self._pieces)]
        return [
            Loan(views[place * self._pieces : (place + 1) * self._pieces], size)
            for place, size in enumerate(nbytes)
        ]

    targets = sources

    def arrived(self, indices: Any, page: int, loans: Sequence[Loan]) -> None:
        """Does nothing: the bytes are in place."""


class FlatPages:
    """Pages as copies, for pools whose pieces are not told."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.page_tokens = _page_tokens(pool)
        self._nbytes = lent(pool.get_dummy_flat_data_page()).nbytes

    @property
    def description(self) -> dict[str, Any]:
        """How the bytes of an object are made up: a flat page of this size. Plain JSON."""
        return {"form": FLAT, "sizes": [self._nbytes]}

    def sources(self, indices: Any) -> list[Loan]:
        """The objects to read, page after page: copies."""
        pages = (self._pool.get_data_page(start, flat=True) for start in self._starts(indices))
        return [self._loan(page.contiguous()) for page in pages]

    def targets(self, indices: Any) -> list[Loan]:
        """The objects to write to, page after page: new memory, which :meth:`arrived` copies into
        the pool."""
        starts = self._starts(indices)
        return [self._loan(self._pool.get_dummy_flat_data_page()) for _ in starts]

    def arrived(self, indices: Any, page: int, loans: Sequence[Loan]) -> None:
        """Copies a page that has arrived into the pool."""
        [start] = self._starts(indices[page * self.page_tokens : (page + 1) * self.page_tokens])
        [loan] = loans
        [part] = loan.parts
        data = part.view(self._pool.get_dummy_flat_data_page().dtype)
        self._pool.set_from_flat_data_page(start, data)

    def _starts(self, indices: Any) -> list[int]:
        return [int(index) for index in indices[:: self.page_tokens].tolist()]

    def _loan(self, page: Any) -> Loan:
        loan = lent(page)
        if loan.nbytes != self._nbytes:
            raise ValueError(f"a page of {loan.nbytes} bytes, not {self._nbytes}")
        return loan


class _Memory:
    """The memory of tensors, found by address."""

    def __init__(self, tensors: Iterator[Any]) -> None:
        found: dict[int, memoryview] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() > len(found.get(storage.data_ptr(), b"")):
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                found[storage.data_ptr()] = memoryview(whole.numpy())
        self._set(found)

    def _set(self, found: dict[int, memoryview]) -> None:
        self._begins = sorted(found)
        self._views = [found[begin] for begin in self._begins]

    def keep_only(self, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        """Lets go of tensors that none of these pieces lies in.

        Raises:
            ValueError: a piece lies in no tensor.
        """
        used = {self._place(*piece) for piece in zip(addresses, sizes, strict=True)}
        self._set({self._begins[place]: self._views[place] for place in used})

    def _place(self, address: int, nbytes: int) -> int:
        place = bisect_right(self._begins, address) - 1
        if place < 0 or address + nbytes > self._begins[place] + len(self._views[place]):
            raise ValueError("a piece of a page lies outside the host pool's tensors")
        return place

    def view(self, address: int, nbytes: int) -> memoryview:
        """Bytes of the tensors, from this address on.

        Raises:
            ValueError: they lie in no tensor.
        """
        place = self._place(address, nbytes)
        start = address - self._begins[place]
        return self._views[place][start : start + nbytes]


def _tensors(pool: Any) -> Iterator[Any]:
    """The tensors in host memory that are a pool's own."""
    for value in vars(pool).values():
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor) and each.device.type == "cpu":
                yield each


def _page_tokens(pool: Any) -> int:
    return int(getattr(pool, "logical_page_size", None) or pool.page_size or 1)


def lent(page: Any) -> Loan:
    """The memory of a page in a tensor of its own.

    Raises:
        RuntimeError: the tensor is not contiguous.
    """
    data = page.view(-1).view(torch.uint8)
    return Loan([data], int(data.numel()))
