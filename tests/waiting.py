"""Waiting beside a real engine: with sleeps, for who spins keeps Python's lock from the thread that computes."""

from collections.abc import Awaitable, Callable
from typing import Any

import trio

# Seconds that a test with a real engine may take on a machine that is busy with others; only what hangs reaches it.
ENGINE_PATIENCE_S = 300.0


async def a_moment() -> None:
    """Between two looks at what a real engine has done."""
    await trio.sleep(0.01)


async def until_idle(stats: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """The service's counters, once no request runs or waits."""
    while (now := await stats())["requests_running"] or now["requests_waiting"]:
        await a_moment()
    return now


async def received_until(stream: trio.abc.ReceiveStream, part: bytes) -> bytes:
    """What comes until these bytes have come; a stream may deliver them in any number of pieces."""
    received = b""
    while part not in received:
        data = await stream.receive_some(4096)
        assert data, f"the stream ended after {received!r}"
        received += data
    return received
