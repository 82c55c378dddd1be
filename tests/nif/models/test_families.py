"""The list of what runs natively."""

from pathlib import Path

from genbatch.nif.models.architectures import ARCHITECTURES
from genbatch.nif.models.families import families_markdown
from genbatch.nif.models.gguf_families import FAMILIES

GUIDE = Path(__file__).parents[3] / "docs" / "guide.md"


def test_the_guide_has_the_list_that_the_code_makes() -> None:
    assert families_markdown() in GUIDE.read_text(), "paste what `python -m genbatch.nif.models.families` prints"


def test_every_architecture_and_every_family_of_files_is_in_the_list() -> None:
    cells = [cell.strip() for line in families_markdown().splitlines() for cell in line.split("|")]
    assert all(f"`{kind.removesuffix('ForCausalLM')}`" in cells for kind in ARCHITECTURES)
    assert all(any(f"`{name}`" in cell for cell in cells) for name in FAMILIES)
