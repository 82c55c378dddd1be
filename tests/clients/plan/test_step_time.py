"""The step time that a benchmark's report gives."""

import json
from pathlib import Path

import pytest

from genbatch.actors.scheduling.plan import COSTS, StepWork
from genbatch.clients.plan.step_time import StepTimeError, fit_step_time, read_step_time
from tests.clients.plan.measured import MACHINE, report


def test_the_fit_finds_the_machine_that_was_measured() -> None:
    fitted = fit_step_time(report())
    for name in ("base", "decode", "key", "prefill"):
        assert getattr(fitted.time, name) == pytest.approx(getattr(MACHINE, name), rel=0.03), name
    assert max(fitted.error) < 0.01
    work = StepWork(decodes=8, keys=4000, prefill=300, prefill_keys=300 * 150)
    assert fitted.time.seconds(work) == pytest.approx(MACHINE.seconds(work), rel=0.02)
    assert "at most" in fitted.describe()


def test_no_factor_is_negative_however_odd_the_figures_are() -> None:
    odd = report()
    for place, run in enumerate(odd["runs"]):
        run["decode_tok_s"] *= 1 + place % 3
        run["prefill_tok_s"] *= 3 - place % 3
    fitted = fit_step_time(odd)
    assert min(getattr(fitted.time, cost) for cost in COSTS) >= 0
    assert fitted.error[0] > 0.1


def test_a_run_without_a_decode_rate_still_tells_of_its_prefill() -> None:
    partial = report()
    partial["runs"][-1]["decode_tok_s"] = None
    assert fit_step_time(partial).time.prefill == pytest.approx(MACHINE.prefill, rel=0.1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no JSON"),
        ("[]", "not what `genbatch bench -w w5 --out` wrote"),
        ('{"runs": [{"workload": "W2 chat"}]}', "not what `genbatch bench -w w5"),
        ('{"runs": []}', "two batches and two contexts"),
        (json.dumps({"runs": report()["runs"][:1]}), "two batches and two contexts"),
    ],
)
def test_a_file_that_says_too_little_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "w5.json"
    path.write_text(text)
    with pytest.raises(StepTimeError, match=said):
        read_step_time(path)
    with pytest.raises(StepTimeError, match="No such file"):
        read_step_time(tmp_path / "missing.json")
