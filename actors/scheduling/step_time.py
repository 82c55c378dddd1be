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


# The prior: assumed costs before the first step, as shares of that step's seconds. A row of weights is read
# once a step, so most of a small step is its base. A key is a 10,000th of the weights of a small model, and less of a
# large one. The tokens of a prompt share the reading of a key.
_PRIOR = np.array([0.85, 0.08, 1e-4, 0.05, 0.08, 3e-5, 0.08])
# The standard deviations of the prior: of each cost alone, of the costs of a row (decoded, prefilled or drafted)
# together, and of all costs together.
_PRIOR_ERROR, _ROW_ERROR, _PACE_ERROR = 1.0, 4.0, 2.0
_ROWS = np.array([0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0])
# Process noise, as standard deviations per step: of the machine's pace, which changes all costs together, and of each
# cost alone. The pace lets the model follow a machine that slows down, and the drift lets it forget old steps slowly.
# With more noise of the pace, a long prompt would look like a slower machine, since each chunk reads more keys.
_PACE, _DRIFT = 0.02, 0.005
# The least cost that scales a cost's drift and error. A first step that took too long brings other costs down to nearly
# nothing, and without this bound they would stay there.
_LEAST_SCALE = 0.1
# Measurement noise, as a standard deviation relative to a step's time: its first value, the bounds of the learned
# value, and the weight of the newest step.
_NOISE, _LEAST_NOISE, _MOST_NOISE, _NEWEST = 0.05, 0.01, 0.2, 0.05
# An innovation above this many standard deviations is an outlier, and is cut to it.
_OUTLIER = 2.5
# The share by which an outlier adds to the covariance of its costs. If it is the first step of a change, the next steps
# then count for more.
_OUTLIER_SHARE = 0.5
# The largest standard deviation of a cost that was not measured for long.
_MOST_ERROR = 4.0
# The least value of a cost, as a share of the prior: a cost can grow again from there.
_LEAST = 1e-3


class StepTimeModel:
    """Learns the costs from step to step with a Kalman filter.

    One thread calls `took`; any thread may read `time`.

    The covariance says how uncertain each cost is. A step corrects the uncertain costs of its work, and leaves the
    others: thousands of steps without a prompt do not make the filter forget the cost of a prompt. The machine's pace
    is part of every cost, so slower decodes raise the expected cost of prompts at once.
    """

    def __init__(self) -> None:
        self.time: StepTime | None = None  # None until the first step
        self._units: Vector = np.zeros(len(COSTS))  # the prior in seconds: the unit of each cost
        self._costs: Vector = np.ones(len(COSTS))
        self._covariance: Vector = np.zeros((len(COSTS), len(COSTS)))  # of the costs
        self._noise = _NOISE**2  # the variance of a step's time, relative to its square

    def took(self, work: StepWork, seconds: float) -> None:
        """Learn from a step and its seconds; a step of no time is ignored."""
        if seconds <= 0:
            return
        row = np.array(work.row(), float)
        if self.time is None:
            self._units = _PRIOR * (seconds / float(_PRIOR @ row))
            self._covariance = _PRIOR_ERROR**2 * np.eye(len(COSTS)) + _PACE_ERROR**2 * np.ones_like(self._covariance)
            self._covariance += _ROW_ERROR**2 * np.outer(_ROWS, _ROWS)
        self._learn(row * self._units, seconds)
        self.time = StepTime(**dict(zip(COSTS, (self._costs * self._units).tolist(), strict=True)))

    def _learn(self, row: Vector, seconds: float) -> None:
        costs, covariance = self._costs, self._covariance
        covariance += _PACE**2 * np.outer(costs, costs)
        covariance.flat[:: len(COSTS) + 1] += (_DRIFT * np.maximum(costs, _LEAST_SCALE)) ** 2
        self._cap()
        expected = float(row @ costs)
        projected = covariance @ row
        variance = max(float(row @ projected), 0.0) + self._noise * expected**2
        innovation = seconds - expected
        most = _OUTLIER * sqrt(variance)
        self._costs = np.maximum(costs + projected * (min(max(innovation, -most), most) / variance), _LEAST)
        if abs(innovation) < most:
            covariance -= np.outer(projected, projected) / variance
        else:
            covariance += np.outer(projected, projected) * (_OUTLIER_SHARE / variance)
        newest = min(max((innovation / expected) ** 2, _LEAST_NOISE**2), _MOST_NOISE**2)
        self._noise += _NEWEST * (newest - self._noise)

    def _cap(self) -> None:
        """Bound the covariance of costs that are not measured, which grows with every step."""
        most = _MOST_ERROR * np.maximum(self._costs, _LEAST_SCALE)
        too_much = np.sqrt(np.maximum(self._covariance.diagonal() / most**2, 1.0))
        if (too_much > 1.0).any():
            self._covariance /= np.outer(too_much, too_much)
