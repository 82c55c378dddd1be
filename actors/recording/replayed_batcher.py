"""The real Batcher with what a replay replaces: text, time, admission, and what the model draws."""

from collections.abc import Callable
from typing import Any, cast

import outcome
import trio

from genbatch.actors.batching.arrivals import Arrivals
from genbatch.actors.batching.batcher import Batcher
from genbatch.actors.batching.batcher_messages import Generate
from genbatch.actors.batching.intake import Intake, Prompt
from genbatch.actors.batching.keep import Keep
from genbatch.actors.batching.options import BatcherOptions
from genbatch.actors.batching.output import Output
from genbatch.actors.batching.request import Request
from genbatch.actors.batching.sequence import Sequence
from genbatch.actors.recording.plan_check import PlanCheck
from genbatch.actors.recording.records import RAISED, Arrived, Encoded, Header
from genbatch.actors.recording.replayed_context import ReplayedContext
from genbatch.actors.runtime.actor import Timer
from genbatch.nif.context import Context
from genbatch.nif.sampling.sampler import Sampled
from genbatch.proto.messages import FinishReason, GenerateRequest, Token


class RecordedDraw(Sampled):
    """A token, and what came of it."""

    __slots__ = ("end",)

    def __init__(self, token_id: int, end: str, logprob: float | None, top: tuple[tuple[int, float], ...]) -> None:
        super().__init__(token_id, logprob, top)
        object.__setattr__(self, "end", end)


class ReplayedArrivals(Arrivals):
    """Lets in what was let in."""

    def _admit(self, message: Generate) -> float | None:
        """After a look at how long requests took."""
        return message.request.deadline_s

    def _encode(self, request: Request) -> None:
        """Its tokens come later."""
        self._num_away += request.wanted.n


class ReplayedBatcher(Batcher):
    """Feed it messages one at a time.

    Args:
        header: of the record.
        options: those of the record, or others to see what they would have changed.
        check: compares.
        open_worker: what stands for its threads.
    """

    arrivals_type = ReplayedArrivals

    def __init__(
        self, header: Header, options: BatcherOptions, check: PlanCheck, open_worker: Callable[[str], Any]
    ) -> None:
        super().__init__(lambda: ReplayedContext(header), options, open_worker=open_worker)
        self._runs_ahead = False
        self._header = header
        self._check = check

    def send_after(self, delay_s: float, message: object) -> Timer:
        """What timers sent is in the record, at the time and in the place where it was handled."""
        return Timer(self._mailbox, message, trio.current_time() + delay_s)

    def find(self, number: int) -> Request | None:
        """An open request."""
        return next((request for request in self.requests if request.number == number), None)

    def _open_intake(self) -> Intake:
        return ReplayedIntake(self._header, self.ctx, self.options)

    def _open_flight(self) -> PlanCheck:
        return self._check


class ReplayedIntake(Intake):
    """Knows the recorded tokens instead of a tokenizer."""

    def __init__(self, header: Header, context: Context, options: BatcherOptions) -> None:
        super().__init__(context.model, options, context.max_positions)
        self._system_prompts = header.system_prompts

    def check(self, wanted: GenerateRequest) -> None:
        """It was found to be fine."""

    def system_prompt(self, content: str) -> list[int]:
        """By its place in the options."""
        return self._system_prompts[int(content)]

    def sequences(self, request: Request, max_tokens: int) -> list[Sequence]:
        made = super().sequences(request, max_tokens)
        for sequence in made:
            sequence.output = ReplayedOutput(sequence.output)
        return made


class ReplayedOutput(Output):
    """Has no text, and ends when the recorded one did."""

    __slots__ = ("raises",)

    def __init__(self, real: Output) -> None:
        tokenizer, prompt_tokens, stop = real._arguments
        super().__init__(tokenizer, prompt_tokens, stop=stop, stop_ids=(), max_tokens=0)
        self.raises = False

    def blank(self) -> "ReplayedOutput":
        return ReplayedOutput(self)

    def push(self, drawn: Sampled) -> str:
        self.token_ids.append(drawn.token_id)
        end = getattr(drawn, "end", "")  # a beam's tokens come together, when it has ended
        self.raises = end == RAISED
        self.finish_reason = cast(FinishReason, end) if end and not self.raises else None
        return ""


def generate_message(arrived: Arrived, raises: Callable[[int], bool]) -> Generate:
    """The call that was recorded, without what concerns text and draws.

    Args:
        arrived: the record.
        raises: tells of a choice whether the caller's function raised at its last token.
    """

    def on_token(token: Token) -> None:
        if raises(token.choice):
            raise RuntimeError("the caller's function raised")

    plain = GenerateRequest()
    dropped = (
        *("stop", "echo", "logprobs", "logit_bias", "response_format", "grammar", "regex", "tools", "tool_choice"),
        *("reasoning", "chat_template_kwargs", "continue_final_message", "keep_stop"),
    )
    wanted = {
        name: getattr(plain if name in dropped else arrived.wanted, name)
        for name in GenerateRequest.__struct_fields__
        if name not in ("prompt", "messages", "token_ids")
    }
    return Generate(
        GenerateRequest(token_ids=[0], **wanted),
        on_token,
        client=arrived.client,
        request_id=arrived.request_id,
        beam_width=arrived.beam_width,
        keep=Keep(context=True) if arrived.scores_prompt else None,
    )


def encoded(message: Encoded) -> "outcome.Outcome[Prompt]":
    """What the tokenizer gave."""
    if message.refusal is not None:
        return outcome.Error(ValueError(message.refusal))
    return outcome.Value(Prompt(message.tokens, message.prefix))
