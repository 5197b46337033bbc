"""Which page ids are free, and how many holders each of the others has.

Knows nothing about tokens, requests or devices. A page id names one page on each DCP rank; the ids
managed here are ``0 .. num_pages - 1``, so the scratch page, which is ``num_pages`` itself, never
gets in. The one invariant: a page lies in exactly one free run if and only if nobody refers to it.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator


class PageError(AssertionError):
    """A bug of the caller: a page was used against its reference count. The message names it."""


class PageAllocator:
    """Reference-counted page ids, handed out in ascending runs where the free pages allow it.

    Free pages are kept as maximal runs, so a call costs time in the pages it moves and in the
    number of different run lengths (at most the square root of twice ``num_pages``), never in
    ``num_pages``.
    """

    def __init__(self, num_pages: int) -> None:
        self._references = [0] * num_pages
        self._length_at: dict[int, int] = {}  # first page of a free run -> its length
        self._first_at: dict[int, int] = {}  # last page of a free run -> its first page
        self._firsts_of: dict[int, dict[int, None]] = {}  # length -> first pages, oldest first
        self._lengths: list[int] = []  # the keys of _firsts_of, ascending
        self._num_free = 0
        if num_pages:
            self._add_run(0, num_pages)

    @property
    def num_pages(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def fragmentation(self) -> float:
        """1 - longest free run / free pages: 0 where all free pages are one run, or none is."""
        return 1 - self._lengths[-1] / self._num_free if self._num_free else 0.0

    def references(self, page: int) -> int:
        """Number of holders of ``page``; 0 if it is free."""
        if not 0 <= page < self.num_pages:
            raise PageError(f"page {page} is not one of the {self.num_pages} managed pages")
        return self._references[page]

    def can_allocate(self, num_pages: int) -> bool:
        return num_pages <= self._num_free

    def allocate(self, num_pages: int, *, after: int | None = None) -> list[int]:
        """Take ``num_pages`` free pages, each with one reference.

        First what directly follows page ``after``, then the smallest run that holds all the rest,
        then the longest runs: few runs make a transfer fast, and long ones are kept for those who
        need them.
        """
        if not self.can_allocate(num_pages):
            raise PageError(f"{num_pages} pages are wanted and {self._num_free} are free")
        pages: list[int] = []
        if num_pages and after is not None and after + 1 in self._length_at:
            pages += self._take(after + 1, num_pages)
        while len(pages) < num_pages:
            missing = num_pages - len(pages)
            pages += self._take(self._best_run(missing), missing)
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each page; none of them is free."""
        for page in pages:
            if not self.references(page):
                raise PageError(f"page {page} is free and cannot be shared")
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference of each page; those without a holder are free again."""
        freed: list[int] = []
        for page in pages:
            if not self.references(page):
                raise PageError(f"page {page} is free and cannot be released")
            self._references[page] -= 1
            if not self._references[page]:
                freed.append(page)
        for first, length in _runs(sorted(freed)):
            self._free_run(first, length)

    def check_integrity(self) -> None:
        """Raise PageError unless the free runs are maximal, disjoint and all the unheld pages."""
        free: list[int] = []
        for first in sorted(self._length_at):
            length = self._length_at[first]
            if free and first <= free[-1] + 1:
                raise PageError(f"page {first} starts a free run inside or next to another one")
            if self._first_at.get(first + length - 1) != first:
                raise PageError(f"the free run of page {first} has no end")
            if first not in self._firsts_of.get(length, {}):
                raise PageError(f"the free run of page {first} is not listed by its length")
            free.extend(range(first, first + length))
        unheld = [page for page, count in enumerate(self._references) if not count]
        if free != unheld:
            raise PageError(f"pages {sorted(set(free) ^ set(unheld))} are free or held, not both")
        if len(free) != self._num_free or self._lengths != sorted(self._firsts_of):
            raise PageError(f"{len(free)} pages are free and {self._num_free} were counted")

    def _best_run(self, num_pages: int) -> int:
        index = min(bisect_left(self._lengths, num_pages), len(self._lengths) - 1)
        return next(iter(self._firsts_of[self._lengths[index]]))

    def _take(self, first: int, at_most: int) -> range:
        length = self._remove_run(first)
        taken = min(length, at_most)
        if taken < length:
            self._add_run(first + taken, length - taken)
        return range(first, first + taken)

    def _free_run(self, first: int, length: int) -> None:
        before = self._first_at.get(first - 1)
        if before is not None:
            length += self._remove_run(before)
            first = before
        if first + length in self._length_at:
            length += self._remove_run(first + length)
        self._add_run(first, length)

    def _add_run(self, first: int, length: int) -> None:
        self._length_at[first] = length
        self._first_at[first + length - 1] = first
        if length not in self._firsts_of:
            self._firsts_of[length] = {}
            insort(self._lengths, length)
        self._firsts_of[length][first] = None
        self._num_free += length

    def _remove_run(self, first: int) -> int:
        length = self._length_at.pop(first)
        del self._first_at[first + length - 1]
        firsts = self._firsts_of[length]
        del firsts[first]
        if not firsts:
            del self._firsts_of[length]
            del self._lengths[bisect_left(self._lengths, length)]
        self._num_free -= length
        return length


def _runs(pages: list[int]) -> Iterator[tuple[int, int]]:
    """The maximal runs of ascending page ids as (first page, length): 3 4 5 9 -> (3, 3) (9, 1)."""
    start = 0
    for stop in range(1, len(pages) + 1):
        if stop == len(pages) or pages[stop] != pages[stop - 1] + 1:
            yield pages[start], stop - start
            start = stop
