"""The table in tests/README.md is what `tests/rows.py` writes, and docs/rows.md explains every row of it."""

from tests import rows


def test_the_table_of_rows_is_up_to_date() -> None:
    text = rows.README.read_text()
    assert rows.table() in text, "run python tests/rows.py"
    for row in rows.missing():
        assert f"{row} (" in text, f"{row} has neither a test nor a reason"


def test_one_page_says_what_each_row_means() -> None:
    every = {f"{letter}{number}" for letter, count in rows.ROWS.items() for number in range(1, count + 1)}
    assert set(rows.meanings()) == every
