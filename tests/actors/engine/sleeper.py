"""A child process that does nothing; `test_child_process.py` ends it."""

import time


def main() -> None:
    """Sleeps."""
    time.sleep(600)
