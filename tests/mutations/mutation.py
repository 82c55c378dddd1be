"""Mutation: a guard taken out of the source, and the tests that must turn red without it."""

from dataclasses import dataclass
from pathlib import Path


class DoesNotApply(Exception):
    """The old text is not in the file exactly once."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One guard.

    Args:
        name: of the guard.
        file: below the repository's root.
        old, new: the text to replace, which is there exactly once, and what replaces it.
        tests: below tests/, as pytest names them; one that turns red is enough.
        why: what goes wrong without it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str

    def apply(self, root: Path) -> str:
        """Takes the guard out of the copy at `root`; returns the file's text as it was.

        Raises:
            DoesNotApply: the source has changed.
        """
        path = root / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise DoesNotApply(f"{self.name}: {self.file} has {self.old!r} {text.count(self.old)} times, not once")
        path.write_text(text.replace(self.old, self.new))
        return text
