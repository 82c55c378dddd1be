"""Replay: plays a flight record to a real Batcher, and compares every tick.

    report = replay(Path("incident.flight"), follow=print_record)
    report.difference                       # None if all ticks are the same

The scheduler, the KV cache, the slots and all other deciding parts are real. Time is simulated. Inputs from outside,
including the model's draws, come from the record:

    PlanCheck        replaces the recorder: it supplies recorded times and masks, and compares each tick
    ReplayedThread   replaces the Worker: it runs recorded results on the event loop, at the recorded times
    ReplayedContext  a context without a model: the real KV cache, over blocks without content
    ReplayedBatcher  the real Batcher, except for text, time, admission, and the model's draws

`Timeline` turns a record into readable lines.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as ListOf
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import outcome
import trio
from tokenizers import Tokenizer, models
from trio.testing import MockClock, wait_all_tasks_blocked

from genbatch.actors.batcher.arrivals import Arrivals, Encoded
from genbatch.actors.batcher.batcher import Batcher, Flush
from genbatch.actors.batcher.generation import Generation, GenerationRequest, Output, OutputRules
from genbatch.actors.batcher.intake import Intake
from genbatch.actors.batcher.journal import Flight
from genbatch.actors.batcher.messages import DrainOver, Generate, Keep
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.requests import Evaluated, Planned, Prompt, Request, TimeLimits
from genbatch.actors.batcher.slots import SwapFault, run_copies
from genbatch.actors.batcher.stepper import EngineFault
from genbatch.actors.recording import records
from genbatch.actors.recording.recorder import tick_of
from genbatch.actors.recording.records import (
    FORMAT,
    RAISED,
    Arrived,
    Draw,
    EncodedRecord,
    Header,
    MessageRecord,
    Record,
    RecordedEntry,
    RecordError,
    RecordReader,
    TickRecord,
)
from genbatch.actors.runtime.actor import ActorRef, Timer, start
from genbatch.actors.runtime.errors import ActorDown
from genbatch.actors.scheduling.plan import PromptBudget, SchedulerOutput
from genbatch.nif.context import Context
from genbatch.nif.cuda_device import CPU
from genbatch.nif.errors import OutOfBlocks
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runner import Content, Entry, LayerGroup, LoraAdapter, RaggedBatch
from genbatch.nif.sampling.sampler import Sampled, SampleFault
from genbatch.proto.errors import GenbatchError
from genbatch.proto.messages import FinishReason, GenerateRequest, Token
from genbatch.proto.service_messages import DrainRequest, Models


class PlanCheck(Flight):
    """Compares ticks up to the first difference, since later ticks would have another history.

    Args:
        began_at: the time of the record's header.
    """

    def __init__(self, began_at: float) -> None:
        self.num_ticks = 0  # equal ticks so far
        self.difference: tuple[TickRecord | None, TickRecord | None] | None = None  # recorded, planned
        self._now = began_at
        self._ticks: deque[TickRecord] = deque()
        self._may_lack_ticks = False
        self._budget: PromptBudget | None = None

    def expect(self, time: float, ticks: list[TickRecord], *, is_last: bool) -> None:
        """Take the next message's recorded time and ticks; the ticks of the last message may be cut off."""
        self._now = time
        self._ticks.extend(ticks)
        self._may_lack_ticks = is_last

    def settle(self) -> None:
        """Note a difference if the handled message left recorded ticks over."""
        if self._ticks and self.difference is None:
            self.difference = self._ticks[0], None

    def now(self) -> float:
        return self._now

    def sitting_out(self, ids: frozenset[int]) -> frozenset[int]:
        return frozenset(self._ticks[0].sitting_out) if self._ticks else ids

    def prompt_budget(self, budget: PromptBudget | None) -> PromptBudget | None:
        """Return the recorded budget: a replay's steps take no time, so their cost cannot be measured."""
        recorded = self._ticks[0].prompt_budget if self._ticks else None
        self._budget = None if recorded is None else PromptBudget(*recorded)
        return self._budget

    def ticked(self, plan: SchedulerOutput, groups: ListOf[ListOf[Planned]]) -> None:
        if self.difference is not None:
            return
        recorded = self._ticks.popleft() if self._ticks else None
        planned = tick_of(plan, groups, recorded.sitting_out if recorded else [], self._budget)
        if recorded == planned:
            self.num_ticks += 1
        elif recorded is not None or not self._may_lack_ticks:
            self.difference = recorded, planned


