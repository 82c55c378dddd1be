"""RunAhead: decode steps that follow one another on the model's thread, while the event loop hands out the tokens.

While requests only decode there is nothing to decide between two steps: the plan would be the same again. So the
model's thread goes on by itself with the tokens it drew and tells of each step as it ends. It stays at most one step
ahead of what the event loop has handed out; a sequence that turns out to have ended is computed once more in vain, and
its blocks are freed when the run has ended. A run ends at the first end of a sequence that is known beforehand, when
it is asked to, when the pool has no block for its next step, and when a constraint takes long to follow.

Where the device takes steps without being waited for, one more is under way by then (`OverlappedRun`): it is the run's
last, or waited for and undone before anything is freed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from genbatch.actors.batching.sequence import Sequence
from genbatch.actors.batching.step import Planned
from genbatch.actors.batching.swap import run_copies
from genbatch.nif.context import Context
from genbatch.nif.decode_run import DecodeRun
from genbatch.nif.errors import DeviceFault
from genbatch.nif.overlapped_run import OverlappedRun
from genbatch.nif.sampling.sampler import Sampled, SampleFault, SamplerState

# Most steps of a run: then a plan is made all the same.
MAX_STEPS = 64

Drawn: TypeAlias = list[Sampled | SampleFault]


@dataclass(frozen=True, slots=True)
class Decoded:
    """A step of a run has ended, and the next one has begun."""

    run: "RunAhead"
    drawn: Drawn


class RunAhead:
    """One run. `evaluate` is for the model's thread, everything else for the event loop's.

    Args:
        batch: an entry of one token for each sequence that runs; every one of them draws.
        max_steps: most steps, see `steps_ahead`.
        tell: called on the model's thread with each step but the last.
    """

    def __init__(self, batch: list[Planned], max_steps: int, tell: Callable[[Decoded], None]) -> None:
        self.batch = batch
        self._max_steps = max_steps
        self._tell = tell
        # Each is written by one thread and read by the other; what is read too old costs or saves one step.
        self._stopping = False
        self._booked = 0

    def stop(self) -> None:
        """Asks for a plan: the run ends with the step that is under way, or has begun after it by then."""
        self._stopping = True

    def booked(self) -> None:
        """One more step's tokens are handed out."""
        self._booked += 1

    def evaluate(self, context: Context, copies: list[Callable[[], None]]) -> Drawn | None:
        """Runs to the end and returns what the last step drew; None if that was told already.

        Raises:
            DeviceFault: the device failed, and the context with it.
            Exception: what the first step raised; it left no trace.
        """
        run_copies(copies)
        samplers = [planned.owner.sampler for planned in self.batch if isinstance(planned.owner, Sequence)]
        run = context.decode_run([planned.entry for planned in self.batch], samplers, max_steps=self._max_steps)
        try:
            return self._decode(run, samplers)
        finally:
            run.close()

    def _decode(self, run: DecodeRun | OverlappedRun, samplers: list[SamplerState]) -> Drawn | None:
        steps, ends = 0, False
        while True:
            try:
                drawn = run.step(ahead=not ends)
            except DeviceFault:
                raise
            except Exception:
                if steps == 0:
                    raise
                return None  # the next plan meets the same and has the means to deal with it
            steps += 1
            whole = True
            for sampler, draw in zip(samplers, drawn, strict=True):
                if isinstance(draw, Sampled):
                    sampler.accept(draw.token_id)
                    whole = whole and not sampler.is_slow
                else:
                    whole = False
            ends = ends or self._stopping or self._booked < steps - 1
            if not whole or steps == self._max_steps or (ends and not run.is_ahead):
                return drawn
            self._tell(Decoded(self, drawn))


def steps_ahead(batch: list[Planned]) -> int:
    """How many steps may follow one another without a plan: until a sequence reaches the most it may generate.

    1 if the batch holds anything but plain decodes.
    """
    most = MAX_STEPS
    for planned in batch:
        owner = planned.owner
        if not isinstance(owner, Sequence) or not planned.draws or len(planned.entry.tokens) != 1:
            return 1
        if owner.beams is not None or owner.sampler.constraint is not None:
            return 1  # beams choose together; what a constraint allows may still be being worked out
        if owner.request.keep is not None and owner.request.keep.generation:
            return 1
        most = min(most, owner.max_new_tokens - owner.num_generated)
    return max(1, most)
