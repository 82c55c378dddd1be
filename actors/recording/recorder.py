"""FlightRecorder: writes the Batcher's inputs and plans to a file."""

import logging
from collections.abc import Sequence as ListOf
from dataclasses import astuple
from datetime import UTC, datetime
from importlib.metadata import version

import msgspec
import outcome
import trio

from genbatch.actors.batcher.generation import BeamGeneration, Generation, GenerationRequest
from genbatch.actors.batcher.journal import Flight, StepMessage, Stepped, unrecorded
from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.batcher.requests import Evaluated, Planned, Prompt, Request, Sequence
from genbatch.actors.batcher.slots import SwapFault
from genbatch.actors.recording import records
from genbatch.actors.recording.records import (
    FORMAT,
    RAISED,
    Draw,
    Header,
    RecordedContext,
    RecordedEntry,
    RecordedOptions,
    RecordWriter,
    TickRecord,
)
from genbatch.actors.scheduling.plan import PromptBudget, SchedulerOutput
from genbatch.actors.scheduling.request import LlmRequest
from genbatch.nif.context import Context
from genbatch.nif.cuda_device import is_out_of_memory
from genbatch.nif.errors import OptionError, OutOfBlocks
from genbatch.nif.models.model_names import written_path
from genbatch.nif.sampling.sampler import SampleFault


def tick_of(
    plan: SchedulerOutput, groups: ListOf[ListOf[Planned]], sitting_out: list[int], budget: PromptBudget | None
) -> TickRecord:
    """Return a plan in terms of its requests' numbers, which are the same in every replay."""
    return TickRecord(
        groups=[
            [
                RecordedEntry(
                    *_name(planned.owner), planned.entry.seq_id, planned.entry.n_past, len(planned.entry.tokens)
                )
                for planned in group
            ]
            for group in groups
        ],
        paused=[_name(owner) for owner in plan.paused_requests],
        refused=[_name(owner) for owner in plan.never_fitting],
        sitting_out=sitting_out,
        prompt_budget=None if budget is None else astuple(budget),
    )


def _name(owner: LlmRequest) -> tuple[int, int]:
    if isinstance(owner, Sequence):
        return owner.request.number, owner.choice
    return 0, owner.request_id


log = logging.getLogger("genbatch")

MIB = 2**20


def open_flight(options: BatcherOptions) -> Flight:
    """Return the recorder that the options ask for.

    Raises:
        OptionError: the file cannot be created, or the scheduler is an object, which a record cannot name.
    """
    if options.record is None:
        return unrecorded(options)
    if not isinstance(options.scheduler, str):
        raise OptionError("record", "the scheduler must be given by its name, for the record to say it")
    try:
        writer = RecordWriter(str(written_path(options.record)), options.record_limit * MIB)
    except OSError as error:
        raise OptionError("record", f"{options.record!r} cannot be made: {error.strerror}") from error
    log.info("recording to %s", writer.path)
    return FlightRecorder(writer, options)


