"""Replay: plays a flight record to a real Batcher, and compares every tick.

    report = replay(Path("incident.flight"), follow=print_record)
    report.difference                       # None if all ticks are the same

The scheduler, the KV cache, the slots and all that decides are real. Time is simulated; what came from outside, the
draws of the model included, is the record's.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from genbatch.actors.batching.arrivals import Encoded
from genbatch.actors.batching.batcher import Flush
from genbatch.actors.batching.batcher_messages import Drain
from genbatch.actors.batching.draining import DrainOver
from genbatch.actors.batching.step import Evaluated, Planned
from genbatch.actors.batching.step_faults import EngineFault
from genbatch.actors.batching.swap import SwapFault, run_copies
from genbatch.actors.recording import records
from genbatch.actors.recording.plan_check import PlanCheck
from genbatch.actors.recording.record_file import RecordError, RecordReader
from genbatch.actors.recording.records import FORMAT, Draw, Header, Message, Record, Tick
from genbatch.actors.recording.replayed_batcher import (
    RecordedDraw,
    ReplayedBatcher,
    ReplayedOutput,
    encoded,
    generate_message,
)
from genbatch.actors.recording.replayed_context import ReplayedContext
from genbatch.actors.recording.replayed_thread import ReplayedThread
from genbatch.actors.runtime.actor import ActorRef, start
from genbatch.actors.runtime.errors import ActorDown
from genbatch.nif.errors import OutOfBlocks
from genbatch.nif.sampling.sampler import SampleFault
from genbatch.proto.errors import GenbatchError


@dataclass(slots=True, kw_only=True)
class Report:
    """What a replay found.

    Args:
        header: of the record.
        num_ticks: ticks that are the same, up to the difference.
        num_messages: messages played.
        end: why the record ended, as it says; None if it does not, because its writer was killed.
        fault: where the file is cut off or damaged.
        message: the message whose handling differs.
        difference: the first tick that differs as (recorded, planned), one of them None where there was none.
    """

    header: Header
    num_ticks: int = 0
    num_messages: int = 0
    end: str | None = None
    fault: str | None = None
    message: Message | None = None
    difference: tuple[Tick | None, Tick | None] | None = None


Follow = Callable[[Header, Record], object]


def replay(path: Path, *, changes: Mapping[str, Any] | None = None, follow: Follow | None = None) -> Report:
    """Plays a record to its end, or to the first difference.

    Args:
        path: of the file.
        changes: options of the Batcher to be others than they were.
        follow: gets each message before it is played, and then its ticks.

    Raises:
        RecordError: the file is no record, or one that cannot be played.
        OptionError, SchedulerError: the options cannot be.
    """
    reader = RecordReader(path)
    found = iter(reader)
    header = next(found, None)
    if not isinstance(header, Header):
        raise RecordError(f"{path} has no header: {reader.fault or 'it ends at its beginning'}")
    if header.format != FORMAT:
        raise RecordError(f"{path} has format {header.format}, this genbatch ({FORMAT}) reads another")
    played = Player(header, changes or {}, follow or (lambda _header, _record: None))
    trio.run(played.run, _messages(found), clock=MockClock())
    played.report.fault = reader.fault
    return played.report


class Player:
    """One replay."""

    def __init__(self, header: Header, changes: Mapping[str, Any], follow: Follow) -> None:
        self.report = Report(header=header)
        self._check = PlanCheck(header.time)
        self._changes = changes
        self._follow = follow
        self._thread = ReplayedThread()
        self._callers: dict[int, trio.CancelScope] = {}

    async def run(self, messages: Iterator[tuple[Message, list[Tick], bool]]) -> None:
        """Plays the messages with their ticks; the flag is for the last one that is there."""
        header = self.report.header
        self._move_clock(header.time)
        places = [str(index) for index in range(len(header.system_prompts))]
        # Nobody reads the service's limits any more, and it may have had more prompts than are allowed today.
        options = header.options.options(places, **{"default_deadline_s": 0.0, **self._changes})
        self._batcher = ReplayedBatcher(header, options, self._check, lambda _name: self._thread)
        try:
            async with trio.open_nursery() as self._nursery:
                self._ref = await start(self._nursery, self._batcher, name="batcher")
                for message, ticks, is_last in messages:
                    await self._play(message, ticks, is_last)
                    if self.report.difference is not None:
                        break
                self._nursery.cancel_scope.cancel()
        except* EngineFault:  # as it was recorded: what follows is the Batcher's end
            for message, _, _ in messages:
                self.report.end = message.reason if isinstance(message, records.Ended) else None
        self._settle(None)
        self.report.num_ticks = self._check.num_ticks

    async def _play(self, message: Message, ticks: list[Tick], is_last: bool) -> None:
        for record in chain([message], ticks):
            self._follow(self.report.header, record)
        self._move_clock(message.time)
        self._check.expect(message.time, ticks, is_last=is_last)
        self._send(message)
        await wait_all_tasks_blocked()
        self.report.num_messages += 1
        self._settle(message)

    def _settle(self, message: Message | None) -> None:
        self._check.settle()
        if self._check.difference is not None and self.report.difference is None:
            self.report.difference, self.report.message = self._check.difference, message

    def _send(self, message: Message) -> None:
        match message:
            case records.Arrived():
                self._nursery.start_soon(self._call, message)
            case records.Encoded():
                self._encode(message)
            case records.Left(request=number):
                self._callers[number].cancel()
            case records.Stepped():
                self._thread.end_step(partial(self._evaluate, message))
            case records.Draining(timeout_s=timeout_s):
                self._nursery.start_soon(partial(_drain, self._ref, timeout_s))
            case records.DrainOver():
                self._ref.info(DrainOver(), control=True)
            case records.Prompted():
                self._ref.info(Flush(), control=True)
            case records.Ended(reason=reason):
                self.report.end = reason

    async def _call(self, arrived: records.Arrived) -> None:
        with trio.CancelScope() as self._callers[arrived.request]:
            message = generate_message(arrived, partial(self._raises, arrived.request))
            with suppress(GenbatchError, ActorDown):  # as the recorded caller saw it
                await self._ref.call(message, timeout=None, control=True)

    def _raises(self, number: int, choice: int) -> bool:
        request = self._batcher.find(number)
        assert request is not None
        output = request.sequences[choice].output
        return isinstance(output, ReplayedOutput) and output.raises

    def _encode(self, message: records.Encoded) -> None:
        request = self._batcher.find(message.request)
        if request is not None:
            self._ref.info(Encoded(request, encoded(message)), control=True)

    def _evaluate(
        self, message: records.Stepped, batch: list[Planned], copies: list[Callable[[], None]]
    ) -> list[Evaluated]:
        """In the place of the model's forward."""
        run_copies(copies)
        context = self._batcher.ctx
        assert isinstance(context, ReplayedContext)
        context.replay([planned.entry for planned in batch], _fault(message))
        return [Evaluated(_drawn(draw), []) for draw in message.draws]

    def _move_clock(self, time: float) -> None:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        clock.jump(max(0.0, time - clock.current_time()))