class ReplayedThread:
    """Keeps a submitted step until the record ends it; runs all other jobs at once."""

    def __init__(self) -> None:
        self._step: tuple[tuple[Any, ...], Callable[[outcome.Outcome[Any]], object]] | None = None

    async def run(self, job: Callable[..., Any], *args: object) -> Any:
        await trio.lowlevel.checkpoint()
        return job(*args)

    def submit(self, job: Callable[..., Any], *args: object, on_done: Callable[[Any], object]) -> None:
        """Take a step; its forward will not run."""
        self._step = args, on_done

    def end_step(self, evaluate: Callable[..., Any]) -> None:
        """End the current step with the result of `evaluate` for its arguments; do nothing without a step."""
        if self._step is None:
            return  # the replay differs, which its ticks will show
        (args, on_done), self._step = self._step, None
        on_done(outcome.capture(evaluate, *args))

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()


class ReplayedContext(Context):
    """Has the recorded shape; a forward only books its blocks, and raises the given fault."""

    def __init__(self, header: Header) -> None:
        shape = header.context
        self._runner = HollowRunner(header)
        super().__init__(
            # HollowModel has the few fields that are read without a forward.
            cast(Model, HollowModel(header)),
            self._runner,
            num_blocks=shape.num_blocks,
            n_parallel=shape.num_sequences,
            block_size=shape.block_size,
            n_batch=shape.n_batch,
            max_per_sequence=shape.max_per_sequence,
            allow_block_sharing=shape.allow_block_sharing,
        )
        self.n_ctx = shape.n_ctx

    def replay(self, entries: ListOf[Entry], fault: BaseException | None) -> None:
        """Run one forward over the entries.

        Raises:
            BaseException: the fault; as with any failed forward, nothing was changed.
            OutOfBlocks: the pool cannot hold the new positions.
        """
        self._runner.fault = fault
        try:
            self._evaluate(entries, lambda *_: None, with_logits=False)
        finally:
            self._runner.fault = None


class HollowRunner:
    """Has the methods of a Runner and no KV."""

    name = "replay"
    quantize = "none"

    def __init__(self, header: Header) -> None:
        self.vocab_size = header.context.vocab_size
        windows = header.context.windows
        sinks = header.context.sink_tokens or [0] * len(windows)
        pairs = enumerate(zip(windows, sinks, strict=True))
        self.groups = tuple(LayerGroup((index,), window, kept) for index, (window, kept) in pairs)
        self.fault: BaseException | None = None
        self._bytes_per_block = header.context.bytes_per_block

    def bytes_per_block(self, group: int, block_size: int) -> int:
        return self._bytes_per_block[group]

    def allocate(self, num_blocks: ListOf[int], block_size: int) -> None:
        pass

    def forward(self, batch: RaggedBatch) -> npt.NDArray[np.float32]:
        if self.fault is not None:
            raise self.fault
        return np.zeros((len(batch.logit_rows), 1), np.float32)

    def copy_blocks(self, group: int, pairs: ListOf[tuple[int, int]]) -> None:
        pass

    def read_blocks(self, group: int, blocks: ListOf[int]) -> npt.NDArray[np.uint8]:
        return np.broadcast_to(np.zeros((1, 1), np.uint8), (len(blocks), self._bytes_per_block[group]))

    def write_blocks(self, group: int, blocks: ListOf[int], content: Content) -> None:
        pass

    def close(self) -> None:
        pass


class HollowModel:
    """The fields of a Model that a Batcher reads between two forwards."""

    def __init__(self, header: Header) -> None:
        self.name = header.model
        self.generates = True
        self.sampling: dict[str, float] = {}  # recorded requests contain their effective values
        self.device = CPU
        self.vocab_size = header.context.vocab_size
        self.eos_token_ids = frozenset(header.context.eos_token_ids)
        self.max_position = header.context.max_position
        self.tokenizer = HollowTokenizer()


class HollowTokenizer:
    """A tokenizer without text. It knows no thinking, since a record has the tokens that its answers thought."""

    thinks = False

    def __init__(self) -> None:
        self.backend = Tokenizer(models.WordLevel({"": 0}, unk_token=""))

    def template_reads(self, name: str) -> bool:
        """Return False: there is no chat template."""
        return False