class FlightRecorder(Flight):
    """One recording. The clock stands still while a message is handled, so that a replay decides by the same times.

    A failing disk or the file's limit ends the recording and nothing else.
    """

    def __init__(self, writer: RecordWriter, options: BatcherOptions) -> None:
        self._writer: RecordWriter | None = writer
        self._options = options
        self._now = trio.current_time()
        self._sitting_out: list[int] = []
        self._budget: PromptBudget | None = None

    def begin(self, context: Context, system_prompts: ListOf[list[int]]) -> None:
        options = {name: getattr(self._options, name) for name in RecordedOptions.__struct_fields__}
        self._write(
            Header(
                format=FORMAT,
                genbatch=version("genbatch"),
                model=context.model.name,
                began=datetime.now(UTC).isoformat(timespec="seconds"),
                time=self._now,
                options=RecordedOptions(**options),
                context=_shape(context),
                system_prompts=list(system_prompts),
            )
        )

    def began(self) -> None:
        self._now = trio.current_time()

    def now(self) -> float:
        return self._now

    def arrived(self, request: GenerationRequest, message: Generate) -> None:
        self._write(
            records.Arrived(
                time=self._now,
                request=request.number,
                params=msgspec.structs.replace(message.request, prompt=None, messages=None, token_ids=None),
                client=request.client,
                request_id=request.request_id,
                beam_width=request.beam_width,
                scores_prompt=request.keeps_context,
                adapter="" if request.adapter is None else request.adapter.digest,
            )
        )

    def encoded(self, request: Request, prompt: "outcome.Outcome[Prompt]") -> None:
        if not isinstance(prompt, outcome.Value):
            refusal = str(prompt.error) if isinstance(prompt, outcome.Error) else ""
            self._write(records.EncodedRecord(time=self._now, request=request.number, refusal=refusal))
            return
        tokens, prefix = prompt.value.tokens, prompt.value.first_message
        self._write(records.EncodedRecord(time=self._now, request=request.number, tokens=tokens, prefix=prefix))

    def left(self, request: Request) -> None:
        self._write(records.Left(time=self._now, request=request.number))

    def stepped(self, message: StepMessage) -> None:
        assert isinstance(message, Stepped), "nothing runs ahead while it is recorded"
        if isinstance(message.result, outcome.Error):
            error = message.result.error
            self._write(records.SteppedRecord(time=self._now, fault=_kind(error), reason=str(error)))
        elif isinstance(message.result, outcome.Value):
            pairs = zip(message.batch, message.result.value, strict=True)
            self._write(
                records.SteppedRecord(time=self._now, draws=[_draw(planned, draws) for planned, draws in pairs])
            )

    def draining(self, timeout_s: float) -> None:
        self._write(records.DrainingRecord(time=self._now, timeout_s=timeout_s))

    def drain_over(self) -> None:
        self._write(records.DrainOverRecord(time=self._now))

    def prompted(self) -> None:
        self._write(records.Prompted(time=self._now))

    def sitting_out(self, ids: frozenset[int]) -> frozenset[int]:
        self._sitting_out = sorted(ids)
        return ids

    def prompt_budget(self, budget: PromptBudget | None) -> PromptBudget | None:
        self._budget = budget
        return budget

    def ticked(self, plan: SchedulerOutput, groups: ListOf[ListOf[Planned]]) -> None:
        self._write(tick_of(plan, groups, self._sitting_out, self._budget), flush=True)

    def close(self, reason: str) -> None:
        self._write(records.Ended(time=trio.current_time(), reason=reason))
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                log.warning("the flight record is not complete: %s", error)

    def _write(self, record: "records.MessageRecord | Header | TickRecord", *, flush: bool = False) -> None:
        if self._writer is None:
            return
        try:
            has_room = self._writer.write(record)
            if flush:  # a process killed during the step leaves a complete record
                self._writer.flush()
        except OSError as error:
            log.warning("recording has ended: %s", error)
            self._writer = None
            return
        if not has_room:
            log.warning("recording has ended: %s has reached its limit", self._writer.path)
            self._writer.close()
            self._writer = None


def _shape(context: Context) -> RecordedContext:
    kv, runner, model = context.kv, context.runner, context.model
    return RecordedContext(
        num_blocks=list(kv.num_blocks),
        windows=[group.window for group in kv.groups],
        bytes_per_block=[runner.bytes_per_block(group, kv.block_size) for group in range(len(kv.groups))],
        block_size=kv.block_size,
        num_sequences=context.num_sequences,
        n_batch=context.n_batch,
        n_ctx=context.n_ctx,
        max_per_sequence=kv.max_per_sequence,
        allow_block_sharing=kv.prefix_cache is not None,
        vocab_size=model.vocab_size,
        eos_token_ids=sorted(model.eos_token_ids),
        max_position=model.max_position,
        sink_tokens=[group.sink_tokens for group in kv.groups],
    )


def _draw(planned: Planned, evaluated: Evaluated) -> Draw | None:
    drawn, owner = evaluated.drawn, planned.owner
    if drawn is None:
        return None
    if isinstance(drawn, SampleFault):
        return Draw(fault=drawn.reason, by_request=drawn.by_request)
    if isinstance(owner, BeamGeneration):
        return Draw(drawn.token_id, top=list(drawn.top), logprob=drawn.logprob)
    assert isinstance(owner, Generation)
    return Draw(drawn.token_id, RAISED if owner.raised else owner.output.finish_reason or "")


def _kind(error: BaseException) -> str:
    """Return the kind of a fault; the Batcher handles each kind differently."""
    if isinstance(error, OutOfBlocks):
        return "out of blocks"
    if is_out_of_memory(error):
        return "out of memory"
    if isinstance(error, SwapFault) or not isinstance(error, Exception):
        return "swap"
    return "fault"