async def _drain(ref: ActorRef, timeout_s: float) -> None:
    with suppress(ActorDown):  # the record ends before the drain did
        await ref.call(Drain(timeout_s), timeout=None, control=True)


def _messages(found: Iterator[Record]) -> Iterator[tuple[Message, list[Tick], bool]]:
    """Each message with the ticks that follow it, and whether it is the last."""
    message: Message | None = None
    ticks: list[Tick] = []
    for record in found:
        if isinstance(record, Tick):
            ticks.append(record)
        elif not isinstance(record, Header):
            if message is not None:
                yield message, ticks, False
            message, ticks = record, []
    if message is not None:
        yield message, ticks, True


def _fault(message: records.Stepped) -> BaseException | None:
    match message.fault:
        case None:
            return None
        case "out of blocks":
            return OutOfBlocks(0, 0)
        case "out of memory":
            return torch.OutOfMemoryError(message.reason)
        case "swap":
            return SwapFault(message.reason)
        case _:
            return RuntimeError(message.reason)


def _drawn(draw: Draw | None) -> RecordedDraw | SampleFault | None:
    if draw is None:
        return None
    if draw.fault is not None:
        return SampleFault(draw.fault, draw.by_request)
    return RecordedDraw(draw.token, draw.end, draw.logprob, tuple(draw.top))