class RecordedDraw(Sampled):
    """A recorded token, and the end that followed it."""

    __slots__ = ("end",)

    def __init__(self, token_id: int, end: str, logprob: float | None, top: tuple[tuple[int, float], ...]) -> None:
        super().__init__(token_id, logprob, top)
        object.__setattr__(self, "end", end)


class ReplayedArrivals(Arrivals):
    """Admits every recorded request."""

    def _admit(self, client: str, account: str, width: int, limits: TimeLimits, *, embeds: bool) -> None:
        """Admit any request: admission depends on service times, which a replay does not have."""

    def _encode(self, request: Request) -> Request | None:
        """Wait for the recorded tokens."""
        self._num_away += request.width
        return None


class ReplayedBatcher(Batcher):
    """A Batcher that takes recorded messages one at a time.

    Args:
        header: the record's header.
        options: the recorded options, or changed ones to see their effect.
        check: compares the ticks.
        open_worker: makes the replacements of its threads.
    """

    arrivals_type = ReplayedArrivals

    def __init__(
        self, header: Header, options: BatcherOptions, check: PlanCheck, open_worker: Callable[[str], Any]
    ) -> None:
        super().__init__(
            lambda: ReplayedContext(header), options, open_worker=open_worker, open_flight=lambda _options: check
        )
        self._runs_ahead = False
        self._header = header

    def send_after(self, delay_s: float, message: object) -> Timer:
        """Return a timer that never fires: the record has the timers' messages at the times when they were handled."""
        return Timer(self._mailbox, message, trio.current_time() + delay_s)

    def find(self, number: int) -> Request | None:
        """Return the open request with this number; None for none."""
        return next((request for request in self.requests if request.number == number), None)

    def _list_models(self) -> Models:
        return Models(models=())  # a record does not describe its models

    def _open_intake(self) -> Intake:
        return ReplayedIntake(self._header, self.ctx, self.options)


class ReplayedIntake(Intake):
    """Uses recorded tokens instead of a tokenizer."""

    def __init__(self, header: Header, context: Context, options: BatcherOptions) -> None:
        super().__init__(context.model, options, context.max_positions)
        self._system_prompts = header.system_prompts
        self._known: dict[str, LoraAdapter] = {}

    def check(self, message: Generate) -> None:
        """Accept the request, since it was valid when it was recorded."""

    def adapter(self, name: str | None) -> LoraAdapter | None:
        """Return an adapter with this digest; no other field of it is read."""
        return self._known.setdefault(name, LoraAdapter("", Path(), name, 0, {})) if name else None

    def system_prompt(self, content: str) -> list[int]:
        """Return the recorded tokens of a system prompt; `content` is its index in the options."""
        return self._system_prompts[int(content)]

    def sequences(self, request: GenerationRequest, max_tokens: int) -> list[Generation]:
        sequences = super().sequences(request, max_tokens)
        for sequence in sequences:
            sequence.output = ReplayedOutput(sequence.output)
        return sequences


class ReplayedOutput(Output):
    """Has no text, and ends where the recorded output ended."""

    __slots__ = ("raises",)

    def __init__(self, real: Output) -> None:
        super().__init__(real._tokenizer, real._prompt_tokens, OutputRules(max_tokens=0))
        self.raises = False

    def blank(self) -> "ReplayedOutput":
        return ReplayedOutput(self)

    def push(self, drawn: Sampled) -> str:
        self.token_ids.append(drawn.token_id)
        end = getattr(drawn, "end", "")  # a beam's tokens come together at its end
        self.raises = end == RAISED
        self.finish_reason = cast(FinishReason, end) if end and not self.raises else None
        return ""


def generate_message(arrived: Arrived, raises: Callable[[int], bool]) -> Generate:
    """Return the recorded call, without its fields for text and draws.

    Args:
        arrived: the record.
        raises: returns whether the caller's function raised at a choice's last token.
    """

    def on_token(token: Token) -> None:
        if raises(token.choice):
            raise RuntimeError("the caller's function raised")

    plain = GenerateRequest()
    dropped = (
        *("stop", "echo", "logprobs", "logit_bias", "response_format", "grammar", "regex", "tools", "tool_choice"),
        *(
            "reasoning",
            "reasoning_effort",
            "max_thinking_tokens",
            "chat_template_kwargs",
            "continue_final_message",
            "keep_stop",
        ),
    )
    sampling = {
        name: getattr(plain if name in dropped else arrived.params, name)
        for name in GenerateRequest.__struct_fields__
        if name not in ("prompt", "messages", "token_ids", "model")
    }
    return Generate(
        GenerateRequest(token_ids=[0], model=arrived.adapter or None, **sampling),
        on_token,
        client=arrived.client,
        request_id=arrived.request_id,
        beam_width=arrived.beam_width,
        keep=Keep(context=True) if arrived.scores_prompt else None,
    )


