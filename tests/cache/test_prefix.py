"""Laws of the page pool: what is found was registered, and what is held is never given away."""

import random

import pytest

from dcpjax.cache.pages import PageError
from dcpjax.cache.prefix import PagePool, chain_hashes, root_hash
from dcpjax.errors import ConfigError

SIZE = 4


def hashes_of(tokens: list[int], salt: str = "") -> list[bytes]:
    return chain_hashes(root_hash(salt), tokens, SIZE)


def cached_sequence(pool: PagePool, tokens: list[int]) -> list[int]:
    """Compute, register and release ``tokens``; the pages that now hold them."""
    hashes = hashes_of(tokens)
    pages = pool.allocate(len(hashes))
    pool.register(hashes, pages)
    pool.release(pages)
    return pages


@pytest.mark.parametrize("length", [0, 1, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE, 3 * SIZE + 1])
def test_only_full_pages_have_a_hash(length: int) -> None:
    assert len(hashes_of(list(range(length)))) == length // SIZE


def test_a_hash_stands_for_all_tokens_up_to_its_end() -> None:
    tokens = [1] * 12
    first, second, third = hashes_of(tokens)
    assert len({first, second, third}) == 3  # equal pages at different places differ
    assert hashes_of([2, *tokens[1:]])[2] != third
    assert hashes_of(tokens, salt="other")[0] != first
    assert hashes_of([*tokens[:11], 2]) == [first, second, hashes_of([*tokens[:11], 2])[2]]
    assert hashes_of([1 << 40] * 4) != hashes_of([0] * 4)


def test_hashing_in_pieces_equals_hashing_at_once() -> None:
    tokens = random.Random(0).choices(range(50_000), k=20)
    head = hashes_of(tokens[:8])
    assert head + chain_hashes(head[-1], tokens[8:], SIZE) == hashes_of(tokens)


@pytest.mark.parametrize("salt", ["", "tenant", "\ud800"])
def test_any_text_is_a_salt(salt: str) -> None:
    assert root_hash(salt) == root_hash(salt) != root_hash(salt + "x")


@pytest.mark.parametrize("num_pages, page_size", [(0, 4), (4, 0)])
def test_an_empty_pool_is_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ConfigError, match="at least 1 page"):
        PagePool(num_pages, page_size)


class WholePromptHits(PagePool):
    """A mutant: the limit is forgotten."""

    def find_prefix(self, hashes, *, num_tokens):
        return super().find_prefix(hashes, num_tokens=num_tokens + SIZE)


@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE - 1, 2 * SIZE])
def test_a_hit_leaves_the_last_token_to_compute(length: int) -> None:
    def num_found(pool: PagePool) -> int:
        tokens = list(range(4 * SIZE))
        cached_sequence(pool, tokens)
        return len(pool.find_prefix(hashes_of(tokens[:length]), num_tokens=length))

    assert num_found(PagePool(8, SIZE)) == (length - 1) // SIZE
    if length % SIZE == 0:  # where the law bites, breaking it shows
        assert num_found(WholePromptHits(8, SIZE)) * SIZE == length


def test_a_prefix_ends_at_the_first_unknown_page() -> None:
    pool = PagePool(16, SIZE)
    tokens = list(range(16))
    pages = cached_sequence(pool, tokens)
    assert pool.find_prefix(hashes_of(tokens), num_tokens=17) == pages
    changed = [*tokens[:6], 99, *tokens[7:]]
    assert pool.find_prefix(hashes_of(changed), num_tokens=17) == pages[:1]
    assert pool.find_prefix(hashes_of(tokens, salt="s"), num_tokens=17) == []


def test_the_first_page_registered_for_some_tokens_stays() -> None:
    pool = PagePool(8, SIZE)
    hashes = hashes_of(list(range(8)))
    first, second = pool.allocate(2), pool.allocate(2)
    pool.register(hashes, first)
    pool.register(hashes, second)
    assert pool.find_prefix(hashes, num_tokens=9) == first
    pool.release(second)
    assert pool.num_available == 6 and pool.num_cached == 2  # the second's pages are free
    pool.release(first)
    assert pool.find_prefix(hashes, num_tokens=9) == first
    pool.check_integrity(is_idle=True)


def test_a_page_cannot_stand_for_two_contents() -> None:
    pool = PagePool(2, SIZE)
    pages = pool.allocate(1)
    pool.register(hashes_of([1] * 4), pages)
    with pytest.raises(PageError, match=f"page {pages[0]}"):
        pool.register(hashes_of([2] * 4), pages)


def test_eviction_waits_until_free_pages_do_not_suffice() -> None:
    pool = PagePool(6, SIZE)
    cached_sequence(pool, list(range(16)))
    pool.allocate(2)
    assert pool.num_cached == 4
    pool.allocate(1)
    assert pool.num_cached == 3


