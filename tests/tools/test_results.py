"""What the documentation says of measurements is what the raw files say."""

from __future__ import annotations

import result_tables
from result_tables import FOUR, H100, PAGE, TABLES, TWO


def test_tables_are_those_of_the_raw_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert result_tables.written(page) == page, "write them anew: python tests/support/result_tables.py"


def test_every_table_is_in_the_page_once() -> None:
    assert result_tables.names(PAGE.read_text(encoding="utf-8")) == list(TABLES)


def test_means_are_of_all_rows() -> None:
    for folder, kinds in ((FOUR, 1), (TWO, 3), (H100, 3)):
        found = [row.raw["op"] for row in result_tables.rows(folder)]
        assert (found.count("gather"), found.count("scatter")) == (36 * kinds, 27 * kinds)
