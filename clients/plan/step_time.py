"""StepTime: how long a step takes, fitted to what `genbatch bench -w w5` measured.

    genbatch bench -w w5 --batch 1 --batch 4 --batch 16 --out w5.json
    model = fit_step_time(json.loads(Path("w5.json").read_text()))
    model.seconds(StepWork(decodes=16, keys=16 * 500))

A step costs a base, something for each sequence that decodes and for each key it reads, and something for each prompt
token and for each key that prompt tokens read:

    seconds = base + decode * sequences + key * keys + prefill * tokens + prefill_key * keys of prompts

No factor is negative. They are found by least squares of the relative errors, first the decode's, then the prefill's.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Prompt tokens that a service takes into one step, by default.
STEP_TOKENS = 512


class StepTimeError(Exception):
    """A file of measurements from which no step time follows; the message says what it lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What one step does.

    Args:
        decodes: sequences that get one token each.
        keys: positions that those read, all together.
        prefill: prompt tokens.
        prefill_keys: positions that those read, all together.
    """

    decodes: int = 0
    keys: float = 0.0
    prefill: int = 0
    prefill_keys: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step, see the module's docstring.

    Args:
        error: the largest relative error at the measured points, of a decode step and of a prefill.
    """

    base: float
    decode: float
    key: float
    prefill: float
    prefill_key: float
    error: tuple[float, float] = (0.0, 0.0)

    def seconds(self, work: StepWork) -> float:
        """Of one step."""
        return (
            self.base
            + self.decode * work.decodes
            + self.key * work.keys
            + self.prefill * work.prefill
            + self.prefill_key * work.prefill_keys
        )

    def describe(self) -> str:
        """One line for people."""
        return (
            f"step: {1e3 * self.base:.2f} ms + {1e3 * self.decode:.3f} ms a sequence + {1e6 * self.key:.3f} us a key, "
            f"{1e3 * self.prefill:.3f} ms + {1e6 * self.prefill_key:.3f} us a key for a prompt token; where it was "
            f"measured a step is at most {100 * self.error[0]:.0f} % off, a prefill {100 * self.error[1]:.0f} %"
        )


def read_step_time(path: Path) -> StepTime:
    """The model fitted to a file that `genbatch bench -w w5 --out` wrote.

    Raises:
        StepTimeError: the file is not such a report, or has too few runs.
    """
    try:
        report = json.loads(path.read_text())
    except OSError as error:
        raise StepTimeError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise StepTimeError(f"{path}: no JSON: {error}") from error
    try:
        return fit_step_time(report)
    except StepTimeError as error:
        raise StepTimeError(f"{path}: {error}") from error


def fit_step_time(report: Mapping[str, Any]) -> StepTime:
    """The model that comes nearest to a report of W5's runs.

    Raises:
        StepTimeError: too few runs.
    """
    try:
        runs = [_Run.of(run) for run in report["runs"]]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise StepTimeError("not what `genbatch bench -w w5 --out` wrote") from error
    decodes = [run for run in runs if run.step_s is not None]
    if len({run.batch for run in decodes}) < 2 or len({run.context for run in runs}) < 2:
        raise StepTimeError("needs W5 with two batches and two contexts at least; give --batch and --context again")
    steps = np.array([run.step_s for run in decodes])
    shapes = np.array([[1.0, run.batch, run.batch * run.mean_context] for run in decodes])
    base, decode, key = _no_negative(shapes / steps[:, None], np.ones(len(decodes)))
    # A prompt is evaluated in steps of 512 tokens, each with its base; what decodes beside them is paid already.
    prefills = np.array([run.prefill_s for run in runs])
    work = np.array([[run.tokens, run.tokens * run.context / 2] for run in runs])
    rest = prefills - base * np.array([-(-run.tokens // STEP_TOKENS) for run in runs])
    rest -= np.array([run.decoded_meanwhile for run in runs]) * decode
    rest = np.maximum(rest, 0.05 * prefills)
    prefill, prefill_key = _no_negative(work / prefills[:, None], rest / prefills)
    decode_off = np.abs(shapes @ [base, decode, key] / steps - 1)
    prefill_off = np.abs(work @ [prefill, prefill_key] - rest) / prefills
    return StepTime(
        base=base,
        decode=decode,
        key=key,
        prefill=prefill,
        prefill_key=prefill_key,
        error=(float(decode_off.max()), float(prefill_off.max())),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """One fixed batch: what was measured."""

    batch: int
    context: float
    output: float
    prefill_s: float
    step_s: float | None  # with all of them decoding; None where there was no such time

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
    def mean_context(self) -> float:
        return self.context + self.output / 2

    @property
    def decoded_meanwhile(self) -> float:
        """Tokens that the first of them got while the last ones were prefilled."""
        return self.batch * (self.tokens // STEP_TOKENS) / 2


def _no_negative(columns: "np.ndarray[Any, Any]", wanted: "np.ndarray[Any, Any]") -> Sequence[float]:
    """Least squares with no factor below 0: a column with a negative one is taken out, and the rest fitted anew."""
    kept = list(range(columns.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(columns[:, kept], wanted, rcond=None)
        if (found >= 0).all() or len(kept) == 1:
            factors = [0.0] * columns.shape[1]
            for place, factor in zip(kept, found, strict=True):
                factors[place] = max(0.0, float(factor))
            return factors
        del kept[int(found.argmin())]
