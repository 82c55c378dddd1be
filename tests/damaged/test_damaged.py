"""A slice of the drawn model files; `make damaged MINUTES=10` goes on for longer."""

from pathlib import Path
from types import ModuleType

import pytest

from tests.damaged.run import make_good, run

COUNT = 60


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_drawn_model_is_refused_by_a_typed_error_or_gives_the_right_text(
    tiny_models: ModuleType, tmp_path: Path
) -> None:
    make_good(tiny_models, tmp_path)
    refused, wrong = run(tmp_path, tmp_path / "drawn", 0, COUNT)
    assert not wrong, "\n".join(wrong)
    assert COUNT // 3 < refused < COUNT, "changes that are all refused, or none, test little"
