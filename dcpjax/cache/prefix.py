"""Pages that outlive their request because they hold the beginning of a sequence.

A page is found by the chained hash of all tokens up to its end, so equal hashes mean equal keys
and values. Knows tokens and page ids, no requests and no devices. The one invariant: a page is
free, evictable (cached and held by nobody) or held, never two of these.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from dcpjax.cache.pages import PageAllocator, PageError
from dcpjax.errors import ConfigError

_DIGEST_BYTES = 32


def root_hash(salt: str) -> bytes:
    """The parent of a sequence's first page. Sequences of different salts never share pages."""
    return hashlib.blake2b(
        salt.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES
    ).digest()


def chain_hashes(parent: bytes, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Hashes of the full pages that ``tokens`` fill, the first of which follows ``parent``.

    The rest of less than ``page_size`` tokens has no hash yet.
    """
    hashes: list[bytes] = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        values = array("q", tokens[start : start + page_size]).tobytes()
        parent = hashlib.blake2b(parent + values, digest_size=_DIGEST_BYTES).digest()
        hashes.append(parent)
    return hashes


class PagePool:
    """The pages of one engine: allocation, and reuse of pages with known tokens.

    The cache itself holds one reference to each page it lists; a page with no other holder is
    evictable. Evictable pages count as available and are given up, least recently used first,
    only when free pages do not suffice.

    Args:
        num_pages: page ids to manage; the scratch page is not among them.
        page_size: tokens of a sequence that one page id stands for, over all DCP ranks.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ConfigError(
                "a page pool has at least 1 page of at least 1 token",
                num_pages=num_pages,
                page_size=page_size,
            )
        self.page_size = page_size
        self._allocator = PageAllocator(num_pages)
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def num_available(self) -> int:
        """Pages that ``allocate`` can hand out: free or evictable."""
        return self._allocator.num_free + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Pages that ``find_prefix`` can find, held ones included."""
        return len(self._hash_of)

    @property
    def usage(self) -> float:
        """Share of the pages that somebody holds, in [0, 1]."""
        return 1 - self.num_available / self.num_pages

    @property
    def fragmentation(self) -> float:
        """Of the free pages, see :attr:`PageAllocator.fragmentation`."""
        return self._allocator.fragmentation

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens of one sequence need."""
        return -(-num_tokens // self.page_size)

    def find_prefix(self, hashes: Sequence[bytes], *, num_tokens: int) -> list[int]:
        """Cached pages of the longest known beginning of a sequence of ``num_tokens`` tokens.

        Never all of its tokens: the last one has to be computed, since its logits are wanted.
        The pages are not held yet; they stay what they are until the next ``allocate``.
        """
        pages: list[int] = []
        for digest in hashes[: max(num_tokens - 1, 0) // self.page_size]:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def cost(self, shared: Iterable[int], num_new: int) -> int:
        """Available pages used up by sharing ``shared`` and allocating ``num_new`` more."""
        return num_new + sum(page in self._evictable for page in shared)

    def share(self, pages: Sequence[int]) -> None:
        """Hold pages that ``find_prefix`` returned."""
        self._allocator.share(pages)
        for page in pages:
            self._evictable.pop(page, None)

    def allocate(self, num_pages: int, *, after: int | None = None) -> list[int]:
        """Hold ``num_pages`` pages of unknown content, evicting cached ones as far as needed.

        Raises:
            PageError: more pages than ``num_available`` are wanted; nothing was changed.
        """
        if num_pages > self.num_available:
            raise PageError(f"{num_pages} pages are wanted and {self.num_available} are available")
        self._evict(max(0, num_pages - self._allocator.num_free))
        return self._allocator.allocate(num_pages, after=after)

    def register(self, hashes: Sequence[bytes], pages: Sequence[int]) -> None:
        """List held, fully written pages under the hashes of their tokens.

        Where two sequences computed the same page, the first one stays listed; the second remains
        the property of its sequence.
        """
        for digest, page in zip(hashes, pages, strict=True):
            if digest in self._page_of:
                continue
            if page in self._hash_of:
                raise PageError(f"page {page} is listed with other tokens")
            self._allocator.share([page])
            self._page_of[digest] = page
            self._hash_of[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """Give up a sequence's pages, which are in the order of its tokens.

        They become evictable from the last to the first: a beginning serves more sequences than
        what follows it, and a page without its beginning cannot be found.
        """
        self._allocator.release(pages)
        for page in reversed(pages):
            if page in self._hash_of and self._allocator.references(page) == 1:
                self._evictable[page] = None

    def forget(self, pages: Sequence[int]) -> None:
        """Never find these pages again; who holds them keeps them."""
        listed = [page for page in pages if page in self._hash_of]
        for page in listed:
            del self._page_of[self._hash_of.pop(page)]
            self._evictable.pop(page, None)
        self._allocator.release(listed)

    def reset(self) -> None:
        """Forget all cached pages; held ones stay with their holders."""
        self._allocator.release(self._hash_of)
        self._evictable.clear()
        self._hash_of.clear()
        self._page_of.clear()

    def check_integrity(self, *, is_idle: bool = False) -> None:
        """Raise PageError unless free + evictable + held == num_pages; idle: nothing is held."""
        self._allocator.check_integrity()
        if {page: digest for digest, page in self._page_of.items()} != self._hash_of:
            raise PageError("the hashes of pages and the pages of hashes disagree")
        unheld = {page for page in self._hash_of if self._allocator.references(page) == 1}
        if unheld != set(self._evictable):
            raise PageError(
                f"pages {unheld ^ set(self._evictable)} are evictable or held, not both"
            )
        if is_idle and self.num_available != self.num_pages:
            held = self.num_pages - self.num_available
            raise PageError(f"{held} of {self.num_pages} pages are held and nothing runs")

    def _evict(self, num_pages: int) -> None:
        pages = [self._evictable.popitem(last=False)[0] for _ in range(num_pages)]
        for page in pages:
            del self._page_of[self._hash_of.pop(page)]
        self._allocator.release(pages)
