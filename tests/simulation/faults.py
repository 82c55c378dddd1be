"""Faults of a world, numbered by kind, so that a failing seed can be shrunk to a short script of them.

world = World(seed, model)
world.simulate()                                       # raises; world.faults.happened has the names, in order
world = World(seed, model, faults=Faults(["kill2"]))   # the same world, in which only the second kill happens
"""

from collections import Counter
from collections.abc import Callable, Sequence


class Faults:
    """Decides whether a fault that a world has drawn happens.

    Args:
        script: names of the faults that happen, such as "kill2"; None lets all of them happen.
    """

    def __init__(self, script: Sequence[str] | None = None) -> None:
        self.happened: list[str] = []
        self._script = script
        self._drawn: Counter[str] = Counter()

    def happens(self, kind: str) -> bool:
        """Count a drawn fault of this kind; return whether it happens."""
        self._drawn[kind] += 1
        name = f"{kind}{self._drawn[kind]}"
        if self._script is not None and name not in self._script:
            return False
        self.happened.append(name)
        return True


# Most worlds that are tried to shrink one script.
MAX_TRIES = 200


def shrink(script: Sequence[str], fails: Callable[[Sequence[str]], bool]) -> list[str]:
    """Return a part of a failing script that still fails, and of which each fault is needed.

    Leaves out runs of faults, of half the script's length at first and of one fault at last (ddmin).
    """
    left, tries = list(script), 0
    size = max(1, len(left) // 2)
    while left and tries < MAX_TRIES:
        shorter = None
        for start in range(0, len(left), size):
            candidate = left[:start] + left[start + size :]
            tries += 1
            if fails(candidate):
                shorter = candidate
                break
        if shorter is not None:
            left = shorter
            size = min(size, max(1, len(left) // 2))
        elif size == 1:
            break
        else:
            size //= 2
    return left
