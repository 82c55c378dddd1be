"""Step time: what one forward costs, learned from the forwards that were made.

    times = StepTimeModel()
    times.took(StepWork(decodes=1, keys=300), 0.004)      # a step has ended
    times.time.seconds(StepWork(decodes=8, keys=2400))    # what a step of eight will take

A step costs a base, something for each sequence that decodes and for each key it reads, and something for each prompt,
for each of its tokens, and for each key that these tokens read. A drafted token costs a row, too:

    seconds = base + decode * decodes + key * keys + prompt * prompts + prefill * tokens + prefill_key * keys of prompts
              + draft * drafted

The token budget of a step, the price of a draft and the simulated fleet of `genbatch plan` all ask this one model. A
running service learns it step by step (`StepTimeModel`); measurements of a benchmark are fitted at once (`fit`). Both
look for the costs with the least squares of the relative errors, and no cost is negative.
"""

from collections.abc import Sequence
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from genbatch.actors.scheduling.plan import COSTS, StepTime, StepWork

Vector = NDArray[np.float64]


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


# The assumed costs before any was seen, as shares of the first step's seconds. A row of weights is read once a step,
# so most of a small step is its base. A key is a 10,000th of the weights of a small model, and less of a large one. The
# tokens of a prompt share the reading of a key.
_FIRST_SHARES = np.array([0.85, 0.08, 1e-4, 0.05, 0.08, 3e-5, 0.08])
# How wrong these may be: each by itself, those of a row (decoded, prefilled, drafted) together, and all together.
_FIRST_DOUBT, _ROW_DOUBT, _PACE_DOUBT = 1.0, 4.0, 2.0
_ROWS = np.array([0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0])
# From one step to the next the machine's pace, which changes all costs together, and each cost by itself change by so
# much. The first is a machine that slows down; the second lets old steps be forgotten slowly. With a larger first one a
# long prompt, each chunk of which reads more keys than the one before, is taken for a machine that slows down.
_PACE, _DRIFT = 0.02, 0.005
# A cost counts as at least this for its drift and its doubt. A first step that took too long brings other costs down
# to nearly nothing; a share of nothing would keep them there.
_NOTHING = 0.1
# The random error of a step's time: its first value, the bounds of the learned value, and the weight of each step.
_CHANCE, _LEAST_CHANCE, _MOST_CHANCE, _NEWEST = 0.05, 0.01, 0.2, 0.05
# The deviation beyond which a step counts no more than at it: an outlier.
_OUTLIER = 2.5
# How much less sure an outlier makes of the costs that it depends on: if it is the first step of a change, the next
# steps count for more.
_UNSURE = 0.5
# The most doubt of a cost that was not seen for long.
_MOST_DOUBT = 4.0
# The least a cost comes down to, as a share of what was assumed first: it can grow again from there.
_LEAST = 1e-3


class StepTimeModel:
    """Learns the costs from step to step; a Kalman filter over them.

    One thread tells it of steps; any thread may read `time`.

    The filter knows how sure it is of each cost. A step changes the costs that it depends on and that are unsure, and
    leaves the others: thousands of steps without a prompt do not make it forget what a prompt costs. The machine's
    pace is part of every cost, so a slower machine is known for prompts as soon as decodes take longer.
    """

    def __init__(self) -> None:
        self.time: StepTime | None = None  # None until a first step was seen
        self._units: Vector = np.zeros(len(COSTS))  # what was assumed first, in seconds; the costs are counted in these
        self._costs: Vector = np.ones(len(COSTS))
        self._doubt: Vector = np.zeros((len(COSTS), len(COSTS)))  # their covariance
        self._chance = _CHANCE**2  # the variance of a step's time, as a share of it

    def took(self, work: StepWork, seconds: float) -> None:
        """Learn from a step and its seconds; a step of no time is ignored."""
        if seconds <= 0:
            return
        row = np.array(work.row(), float)
        if self.time is None:
            self._units = _FIRST_SHARES * (seconds / float(_FIRST_SHARES @ row))
            self._doubt = _FIRST_DOUBT**2 * np.eye(len(COSTS)) + _PACE_DOUBT**2 * np.ones_like(self._doubt)
            self._doubt += _ROW_DOUBT**2 * np.outer(_ROWS, _ROWS)
        self._learn(row * self._units, seconds)
        self.time = StepTime(**dict(zip(COSTS, (self._costs * self._units).tolist(), strict=True)))

    def _learn(self, row: Vector, seconds: float) -> None:
        costs, doubt = self._costs, self._doubt
        doubt += _PACE**2 * np.outer(costs, costs)
        doubt.flat[:: len(COSTS) + 1] += (_DRIFT * np.maximum(costs, _NOTHING)) ** 2
        self._cap()
        expected = float(row @ costs)
        towards = doubt @ row
        variance = max(float(row @ towards), 0.0) + self._chance * expected**2
        surprise = seconds - expected
        most = _OUTLIER * sqrt(variance)
        self._costs = np.maximum(costs + towards * (min(max(surprise, -most), most) / variance), _LEAST)
        if abs(surprise) < most:
            doubt -= np.outer(towards, towards) / variance
        else:
            doubt += np.outer(towards, towards) * (_UNSURE / variance)
        newest = min(max((surprise / expected) ** 2, _LEAST_CHANCE**2), _MOST_CHANCE**2)
        self._chance += _NEWEST * (newest - self._chance)

    def _cap(self) -> None:
        """Bound the doubts of costs that are not seen, which grow with every step."""
        most = _MOST_DOUBT * np.maximum(self._costs, _NOTHING)
        too_much = np.sqrt(np.maximum(self._doubt.diagonal() / most**2, 1.0))
        if (too_much > 1.0).any():
            self._doubt /= np.outer(too_much, too_much)
