"""The step time of a machine, from the report of a benchmark that `genbatch bench -w w5` wrote.

    genbatch bench -w w5 --batch 1 --batch 4 --batch 16 --out w5.json
    measured = fit_step_time(json.loads(Path("w5.json").read_text()))
    measured.time.seconds(StepWork(decodes=16, keys=16 * 500))

A running service learns the same costs step by step (`StepTimeModel`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genbatch.actors.scheduling.plan import COSTS, StepTime, StepWork

Vector = NDArray[np.float64]

# The default number of prompt tokens in one step while no sequence decodes.
STEP_TOKENS = 512


class StepTimeError(Exception):
    """A file of measurements from which no step time follows; the message says what it lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStepTime:
    """A step time that was fitted to measurements.

    Args:
        time: the costs.
        error: the largest relative errors at the measured points, for decode steps and for prefills.
    """

    time: StepTime
    error: tuple[float, float]

    def describe(self) -> str:
        """Describe the fit in one line."""
        time = self.time
        return (
            f"step: {1e3 * time.base:.2f} ms + {1e3 * time.decode:.3f} ms a sequence + {1e6 * time.key:.3f} us a key, "
            f"{1e3 * time.prefill:.3f} ms + {1e6 * time.prefill_key:.3f} us a key for a prompt token; where it was "
            f"measured a step is at most {100 * self.error[0]:.0f} % off, a prefill {100 * self.error[1]:.0f} %"
        )


def read_step_time(path: Path) -> MeasuredStepTime:
    """Fit the model to a file that `genbatch bench -w w5 --out` wrote.

    Raises:
        StepTimeError: the file is no such report, or has too few runs.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise StepTimeError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise StepTimeError(f"{path}: no JSON: {error}") from error
    try:
        return fit_step_time(report)
    except StepTimeError as error:
        raise StepTimeError(f"{path}: {error}") from error


def fit_step_time(report: Mapping[str, Any]) -> MeasuredStepTime:
    """Fit the model to a report of W5's runs.

    Raises:
        StepTimeError: the report has too few runs.
    """
    try:
        runs = [_Run.of(run) for run in report["runs"]]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise StepTimeError("not what `genbatch bench -w w5 --out` wrote") from error
    decodes = [(run.decode_work, run.step_s) for run in runs if run.step_s is not None]
    if len({work.decodes for work, _ in decodes}) < 2 or len({run.context for run in runs}) < 2:
        raise StepTimeError("needs W5 with two batches and two contexts at least; give --batch and --context again")
    prefills = [(run.prefill_work, run.prefill_s) for run in runs]
    time = fit([*decodes, *prefills])
    return MeasuredStepTime(time=time, error=(_largest_error(time, decodes), _largest_error(time, prefills)))


def _largest_error(time: StepTime, measured: list[tuple[StepWork, float]]) -> float:
    return max(abs(time.seconds(work) / seconds - 1) for work, seconds in measured)


@dataclass(frozen=True, slots=True)
class _Run:
    """The measurements of one fixed batch."""

    batch: int
    context: float
    output: float
    prefill_s: float
    step_s: float | None  # while all sequences decode; None if there was no such time

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> "_Run":
        batch = int(run["num_prompts"])
        tokens = float(run["total_input_tokens"] - run["cached_tokens"])
        rate = run["decode_tok_s"]
        return cls(
            batch,
            tokens / batch,
            run["total_output_tokens"] / batch,
            tokens / float(run["prefill_tok_s"]),
            None if not rate else batch / float(rate),
        )

    @property
    def tokens(self) -> float:
        return self.batch * self.context

    @property
    def decode_work(self) -> StepWork:
        """Return the work of one step in the middle of the run, in which all sequences decode."""
        return StepWork(decodes=self.batch, keys=self.batch * (self.context + self.output / 2))

    @property
    def prefill_work(self) -> StepWork:
        """Return the work of the prompts in steps of 512 tokens; the first sequences decode during the last prompts."""
        meanwhile = self.batch * (self.tokens // STEP_TOKENS) / 2
        return StepWork(
            steps=-(-self.tokens // STEP_TOKENS),
            decodes=meanwhile,
            prefill=self.tokens,
            prefill_keys=self.tokens * self.context / 2,
        )


def fit(measured: Sequence[tuple[StepWork, float]]) -> StepTime:
    """Return the costs that come nearest to measurements, which are enough to tell the costs apart."""
    seconds = np.array([taken for _, taken in measured])
    rows = np.array([work.row() for work, _ in measured], float) / seconds[:, None]
    costs = least_squares(rows, np.ones(len(measured)))
    return StepTime(**dict(zip(COSTS, costs, strict=True)))


def least_squares(columns: Vector, targets: Vector) -> list[float]:
    """Return the least squares with no factor below 0: drop a column with a negative factor, and fit the rest anew."""
    kept = [place for place in range(columns.shape[1]) if columns[:, place].any()]
    sizes = np.abs(columns).max(axis=0)
    factors = [0.0] * columns.shape[1]
    while kept:
        solution, *_ = np.linalg.lstsq(columns[:, kept] / sizes[kept], targets, rcond=None)
        if (solution >= 0).all() or len(kept) == 1:
            for place, factor in zip(kept, solution, strict=True):
                factors[place] = max(0.0, float(factor / sizes[place]))
            break
        del kept[int(solution.argmin())]
    return factors
