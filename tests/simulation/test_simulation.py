"""A few of the worlds that `make sim` runs by the thousand."""

from collections.abc import Callable

import pytest
import torch

from genbatch.actors.engine.ledger import Entry, Ledger
from genbatch.nif.models.model import Model
from tests.simulation.history_runner import HistoryRunner
from tests.simulation.world import simulate

TinyModel = Callable[[str], Model]
SEEDS = 48


@pytest.fixture
def model(tiny_model: TinyModel) -> Model:
    torch.set_num_threads(1)
    return tiny_model("llama")


@pytest.mark.parametrize("first", range(0, SEEDS, 8))
def test_every_promise_holds_in_worlds_full_of_faults(model: Model, first: int) -> None:
    for seed in range(first, first + 8):
        try:
            simulate(seed, model)
        except BaseException as error:
            error.add_note(f"replay: python -m tests.simulation --first {seed} --seeds 1 --trace")
            raise


def test_a_seed_gives_the_same_world_again(model: Model) -> None:
    assert simulate(7, model) == simulate(7, model)
    assert simulate(7, model) != simulate(8, model)


def fails(model: Model) -> bool:
    for seed in range(14, SEEDS):  # the first of them has many deaths
        try:
            simulate(seed, model)
        except BaseException:
            return True
    return False


def test_a_block_that_is_not_copied_before_it_is_written_is_noticed(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HistoryRunner, "copy_blocks", lambda self, group, pairs: None)
    assert fails(model)


def test_a_request_that_is_forgotten_when_its_engine_dies_is_noticed(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose = Ledger.lose

    def forgetful(self: Ledger, now: float) -> list[tuple[Entry, Exception]]:
        return lose(self, now)[1:]

    monkeypatch.setattr(Ledger, "lose", forgetful)
    assert fails(model)
