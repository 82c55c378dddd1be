"""A pytest plugin for `gpu.py`: reports each test as a case; a file whose tests are all skipped has failed."""

import os
from collections import Counter
from typing import Any

import pytest
from gpu_events import IS_DRY, done, report

# The tool that this process runs under, if it is one: the same test is another case then.
_UNDER = f"{os.environ['GPU_TOOL']}: " if "GPU_TOOL" in os.environ else ""
_outcomes: dict[str, Counter[str]] = {}  # by file
_reasons: dict[str, str] = {}  # by file, why its last skipped test was skipped


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests that ended before."""
    ended = done()
    gone = [item for item in items if _UNDER + item.nodeid in ended]
    items[:] = [item for item in items if _UNDER + item.nodeid not in ended]
    config.hook.pytest_deselected(items=gone)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported, or skips itself as a whole, has failed."""
    if report.outcome != "passed":
        _report("failed", report.nodeid, note=f"not collected: {report.longrepr}"[-1500:])


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    _report("begin", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = report.nodeid.split("::")[0]
    counts = _outcomes.setdefault(file, Counter())
    if report.failed:
        counts["failed"] += 1
        _report("failed", report.nodeid, note=report.longreprtext[-1500:])
        if "CUDA error" in report.longreprtext:
            os._exit(9)  # the device's context is lost for all tests of this process; the next process has a new one
    elif report.skipped:
        counts["skipped"] += 1
        _reasons[file] = report.longreprtext
    elif report.when == "call":
        counts["passed"] += 1
    if report.when == "teardown":
        _report("end", report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    for file, counts in _outcomes.items():
        figure = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        _report("figure", file, figure=figure)
        # Without a GPU, the tests that need one are skipped; a dry run is there for all that comes before.
        began_before = any(case.startswith(f"{_UNDER}{file}::") for case in done())
        if set(counts) == {"skipped"} and not IS_DRY and not began_before:
            _report("failed", file, note=f"all of its tests were skipped: {_reasons[file]}")
    if exitstatus in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.OK  # each failure has been reported


def _report(event: str, case: str, **fields: Any) -> None:
    report(event, _UNDER + case, **fields)
