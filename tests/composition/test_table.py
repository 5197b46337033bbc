"""The architecture page shows the matrix that is tested."""

from itertools import combinations
from pathlib import Path

from tests.composition.settings import OPTIONS, REFUSED, SERVED
from tests.composition.table import render_table, with_table

PAGE = Path(__file__).resolve().parents[2] / "dcpjax" / "README.md"


def test_the_page_is_in_step():
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, "run python -m scripts.composition_table"


def test_the_table_names_what_is_refused():
    table = render_table()
    assert all(f"| {setting} |" in table for setting in OPTIONS)
    row = next(line for line in table.splitlines() if "`a2a`" in line.split("|")[2])
    assert "`(1, 1)`" in row and "`(1, 3)`" not in row


def test_every_refusal_is_one_of_a_pair():
    """Else the table, which shows pairs, would not say it."""
    served = {pair for choice in SERVED for pair in combinations(choice.items(), 2)}
    for choice in REFUSED:
        assert set(combinations(choice.items(), 2)) - served