def encoded(message: EncodedRecord) -> "outcome.Outcome[Prompt]":
    """Return the tokenizer's recorded result."""
    if message.refusal is not None:
        return outcome.Error(ValueError(message.refusal))
    return outcome.Value(Prompt(message.tokens, message.prefix))


@dataclass(slots=True, kw_only=True)
class Report:
    """The result of a replay.

    Args:
        header: the record's header.
        num_ticks: the equal ticks, up to the difference.
        num_messages: messages played.
        end: the recorded reason for its end; None for a killed writer.
        fault: a description of the damage or the cut-off end.
        message: the message that was handled differently.
        difference: the first different tick as (recorded, planned); None in place of a missing tick.
    """

    header: Header
    num_ticks: int = 0
    num_messages: int = 0
    end: str | None = None
    fault: str | None = None
    message: MessageRecord | None = None
    difference: tuple[TickRecord | None, TickRecord | None] | None = None


Follow = Callable[[Header, Record], object]


def replay(path: Path, *, changes: Mapping[str, Any] | None = None, follow: Follow | None = None) -> Report:
    """Play a record to its end, or to the first difference.

    Args:
        path: the file.
        changes: changed options of the Batcher.
        follow: called with each message before it is played, and then with its ticks.

    Raises:
        RecordError: the file is not a record, or cannot be played.
        OptionError, SchedulerError: the changed options are invalid.
    """
    reader = RecordReader(path)
    records = iter(reader)
    header = next(records, None)
    if not isinstance(header, Header):
        raise RecordError(f"{path} has no header: {reader.fault or 'it ends at its beginning'}")
    if header.format != FORMAT:
        raise RecordError(f"{path} has format {header.format}, this genbatch ({FORMAT}) reads another")
    played = Player(header, changes or {}, follow or (lambda _header, _record: None))
    trio.run(played.run, _messages(records), clock=MockClock())
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

    async def run(self, messages: Iterator[tuple[MessageRecord, list[TickRecord], bool]]) -> None:
        """Play the messages with their ticks; the flag marks the last message."""
        header = self.report.header
        self._move_clock(header.time)
        places = [str(index) for index in range(len(header.system_prompts))]
        options = header.options.options(places, **self._changes)
        self._batcher = ReplayedBatcher(header, options, self._check, lambda _name: self._thread)
        try:
            async with trio.open_nursery() as self._nursery:
                self._ref = await start(self._nursery, self._batcher, name="batcher")
                for message, ticks, is_last in messages:
                    await self._play(message, ticks, is_last)
                    if self.report.difference is not None:
                        break
                self._nursery.cancel_scope.cancel()
        except* EngineFault:  # as recorded: the Batcher ends here
            for message, _, _ in messages:
                self.report.end = message.reason if isinstance(message, records.Ended) else None
        self._settle(None)
        self.report.num_ticks = self._check.num_ticks

    async def _play(self, message: MessageRecord, ticks: list[TickRecord], is_last: bool) -> None:
        for record in chain([message], ticks):
            self._follow(self.report.header, record)
        self._move_clock(message.time)
        self._check.expect(message.time, ticks, is_last=is_last)
        self._send(message)
        await wait_all_tasks_blocked()
        self.report.num_messages += 1
        self._settle(message)

    def _settle(self, message: MessageRecord | None) -> None:
        self._check.settle()
        if self._check.difference is not None and self.report.difference is None:
            self.report.difference, self.report.message = self._check.difference, message

    def _send(self, message: MessageRecord) -> None:
        match message:
            case records.Arrived():
                self._nursery.start_soon(self._call, message)
            case records.EncodedRecord():
                self._encode(message)
            case records.Left(request=number):
                self._callers[number].cancel()
            case records.SteppedRecord():
                self._thread.end_step(partial(self._evaluate, message))
            case records.DrainingRecord(timeout_s=timeout_s):
                self._nursery.start_soon(partial(_drain, self._ref, timeout_s))
            case records.DrainOverRecord():
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
        sequence = request.sequences[choice]
        assert isinstance(sequence, Generation)
        return isinstance(sequence.output, ReplayedOutput) and sequence.output.raises

    def _encode(self, message: records.EncodedRecord) -> None:
        request = self._batcher.find(message.request)
        if request is not None:
            self._ref.info(Encoded(request, encoded(message)), control=True)

    def _evaluate(
        self, message: records.SteppedRecord, batch: list[Planned], copies: list[Callable[[], None]]
    ) -> list[Evaluated]:
        """Take the place of the model's forward."""
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
    with suppress(ActorDown):  # the record ends before the drain
        await ref.call(DrainRequest(timeout_s=timeout_s), timeout=None, control=True)


