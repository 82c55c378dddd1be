"""A child process that hears nobody any more; `test_child_process.py` looks at its end."""

import time

from genbatch.actors.engine.child_process import ControlChannel, run_child


def main() -> None:
    """As the engine's and a gateway's do."""
    run_child(_stuck)


async def _stuck(channel: ControlChannel) -> None:
    time.sleep(600)  # noqa: ASYNC251
