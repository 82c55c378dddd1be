"""A child process that counts as an engine and loads nothing; `test_joint.py` ends it."""

from genbatch.actors.engine.child_process import ControlChannel, EngineReady, StartEngine, run_child
from genbatch.proto.service_messages import Models


def main() -> None:
    """As the engine's."""
    run_child(_serve)


async def _serve(channel: ControlChannel) -> None:
    while (message := await channel.receive()) is not None:
        if isinstance(message, StartEngine):
            await channel.send(EngineReady(Models(models=()), {}))
