"""Probe: an actor for tests, which runs the functions it is sent; and callers for it."""

import gc
from typing import Any

import trio

from genbatch.actors.runtime.actor import NOREPLY, ActorRef, Down, From, GenServer, Monitor, Reason, Timer
from genbatch.actors.runtime.telemetry import Telemetry


class Probe(GenServer):
    """Runs the functions it is sent, and writes down what else happens to it."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.held: list[From[Any]] = []

    async def handle_call(self, request: Any, from_: From[Any]) -> Any:
        if request == "hold":
            self.held.append(from_)
            return NOREPLY
        if callable(request):
            return await request(self)
        return request

    async def handle_cast(self, message: Any) -> None:
        if callable(message):
            await message(self)
        self.log.append(("cast", message))

    async def handle_info(self, message: Any) -> None:
        self.log.append(message)

    async def terminate(self, reason: Reason) -> None:
        self.log.append(("terminate", reason))


class Watcher(Probe):
    """Holds every call and monitors its caller."""

    async def handle_call(self, request: Any, from_: From[Any]) -> Any:
        self.held.append(from_)
        self.monitor(from_)
        return NOREPLY


async def crash(_: Probe) -> None:
    raise ValueError("a bug in the handler")


def events_of(telemetry: Telemetry) -> list[str]:
    events: list[str] = []
    telemetry.attach(lambda event, measurements, metadata: events.append(event))
    return events


async def ask(ref: ActorRef, request: Any, outcomes: list[Any], timeout: float | None = None) -> None:
    """A caller that writes down what came out of its call."""
    try:
        outcomes.append(await ref.call(request, timeout=timeout))
    except trio.Cancelled:
        outcomes.append("cancelled")
        raise
    except Exception as error:
        outcomes.append(error)


def records() -> int:
    """How many calls, monitors, and timers exist in the process."""
    gc.collect()
    return sum(type(thing) in (From, Monitor, Down, Timer) for thing in gc.get_objects())
