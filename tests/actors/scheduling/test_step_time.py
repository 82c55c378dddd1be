"""The one model of step time: what it learns from steps, what it forgets, and what it does not believe."""

import random

import numpy as np
import pytest

from genbatch.actors.scheduling.plan import COSTS, StepTime, StepTimeModel, StepWork
from genbatch.clients.plan.step_time import fit, least_squares

MACHINE = StepTime(base=3e-3, decode=8e-4, key=1e-7, prefill=6e-4, prefill_key=1e-7, prompt=2e-4, draft=7e-4)
ONE, EIGHT = StepWork(decodes=1, keys=300), StepWork(decodes=8, keys=8 * 300)
PROMPT = StepWork(decodes=8, keys=8 * 300, prompts=1, prefill=100, prefill_keys=100 * 250)


class Machine:
    """Steps whose time is known but for some noise."""

    def __init__(self, seed: int = 1, noise: float = 0.05) -> None:
        self.model = StepTimeModel()
        self.slower = 1.0  # how many times
        self._rng, self._noise = random.Random(seed), noise
        self.step(StepWork(decodes=1, keys=1))
        self.step(StepWork(prompts=1, prefill=32, prefill_keys=512))

    def step(self, work: StepWork, times: int = 1) -> None:
        for _ in range(times):
            chance = 1 + self._rng.gauss(0, self._noise)
            self.model.took(work, self.slower * MACHINE.seconds(work) * chance)

    def off(self, work: StepWork) -> float:
        """The prediction as a share of the truth."""
        assert self.model.time is not None
        return self.model.time.seconds(work) / (self.slower * MACHINE.seconds(work))


def test_before_a_step_was_seen_nothing_is_known_and_a_clock_that_stands_still_says_nothing() -> None:
    model = StepTimeModel()
    model.took(EIGHT, 0.0)
    assert model.time is None


def test_two_steps_at_load_tell_what_others_will_take() -> None:
    machine = Machine()
    assert all(0.75 < machine.off(work) < 1.3 for work in (ONE, EIGHT, PROMPT))


def test_mixed_steps_tell_the_costs_apart() -> None:
    machine, rng = Machine(), random.Random(2)
    for _ in range(400):
        decodes, prefill = rng.choice((1, 2, 8)), rng.choice((0, 0, 30, 100))
        keys = decodes * rng.randint(100, 500)
        machine.step(
            StepWork(decodes=decodes, keys=keys, prompts=prefill > 0, prefill=prefill, prefill_keys=prefill * 200)
        )
    assert all(0.9 < machine.off(work) < 1.1 for work in (ONE, EIGHT, PROMPT))


def test_thousands_of_decodes_do_not_make_it_forget_what_a_prompt_costs() -> None:
    machine = Machine()
    for _ in range(25):
        machine.step(EIGHT)
        machine.step(PROMPT)
    machine.step(EIGHT, 5000)
    assert 0.8 < machine.off(PROMPT) < 1.25


def test_an_outlier_changes_a_prediction_by_little() -> None:
    machine = Machine()
    machine.step(EIGHT, 50)
    before = machine.off(EIGHT)
    machine.model.took(EIGHT, 100 * MACHINE.seconds(EIGHT))
    assert before < machine.off(EIGHT) < 1.15 * before


@pytest.mark.parametrize("slower", [3.0, 1 / 3])
def test_a_machine_that_changes_its_pace_is_known_within_some_steps_for_prompts_too(slower: float) -> None:
    machine = Machine()
    for _ in range(25):
        machine.step(EIGHT)
        machine.step(PROMPT)
    machine.slower = slower
    machine.step(EIGHT, 30)
    assert 0.85 < machine.off(EIGHT) < 1.15
    assert 0.6 < machine.off(PROMPT) < 1.6


def test_a_cost_that_changes_by_itself_is_learned_again() -> None:
    machine = Machine()
    for _ in range(25):
        machine.step(EIGHT)
        machine.step(PROMPT)
    changed = StepTime(**{**{name: getattr(MACHINE, name) for name in COSTS}, "prefill": 4 * MACHINE.prefill})
    for _ in range(120):
        machine.model.took(EIGHT, MACHINE.seconds(EIGHT))
        machine.model.took(PROMPT, changed.seconds(PROMPT))
    assert machine.model.time is not None
    assert machine.model.time.seconds(PROMPT) == pytest.approx(changed.seconds(PROMPT), rel=0.15)
    assert 0.85 < machine.off(EIGHT) < 1.15


@pytest.mark.parametrize("seed", range(3))
def test_a_first_step_that_took_far_too_long_is_outlived_within_some_dozen_steps(seed: int) -> None:
    """The first step runs while the service still starts. Its excess must not lower the costs of tokens."""
    machine, rng = Machine(seed), random.Random(seed)
    machine.model = StepTimeModel()
    machine.model.took(StepWork(decodes=1, keys=1), 8 * MACHINE.seconds(StepWork(decodes=1, keys=1)))
    machine.step(StepWork(prompts=1, prefill=8, prefill_keys=32))
    machine.step(StepWork(prompts=4, prefill=472, prefill_keys=28e3))
    off = []
    for _ in range(90):
        prefill = rng.randint(5, 80)
        work = StepWork(decodes=24, keys=4e3, prompts=1, prefill=prefill, prefill_keys=prefill * 70)
        off.append(abs(machine.off(work) - 1))
        machine.step(work)
    assert sum(off[60:]) / 30 < 0.12  # otherwise a quarter


def test_no_cost_is_negative_however_odd_the_steps_are() -> None:
    model, rng = StepTimeModel(), random.Random(3)
    for _ in range(500):
        work = StepWork(decodes=rng.randint(0, 9), keys=rng.randint(0, 9000), prompts=1, prefill=rng.randint(1, 99))
        model.took(work, 10 ** rng.uniform(-5, 1))
        assert model.time is not None and min(getattr(model.time, cost) for cost in COSTS) > 0


def test_a_fit_finds_the_costs_exactly_where_nothing_is_left_to_chance() -> None:
    rng = random.Random(4)
    works = [
        StepWork(
            decodes=rng.randint(1, 9),
            keys=rng.randint(1, 9000),
            prompts=rng.randint(0, 3),
            prefill=rng.randint(0, 99),
            prefill_keys=rng.randint(0, 9999),
            drafted=rng.randint(0, 8),
        )
        for _ in range(20)
    ]
    found = fit([(work, MACHINE.seconds(work)) for work in works])
    assert [getattr(found, cost) for cost in COSTS] == pytest.approx([getattr(MACHINE, cost) for cost in COSTS])


def test_what_would_be_negative_is_left_out_and_the_rest_is_fitted_anew() -> None:
    # Least squares of both would give the second -1, and 3 to the first, which alone is nearest at 2.
    columns = np.array([[1.0, 1.0], [1.0, 1.0], [1.0, 2.0], [1.0, 0.0]])
    wanted = columns @ [3.0, -1.0]
    assert least_squares(columns, wanted) == pytest.approx([wanted.mean(), 0.0])
