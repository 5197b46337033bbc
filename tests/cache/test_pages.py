"""Laws of the page allocator: it agrees with a set of free ids, and hands out runs where it can."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dcpjax.cache.pages import PageAllocator, PageError


def longest_run(pages: set[int]) -> int:
    lengths = [0]
    for page in sorted(pages):
        lengths.append(lengths[-1] + 1 if page - 1 in pages else 1)
    return max(lengths)


class AgainstASet(RuleBasedStateMachine):
    """Random calls; ``free`` and ``held`` are the obvious model."""

    NUM_PAGES = 24

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(self.NUM_PAGES)
        self.free = set(range(self.NUM_PAGES))
        self.held: list[int] = []  # with repetition: one entry per reference

    @rule(count=st.integers(0, NUM_PAGES), after=st.none() | st.integers(-1, NUM_PAGES))
    def allocate(self, count: int, after: int | None) -> None:
        assert self.allocator.can_allocate(count) == (count <= len(self.free))
        if count > len(self.free):
            with pytest.raises(PageError, match=f"{count} pages"):
                self.allocator.allocate(count)
            return
        longest = longest_run(self.free)
        pages = self.allocator.allocate(count, after=after)
        assert len(set(pages)) == count and set(pages) <= self.free
        if after is not None and count and after + 1 in self.free - {0} and after in self.held:
            assert pages[0] == after + 1
        elif count and count <= longest and after is None:
            assert pages == list(range(pages[0], pages[0] + count))
        self.free -= set(pages)
        self.held += pages

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.held), unique=True))
        self.allocator.share(pages)
        self.held += pages

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.held), unique=True))
        self.allocator.release(pages)
        for page in pages:
            self.held.remove(page)
        self.free |= set(pages) - set(self.held)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def misuse_a_free_page(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.free)))
        for misuse in (self.allocator.share, self.allocator.release):
            with pytest.raises(PageError, match=f"page {page} is free"):
                misuse([page])

    @invariant()
    def agrees(self) -> None:
        self.allocator.check_integrity()
        assert self.allocator.num_free == len(self.free)
        assert [self.allocator.references(page) for page in range(self.NUM_PAGES)] == [
            self.held.count(page) for page in range(self.NUM_PAGES)
        ]
        expected = 1 - longest_run(self.free) / len(self.free) if self.free else 0
        assert self.allocator.fragmentation == pytest.approx(expected)


TestAgainstASet = AgainstASet.TestCase
TestAgainstASet.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("count", [0, 1, 7, 8])
def test_a_fresh_allocator_hands_out_one_ascending_run(count: int) -> None:
    assert PageAllocator(8).allocate(count) == list(range(count))


def test_no_pages_at_all() -> None:
    allocator = PageAllocator(0)
    assert allocator.allocate(0) == [] and not allocator.can_allocate(1)
    assert allocator.fragmentation == 0
    allocator.check_integrity()


def test_the_smallest_run_that_suffices_is_used() -> None:
    allocator = PageAllocator(16)
    allocator.allocate(16)
    allocator.release([0, 1, 2, 3, 4, 8, 9, 10, 13])  # free runs of 5, 3 and 1
    assert allocator.allocate(3) == [8, 9, 10]
    assert allocator.allocate(1) == [13]
    assert allocator.allocate(4) == [0, 1, 2, 3]


def test_where_no_run_suffices_the_longest_are_joined() -> None:
    allocator = PageAllocator(16)
    allocator.allocate(16)
    allocator.release([0, 1, 2, 5, 6, 9])
    assert allocator.allocate(5) == [0, 1, 2, 5, 6]


def test_a_sequence_grows_into_the_page_behind_it() -> None:
    allocator = PageAllocator(16)
    allocator.allocate(16)
    allocator.release([4, 5, 9])  # behind page 3: a run of 2; elsewhere: one that fits better
    assert allocator.allocate(1, after=3) == [4]
    assert allocator.allocate(1, after=3) == [9]  # page 4 is taken: as without a wish


@pytest.mark.parametrize("page", [-1, 4, 5])
def test_scratch_page_and_other_foreign_ids_are_refused(page: int) -> None:
    allocator = PageAllocator(4)
    allocator.allocate(4)
    for misuse in (allocator.share, allocator.release):
        with pytest.raises(PageError, match=f"page {page} is not one of the 4"):
            misuse([page])


def test_a_page_released_twice_in_one_call_is_named() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(4)
    with pytest.raises(PageError, match="page 2 is free"):
        allocator.release([1, 2, 2])


@pytest.mark.parametrize(
    "damage",
    [
        lambda a: a._references.__setitem__(0, 1),
        lambda a: a._references.__setitem__(3, 0),
        lambda a: a._length_at.__setitem__(6, 3),
        lambda a: a._first_at.clear(),
        lambda a: a._firsts_of.clear(),
        lambda a: setattr(a, "_num_free", 3),
    ],
)
def test_the_integrity_check_can_fail(damage) -> None:
    allocator = PageAllocator(10)
    allocator.allocate(8)
    allocator.release([0, 1, 6])
    allocator.check_integrity()
    damage(allocator)
    with pytest.raises(PageError):
        allocator.check_integrity()


def test_the_cost_of_a_call_does_not_grow_with_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in touched runs, not in seconds: a badly fragmented pool of 100k pages."""
    allocator = PageAllocator(100_000)
    allocator.allocate(100_000)
    allocator.release(range(0, 100_000, 2))
    touched = 0
    for name in ("_add_run", "_remove_run"):
        original = getattr(PageAllocator, name)

        def counted(self, *args, original=original):
            nonlocal touched
            touched += 1
            return original(self, *args)

        monkeypatch.setattr(PageAllocator, name, counted)
    pages = allocator.allocate(10)
    allocator.release(pages)
    assert touched <= 4 * len(pages)
