"""What to run where a library of an extra is missing: the libraries by name, as genbatch itself may be on no index."""

import re
import sys
from importlib.metadata import PackageNotFoundError, requires


def how_to_install(extra: str) -> str:
    """A command that installs what the extra needs into this Python.

    Args:
        extra: one of those in pyproject.toml, such as "http".
    """
    try:
        declared = requires("genbatch") or []
    except PackageNotFoundError:  # run from its sources
        declared = []
    of_extra = re.compile(rf"""extra\s*==\s*["']{re.escape(extra)}["']""")
    wanted = [entry.partition(";")[0].strip() for entry in declared if of_extra.search(entry)]
    names = " ".join(f"'{name.replace(' ', '')}'" for name in wanted) or f"'genbatch[{extra}]'"
    return f"run: {sys.executable} -m pip install {names}"