class ReleasesForwards(PagePool):
    """A mutant: the beginning of a sequence is released first, so it is evicted first."""

    def release(self, pages):
        super().release(pages[::-1])


@pytest.mark.parametrize("pool_class, survives", [(PagePool, True), (ReleasesForwards, False)])
def test_a_sequence_is_evicted_from_its_end(pool_class: type[PagePool], survives: bool) -> None:
    pool = pool_class(4, SIZE)
    tokens = list(range(16))
    pages = cached_sequence(pool, tokens)
    pool.allocate(2)
    found = pool.find_prefix(hashes_of(tokens), num_tokens=17)
    assert (found == pages[:2]) == survives


def test_least_recently_used_goes_first() -> None:
    pool = PagePool(4, SIZE)
    old, new = [1] * 8, [2] * 8
    old_pages = cached_sequence(pool, old)
    cached_sequence(pool, new)
    pool.share(old_pages)  # used again
    pool.release(old_pages)
    pool.allocate(2)
    assert pool.find_prefix(hashes_of(old), num_tokens=9) == old_pages
    assert pool.find_prefix(hashes_of(new), num_tokens=9) == []


def test_held_pages_are_neither_available_nor_evicted() -> None:
    pool = PagePool(4, SIZE)
    pages = cached_sequence(pool, list(range(8)))
    assert pool.num_available == 4
    assert pool.cost(pages, 1) == 3
    pool.share(pages)
    assert pool.num_available == 2 and pool.usage == 0.5
    assert pool.cost(pages, 1) == 1
    with pytest.raises(PageError, match="3 pages are wanted and 2 are available"):
        pool.allocate(3)
    assert not set(pool.allocate(2)) & set(pages)
    pool.check_integrity()


def test_reset_forgets_and_leaves_held_pages_alone() -> None:
    pool = PagePool(8, SIZE)
    tokens = list(range(8))
    cached_sequence(pool, tokens)
    held = pool.allocate(1)
    pool.register(hashes_of([9] * 4), held)
    pool.reset()
    assert pool.num_cached == 0 and pool.num_available == 7
    assert pool.find_prefix(hashes_of(tokens), num_tokens=9) == []
    pool.release(held)
    pool.check_integrity(is_idle=True)


def test_forgotten_pages_stay_with_who_holds_them() -> None:
    pool = PagePool(4, SIZE)
    hashes = chain_hashes(root_hash(""), list(range(3 * SIZE)), SIZE)
    pages = pool.allocate(3)
    pool.register(hashes, pages)
    pool.forget(pages[1:])
    pool.forget(pages[1:])  # of what is not listed there is nothing to forget
    assert pool.find_prefix(hashes, num_tokens=3 * SIZE + 1) == pages[:1]
    assert pool.num_available == 1
    pool.check_integrity()
    pool.release(pages)
    pool.forget(pages)
    assert pool.num_available == 4 and not pool.num_cached
    pool.check_integrity(is_idle=True)


def test_idle_with_a_held_page_is_a_leak() -> None:
    pool = PagePool(4, SIZE)
    pool.allocate(1)
    pool.check_integrity()
    with pytest.raises(PageError, match="1 of 4 pages are held"):
        pool.check_integrity(is_idle=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._evictable.popitem(),
        lambda pool: pool._page_of.popitem(),
        lambda pool: pool._hash_of.clear(),
        lambda pool: pool._allocator.share([0]),
    ],
)
def test_the_integrity_check_can_fail(damage) -> None:
    pool = PagePool(4, SIZE)
    cached_sequence(pool, list(range(8)))
    pool.check_integrity(is_idle=True)
    damage(pool)
    with pytest.raises(PageError):
        pool.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_random_use_keeps_the_sum_of_pages(seed: int) -> None:
    """Sequences over two tokens, so prefixes are shared all the time."""
    rng, pool = random.Random(seed), PagePool(12, SIZE)
    held: list[list[int]] = []
    for _ in range(200):
        if held and rng.random() < 0.5:
            pool.release(held.pop(rng.randrange(len(held))))
        else:
            tokens = [token for token in rng.choices((0, 1), k=3) for _ in range(SIZE)]
            hashes = hashes_of(tokens)
            found = pool.find_prefix(hashes, num_tokens=len(tokens) + 1)
            if pool.cost(found, len(hashes) - len(found)) <= pool.num_available:
                pool.share(found)
                pages = found + pool.allocate(len(hashes) - len(found))
                pool.register(hashes, pages)
                held.append(pages)
        pool.check_integrity()
        assert pool.num_pages - pool.num_available == len({p for pages in held for p in pages})
    for pages in held:
        pool.release(pages)
    pool.check_integrity(is_idle=True)
