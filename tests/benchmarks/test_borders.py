"""The benchmark of borders: its clocks sit on functions that exist, and its table is the way of each request."""

from importlib import import_module

from tests.benchmarks.border_clocks import BORDERS
from tests.benchmarks.borders import ORDER, READ, SENT, table, way


def test_every_clock_sits_on_a_function_that_exists_and_has_a_place_in_the_order() -> None:
    for name, places in BORDERS.items():
        for function, *borders in places:
            owner, _, method = function.partition(".")
            assert callable(getattr(getattr(import_module(name), owner), method))
            assert {border for border in borders if border} <= {*ORDER}


def test_the_way_of_a_request_is_the_first_crossing_of_each_border_after_the_last() -> None:
    crossed = [(0.5, "request read"), (1.1, "request read"), (1.2, "worker awake"), (1.0, "worker awake")]
    clock = way({SENT: 1.0, READ: 2.0}, sorted(crossed))
    assert clock == {SENT: 1.0, "request read": 1.1, "worker awake": 1.2, READ: 2.0}


def test_the_table_has_medians_of_the_later_requests_and_the_first_one_beside_them() -> None:
    def request(start: float, forward_s: float) -> dict[str, float]:
        drawn = start + 0.001 + forward_s
        return {SENT: start, "worker awake": start + 0.001, "first token drawn": drawn, READ: drawn + 0.002}

    lines = table([request(0.0, 0.1), request(1.0, 0.004), request(2.0, 0.005), request(3.0, 0.006)])
    assert "| first token drawn | 5.00 | 100.00 |" in lines
    assert "| **all** | 8.00 | 103.00 |" in lines
    assert "| **beside the forward** | 3.00 | 3.00 |" in lines
