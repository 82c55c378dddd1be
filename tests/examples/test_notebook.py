"""The notebook runs in a kernel without a browser: its cells await at the top level."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tool_models import tool_model
from tests.waiting import ENGINE_PATIENCE_S

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"


@pytest.mark.long  # a kernel takes seconds to start
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Jupyter's packages
def test_a_notebooks_cells_await_a_streamed_answer(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat, nbclient = (pytest.importorskip(name) for name in ("nbformat", "nbclient"))
    pytest.importorskip("ipykernel")
    model = tool_model(tiny_model_dir("llama"), tmp_path / "model")
    monkeypatch.setenv("GENBATCH_EXAMPLE_MODEL", str(model))
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=ENGINE_PATIENCE_S, kernel_name="python3").execute()
    opened, streamed, gathered, closed = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert not [output for output in [*opened, *closed] if output.get("name") != "stderr"]
    assert "".join(output.text for output in streamed if output.name == "stdout")
    (count,) = [output.data["text/plain"] for output in gathered if output.output_type == "execute_result"]
    assert count == "8"
