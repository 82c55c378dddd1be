"""The table in tests/README.md is what `tests/rows.py` writes."""

import importlib.util
from pathlib import Path


def test_the_table_of_rows_is_up_to_date() -> None:
    path = Path(__file__).parent / "rows.py"
    spec = importlib.util.spec_from_file_location("rows", path)
    assert spec is not None and spec.loader is not None
    rows = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rows)
    assert rows.table() in rows.README.read_text(), "run python tests/rows.py"
    for row in rows.missing():
        assert f"{row} (" in rows.README.read_text(), f"{row} has neither a test nor a reason"
