"""Page tables kept between steps hold what the requests hold, whoever had the slot before."""

import pytest

from dcpjax.engine.page_tables import PageTables
from dcpjax.engine.request import Request, SamplingParams

SCRATCH = 99


def running(slot: int | None, pages: list[int]) -> Request:
    return Request("same id", (1,), SamplingParams(), slot=slot, page_ids=pages)


def test_a_table_grows_with_its_request():
    tables, request = PageTables(2, 4, SCRATCH), running(1, [5])
    tables.start(request)
    assert tables.of(request).tolist() == [5, 99, 99, 99]
    request.page_ids += [7, 3]
    assert tables.of(request).tolist() == [5, 7, 3, 99]


@pytest.mark.parametrize("pages", [[], [8], [8, 6, 4]])
def test_the_next_holder_of_a_slot_begins_anew(pages):
    """Even under the same id, and after a preemption."""
    tables = PageTables(1, 4, SCRATCH)
    for request in (running(0, [1, 2]), running(0, pages)):
        tables.start(request)
        expected = request.page_ids + [SCRATCH] * (4 - len(request.page_ids))
        assert tables.of(request).tolist() == expected


def test_a_waiting_request_has_none():
    with pytest.raises(AssertionError, match="only running requests"):
        PageTables(1, 4, SCRATCH).of(running(None, []))
