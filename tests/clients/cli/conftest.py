"""What all tests of commands share."""

import pytest


@pytest.fixture(autouse=True)
def _each_test_has_its_own_logging(logging_restored: None) -> None:
    """Commands set up the logging of the process that they run in."""
