"""What the documentation says of measurements is what the raw files say."""

from __future__ import annotations

from pathlib import Path

import pytest
import result_tables
from result_tables import FOUR, H100, PAGES, RESULTS, TABLES, TWO


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_tables_are_those_of_the_raw_results(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert result_tables.written(page) == page, "write them anew: python tests/support/result_tables.py"


def test_every_table_is_in_one_page_once() -> None:
    found = [name for path in PAGES for name in result_tables.names(path.read_text(encoding="utf-8"))]
    assert found == list(TABLES)


def test_means_are_of_all_rows() -> None:
    for folder, gathers, scatters in ((FOUR, 36 + 2 * 20, 27 + 12 + 15), (TWO, 3 * 36, 3 * 27), (H100, 3 * 36, 3 * 27)):
        found = [row.raw["op"] for row in result_tables.rows(folder)]
        assert (found.count("gather"), found.count("scatter")) == (gathers, scatters)


def test_raw_results_are_small() -> None:
    """A clone has them all. The page of the folder names the commit that has what left."""
    assert sum(path.stat().st_size for path in RESULTS.rglob("*") if path.is_file()) <= 1_500_000
