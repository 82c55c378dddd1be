"""What is said where a library of an extra is missing: a command that works where genbatch is on no index."""

import sys
import tomllib
from pathlib import Path

import pytest

from genbatch.nif import errors
from genbatch.nif.errors import how_to_install

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"]))
def test_the_command_names_each_library_of_the_extra(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = [f'{name}; extra == "{extra}"' for name in PROJECT["optional-dependencies"][extra]]
    monkeypatch.setattr(errors, "requires", lambda _: ["torch", *declared, 'other; extra == "others"'])
    command = how_to_install(extra)
    assert command.startswith(f"run: {sys.executable} -m pip install '")
    for library in PROJECT["optional-dependencies"][extra]:
        assert f"'{library.replace(' ', '')}'" in command
    assert "torch" not in command and "other" not in command
