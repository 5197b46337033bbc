"""How the pages of a request come and go. Host only.

Knows the pool and one request at a time, not who runs or why. ``page_hashes`` of a request grow
with its known tokens and are computed once: they stay valid through preemption.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dcpjax.cache.prefix import PagePool, chain_hashes, root_hash
from dcpjax.engine.request import Request


@dataclass(frozen=True)
class Admission:
    """What starting a waiting request would take; nothing has changed yet.

    ``cost`` is in available pages: the new ones, and the cached ones that nobody holds now.
    """

    request: Request
    cached_pages: list[int]
    num_new_pages: int
    num_uncomputed: int
    cost: int


class Residency:
    """Gives pages of ``pool`` to requests, reusing cached ones where that is enabled."""

    def __init__(self, pool: PagePool, *, enable_prefix_caching: bool) -> None:
        self._pool = pool
        self.has_prefix_cache = enable_prefix_caching

    def num_missing(self, request: Request) -> int:
        """Pages that a running request lacks for computing its next tokens and its drafts."""
        if not request.can_continue:
            return 0
        stop = request.num_tokens + request.num_pending + request.drafts.count
        wanted = self._pool.num_pages_for(stop)
        return max(wanted - len(request.page_ids), 0)

    def grow(self, request: Request) -> None:
        """Allocate what is missing, as a continuation of the last page if that is free."""
        if missing := self.num_missing(request):
            request.page_ids += self._pool.allocate(missing, after=request.page_ids[-1])

    def admission(self, request: Request) -> Admission:
        """Decide how to start: the cached beginning, and pages up to the next token to come.

        Costs one look-up per cached page, so up to the length of the prompt.
        """
        cached: list[int] = []
        if self.has_prefix_cache:
            self._hash_pages(request)
            cached = self._pool.find_prefix(request.page_hashes, num_tokens=request.num_tokens)
        num_new = self._pool.num_pages_for(request.num_tokens + 1) - len(cached)
        return Admission(
            request=request,
            cached_pages=cached,
            num_new_pages=num_new,
            num_uncomputed=request.num_tokens - len(cached) * self._pool.page_size,
            cost=self._pool.cost(cached, num_new),
        )

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Carry out decisions that were made in one go and whose summed cost is available."""
        # All shared pages first: allocating for one request must not evict what the next one found.
        for admission in admissions:
            self._pool.share(admission.cached_pages)
        for admission in admissions:
            request, cached = admission.request, admission.cached_pages
            new = self._pool.allocate(admission.num_new_pages, after=cached[-1] if cached else None)
            request.page_ids = [*cached, *new]
            request.num_cached = request.num_scheduled = len(cached) * self._pool.page_size

    def register(self, request: Request, start: int, stop: int) -> None:
        """List the pages that were filled by computing the known tokens ``[start, stop)``."""
        first_page, stop_page = start // self._pool.page_size, stop // self._pool.page_size
        if self.has_prefix_cache and first_page < stop_page:
            self._hash_pages(request)
            pages = slice(first_page, stop_page)
            self._pool.register(request.page_hashes[pages], request.page_ids[pages])

    def distrust(self, request: Request, num_trusted: int) -> None:
        """Let nobody find what a request has in its pages behind its first tokens."""
        self._pool.forget(request.page_ids[num_trusted // self._pool.page_size :])

    def release(self, request: Request) -> None:
        """Give up all pages; what the request has computed is only in the cache, if anywhere."""
        self._pool.release(request.page_ids)
        request.page_ids = []
        request.num_cached = request.num_scheduled = 0

    def _hash_pages(self, request: Request) -> None:
        hashes, size = request.page_hashes, self._pool.page_size
        start = len(hashes) * size
        if request.num_tokens - start >= size:
            parent = hashes[-1] if hashes else root_hash(request.cache_salt)
            hashes += chain_hashes(parent, request.tokens(start, request.num_tokens), size)
