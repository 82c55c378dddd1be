"""Resume: a request that engines began which have died goes on after the tokens that it had drawn.

    resume.restore(request)                     # its sequences are as they were after the last of these tokens
    resume.end_complete(request, requests)      # those that had ended end again

The prompt and the drawn tokens are evaluated anew, as after a pause. A draw depends on the logits, the seed and the
position alone. Everything else that a sequence remembers is a function of its tokens: penalties, the place in a
grammar, text that a stop string holds back, calls and thinking. So the tokens are pushed through it once more, and
nothing is shown of them.
"""

import math
from collections.abc import Sequence as ListOf
from dataclasses import replace

from genbatch.actors.batcher.generation import Generation, GenerationRequest
from genbatch.actors.batcher.messages import DrawnTokens
from genbatch.actors.batcher.open_requests import OpenRequests
from genbatch.actors.batcher.requests import Request, TimeLimits
from genbatch.nif.sampling.sampler import Sampled
from genbatch.proto.errors import EngineLost


def time_limits(limits: TimeLimits, drawn: ListOf[DrawnTokens]) -> TimeLimits:
    """The limits of a request that goes on: the operator's bound on the first wait is over once a token was drawn."""
    return replace(limits, wait_s=None) if any(one.token_ids for one in drawn) else limits


def restore(request: GenerationRequest) -> None:
    """Brings the request's new sequences to where they were.

    Raises:
        EngineLost: its tokens cannot be those of this engine: a text of them had ended before the last one.
    """
    if not request.drawn:
        return
    assert len(request.drawn) == len(request.sequences), "as many choices as the request has"
    for sequence, drawn in zip(request.generations, request.drawn, strict=True):
        sequence.turn = -math.inf  # it came before everything that waits here
        if drawn.token_ids:
            _push_again(sequence, drawn)


def _push_again(sequence: Generation, drawn: DrawnTokens) -> None:
    output, sampler = sequence.output, sequence.sampler
    sequence.num_shown = len(drawn.token_ids)
    # A prompt that is to be scored must be evaluated, even where the answer is complete: its last token is drawn again.
    token_ids = drawn.token_ids[:-1] if sequence.scores_prompt else drawn.token_ids
    for index, token_id in enumerate(token_ids):
        if output.finish_reason is not None:
            delivered = sum(len(one.token_ids) for one in sequence.request.drawn)
            raise EngineLost("the engine died, and the next one ends the answer before its last token", delivered)
        logprob, top = drawn.logprobs[index] if drawn.logprobs else (None, {})
        # guard: a sampler counts the tokens of a dead engine
        sampler.accept(token_id)
        # guard: text follows that of a dead engine
        output.push(Sampled(token_id, logprob, tuple(top.items())))
    output.keep_call_ids(drawn.call_ids)
    sequence.tokens += token_ids
    sequence.num_generated = len(token_ids)


def end_complete(request: Request, requests: OpenRequests) -> None:
    """End the sequences that were complete when the engine died."""
    for sequence in request.sequences:
        if sequence.final_reason is not None:
            requests.finish(sequence, sequence.final_reason)
