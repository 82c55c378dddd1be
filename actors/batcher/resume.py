"""Resume: continue a request after the tokens that were drawn for it before, on engines that failed or elsewhere.

    resume.restore(request, is_admitted=True)   # restores its sequences to their state after the last drawn token
    resume.end_complete(request, requests)      # ends the sequences that were already complete

The prompt and the drawn tokens are evaluated again, as after a pause. A draw depends only on the logits, the seed and
the position. All other state of a sequence is a function of its tokens: penalties, the position in a grammar, text
held back for a stop string, calls and thinking. So the tokens are pushed through this state once more, and are not
shown again.
"""

import math
from collections.abc import Sequence as ListOf
from dataclasses import replace

from genbatch.actors.batcher.generation import Generation, GenerationRequest
from genbatch.actors.batcher.open_requests import OpenRequests
from genbatch.actors.batcher.requests import Request, TimeLimits
from genbatch.nif.sampling.sampler import Sampled
from genbatch.proto.drawn import DrawnTokens
from genbatch.proto.errors import EngineLost, InvalidRequest


def time_limits(limits: TimeLimits, drawn: ListOf[DrawnTokens]) -> TimeLimits:
    """Return the limits of a resumed request: the operator's bound on the first wait ends with the first token."""
    return replace(limits, wait_s=None) if any(one.token_ids for one in drawn) else limits


def restore(request: GenerationRequest, *, is_admitted: bool) -> None:
    """Restore the request's new sequences to their earlier state.

    Args:
        is_admitted: see Generate.

    Raises:
        EngineLost: the tokens do not fit this engine: a choice ends before its last token.
        InvalidRequest: the same of tokens that a client has brought.
    """
    if not request.drawn:
        return
    assert len(request.drawn) == len(request.sequences), "as many choices as the request has"
    for sequence, drawn in zip(request.generations, request.drawn, strict=True):
        if is_admitted:
            sequence.turn = -math.inf  # it precedes all waiting sequences
        if drawn.token_ids and not _push_again(sequence, drawn):
            if not is_admitted:
                raise InvalidRequest("drawn", "a choice ends before its last token")
            delivered = sum(len(one.token_ids) for one in request.drawn)
            raise EngineLost("the engine died, and the next one ends the answer before its last token", delivered)


def _push_again(sequence: Generation, drawn: DrawnTokens) -> bool:
    """Push the tokens through the sequence's state; return False if they end it before the last one."""
    output, sampler = sequence.output, sequence.sampler
    sequence.num_shown = len(drawn.token_ids)
    # A prompt with scores must be evaluated even if the answer is complete, so its last token is drawn again.
    token_ids = drawn.token_ids[:-1] if sequence.scores_prompt else drawn.token_ids
    for index, token_id in enumerate(token_ids):
        if output.finish_reason is not None:
            return False
        logprob, top = drawn.logprobs[index] if drawn.logprobs else (None, {})
        # guard: a sampler counts the tokens of a dead engine
        sampler.accept(token_id)
        # guard: text follows that of a dead engine
        output.push(Sampled(token_id, logprob, tuple(top.items())))
    output.keep_call_ids(drawn.call_ids)
    sequence.tokens += token_ids
    sequence.num_generated = len(token_ids)
    return True


def end_complete(request: Request, requests: OpenRequests) -> None:
    """End the sequences that were complete when the engine failed."""
    for sequence in request.sequences:
        if sequence.final_reason is not None:
            requests.finish(sequence, sequence.final_reason)
