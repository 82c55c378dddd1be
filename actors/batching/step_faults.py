"""StepFaults: who is to blame for a step that failed. A failed step leaves no trace, so parts of it can be tried again.

    for part in faults.parts(batch, error): ...     # halves, until what fails stands alone
    faults.succeeded()                              # of a part
    for planned, error in faults.verdict(): ...     # at the end of the tick: these fail, the others went through

When nothing goes through, no request is to blame: the engine is, and only a new one helps. Out of memory is the
engine's too, unless it suffices to free what is held in reserve and to try halves.
"""

import gc

import torch

from genbatch.actors.batching.sequence import Sequence
from genbatch.actors.batching.step import Planned
from genbatch.actors.batching.swap import SwapFault

# Requests that may fail one after another, each alone in its step, before the engine is to blame.
MAX_LONE_FAULTS = 3


class EngineFault(Exception):
    """No request can be blamed for steps that fail: the engine must be started anew."""


class StepFaults:
    """The faults of a tick, and the memory of those before."""

    def __init__(self) -> None:
        self._alone: list[tuple[Planned, Exception]] = []
        self._went_through = False  # a part, since the first fault of this tick
        self._is_short = False  # of memory, and has been told to free what it can
        self._lone_faults = 0

    def parts(self, batch: list[Planned], error: BaseException) -> list[list[Planned]]:
        """What to try in the place of a batch that failed; nothing where it stands alone.

        Raises:
            EngineFault: the error shows that the engine cannot go on.
        """
        if not isinstance(error, Exception) or isinstance(error, SwapFault):
            raise EngineFault(f"the engine cannot go on after {error!r}") from error
        if is_out_of_memory(error):
            if self._is_short:
                raise EngineFault(f"half a step is out of memory, too: {error}") from error
            self._is_short = True
            return _halves(batch) if len(batch) > 1 else [batch]
        if len(batch) > 1:
            return _halves(batch)
        self._alone.append((batch[0], error))
        return []

    @property
    def frees_memory(self) -> bool:
        """Whether `free_memory` is to run before the parts."""
        return self._is_short

    def succeeded(self) -> None:
        """A batch or a part has been evaluated."""
        self._went_through = True
        self._lone_faults = 0

    def verdict(self) -> list[tuple[Planned, Exception]]:
        """The tick is over: who fails, and why.

        Raises:
            EngineFault: nobody's step succeeds.
        """
        alone, self._alone = self._alone, []
        went_through, self._went_through, self._is_short = self._went_through, False, False
        if not alone or went_through:
            return alone
        self._lone_faults += 1
        owners = {id(p.owner.request) if isinstance(p.owner, Sequence) else id(p.owner) for p, _ in alone}
        if len(owners) > 1 or self._lone_faults >= MAX_LONE_FAULTS:
            error = alone[0][1]
            raise EngineFault(f"no request's step succeeds: {error}") from error
        return alone


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it is the machine's or the device's memory that does not suffice."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError)


def free_memory() -> None:
    """Gives back what is held in reserve; for the model's thread."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _halves(batch: list[Planned]) -> list[list[Planned]]:
    half = len(batch) // 2
    return [batch[:half], batch[half:]]