def _messages(records: Iterator[Record]) -> Iterator[tuple[MessageRecord, list[TickRecord], bool]]:
    """Yield each message with the ticks that follow it, and whether it is the last."""
    message: MessageRecord | None = None
    ticks: list[TickRecord] = []
    for record in records:
        if isinstance(record, TickRecord):
            ticks.append(record)
        elif not isinstance(record, Header):
            if message is not None:
                yield message, ticks, False
            message, ticks = record, []
    if message is not None:
        yield message, ticks, True


def _fault(message: records.SteppedRecord) -> BaseException | None:
    match message.fault:
        case None:
            return None
        case "out of blocks":
            return OutOfBlocks(0, 0)
        case "out of memory":
            return MemoryError(message.reason)
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


class Timeline:
    """Numbers the ticks, and shows times relative to the record's beginning."""

    def __init__(self) -> None:
        self._num_ticks = 0

    def line(self, header: Header, record: Record) -> str:
        """Return one line without a newline."""
        if isinstance(record, TickRecord):
            self._num_ticks += 1
            return f"{'':12}tick {self._num_ticks}: {self.plan(record)}"
        return f"{record.time - header.time:10.6f}  {_describe(record)}"

    @staticmethod
    def plan(tick: TickRecord | None) -> str:
        """Return the forwards as REQUEST.CHOICE@SLOT[FIRST:LAST] of positions; "held" is a held prompt."""
        if tick is None:
            return "no tick"
        parts = [" ".join(_part(part) for part in group) for group in tick.groups]
        for name, who in (("paused", tick.paused), ("refused", tick.refused)):
            if who:
                parts.append(f"{name} {' '.join(_name(*pair) for pair in who)}")
        if tick.sitting_out:
            parts.append(f"{len(tick.sitting_out)} left out")
        if tick.prompt_budget is not None:
            parts.append(f"{1000 * tick.prompt_budget[0]:.1f} ms for prompts")
        return " | ".join(parts) or "nothing to do"


def _describe(record: Record) -> str:
    match record:
        case Header():
            return "the batcher starts"
        case records.Arrived(request=number, request_id=name, params=params):
            deadline = "" if params.deadline_s is None else f", {params.deadline_s:g} s to its deadline"
            return f"request {number} ({name}) arrives: n {params.n}, at most {params.max_tokens} tokens{deadline}"
        case records.EncodedRecord(request=number, tokens=tokens, refusal=refusal):
            return f"request {number} has {len(tokens)} tokens" if refusal is None else f"request {number}: {refusal}"
        case records.Left(request=number):
            return f"the caller of request {number} leaves"
        case records.SteppedRecord(fault=None, draws=draws):
            return f"a step ends: {' '.join(_draw_text(draw) for draw in draws)}"
        case records.SteppedRecord(fault=fault, reason=reason):
            return f"a step fails, {fault}: {reason}"
        case records.DrainingRecord():
            return "draining"
        case records.DrainOverRecord():
            return "draining is over"
        case records.Prompted():
            return "a tick begins"
        case records.Ended(reason=reason):
            return f"the record ends: {reason}"
        case TickRecord():
            raise AssertionError("a tick has no time of its own")


def _draw_text(draw: Draw | None) -> str:
    if draw is None:
        return "-"
    if draw.fault is not None:
        return f"({draw.fault})"
    return f"{draw.token} ({draw.end})" if draw.end else str(draw.token)


def _part(part: RecordedEntry) -> str:
    return f"{_name(part.request, part.choice)}@{part.slot}[{part.start}:{part.start + part.num_tokens}]"


def _name(request: int, choice: int) -> str:
    return f"{request}.{choice}" if request else f"held{choice}"
