"""The validation page is in step with the code, and its arithmetic is exact."""

from pathlib import Path

import pytest

from dcpjax.planner.validation import Chapter, Row, one, render
from dcpjax.planner.validation_kernels import all_chapters

PAGE = Path(__file__).resolve().parents[2] / "dcpjax" / "planner" / "VALIDATION.md"


@pytest.fixture(scope="module")
def chapters() -> list[Chapter]:
    return all_chapters()


def test_the_page_is_in_step(chapters):
    page = PAGE.read_text(encoding="utf-8")
    assert render(chapters) == page, "run python -m scripts.validation"


def test_arithmetic_agrees_as_printed(chapters):
    """Two rows are rounded sums of rounded numbers at the source, and say so."""
    rows = [row for chapter in chapters for row in chapter.rows if row.status == "arithmetic"]
    assert len(rows) >= 12
    for row in rows:
        assert row.error == 0 or (row.note and abs(row.error) < 0.025), row


def test_calibrated_rows_agree_and_others_follow_them(chapters):
    for chapter in chapters:
        statuses = [row.status for row in chapter.rows]
        for row in chapter.rows:
            assert row.status != "calibrated" or abs(row.error) < 0.03, row
        assert "calibrated" not in statuses or "predicted" in statuses


def test_errors_are_relative_to_the_nearest_printed_value():
    row = Row("x", (5.0, 15.0), 10.0, "", 0, "predicted")
    errors = [Row(**{**vars(row), "ours": value}).error for value in (5, 14.6, 30, 2.5)]
    assert errors == [0, 0, 1.0, -0.5]
    assert one("y", 1.17, 1.174, "", 2).error == 0 and one("y", 2.0, 1.0, "").error == -0.5
    assert row.published_text == "5 to 15"
