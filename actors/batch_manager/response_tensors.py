"""ResponseTensors: what the batch manager answers with, CPU tensors of the documented shapes."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from genbatch.actors.batch_manager.gpt_engine import GptEngine
from genbatch.actors.batch_manager.gpt_request import GptRequest
from genbatch.proto.messages import Choice, Token

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


class ResponseTensors(NamedTuple):
    """The list of tensors of one response, in the documents' order.

    A whole response holds input and output; beams shorter than the longest are filled up, ids with the pad id and
    numbers with 0. A stream's response holds one token: maxSeqLength and outputLength are 1 in it (0 in a final one
    that brings no token), sequence length counts up, and the context logits come with the first.

    Args:
        output_ids: [1, beamWidth, maxSeqLength] int32, input ids and output ids; a stream's only the new one.
        sequence_length: [1, 1] int32, input and output together; with beams, the longest output's.
        context_logits: [1, promptLength, vocabSizePadded] float32; [1, 1, 1] where they are not gathered.
        generation_logits: [1, beamWidth, outputLength, vocabSizePadded] float32; [1, 1, 1, 1] where not gathered.
        log_probs: [1, beamWidth, outputLength] float32, of the output ids under the model's own distribution.
        cum_log_probs: [1, beamWidth] float32, their sums.
    """

    output_ids: Ints
    sequence_length: Ints
    context_logits: Floats
    generation_logits: Floats
    log_probs: Floats
    cum_log_probs: Floats


def whole_response(request: GptRequest, engine: GptEngine) -> ResponseTensors:
    """Everything a request produced."""
    result = request.result
    assert result is not None and request.message.keep is not None
    first = Choice(text="", token_ids=result.token_ids, finish_reason=result.finish_reason, logprobs=result.logprobs)
    choices = result.choices or (first,)
    width, prompt = request.message.beam_width, request.prompt
    length = max(len(choice.token_ids) for choice in choices)
    ids = np.full((1, width, engine.max_seq_len), request.pad_id, np.int32)
    ids[:, :, : len(prompt)] = prompt
    log_probs = np.zeros((1, width, length), np.float32)
    for beam, choice in enumerate(choices):
        count = len(choice.token_ids)
        ids[0, beam, len(prompt) : len(prompt) + count] = choice.token_ids
        log_probs[0, beam, :count] = [score.logprob for score in choice.logprobs or ()]
    return ResponseTensors(
        ids,
        _sequence_length(len(prompt) + length),
        _context_logits(request, engine),
        _generation_logits(request, engine, length),
        log_probs,
        log_probs.sum(axis=2, dtype=np.float32),
    )


def stream_response(request: GptRequest, token: Token, row: torch.Tensor | None, engine: GptEngine) -> ResponseTensors:
    """One token of a stream.

    Args:
        row: the logits it was chosen from, [vocab_size]; None where they are not kept.
    """
    assert token.logprob is not None
    request.num_sent += 1
    request.cum_logprob = request.cum_logprob + np.float32(token.logprob)
    return ResponseTensors(
        np.array([[[token.token_id]]], np.int32),
        _sequence_length(len(request.prompt) + request.num_sent),
        _context_logits(request, engine) if request.num_sent == 1 else np.zeros((1, 1, 1), np.float32),
        np.zeros((1, 1, 1, 1), np.float32) if row is None else row.numpy()[None, None, None],
        np.array([[[token.logprob]]], np.float32),
        np.array([[request.cum_logprob]], np.float32),
    )


def last_response(request: GptRequest) -> ResponseTensors:
    """The end of a stream that was stopped between two tokens."""
    return ResponseTensors(
        np.zeros((1, 1, 0), np.int32),
        _sequence_length(len(request.prompt) + request.num_sent),
        np.zeros((1, 1, 1), np.float32),
        np.zeros((1, 1, 1, 1), np.float32),
        np.zeros((1, 1, 0), np.float32),
        np.array([[request.cum_logprob]], np.float32),
    )


def _sequence_length(length: int) -> Ints:
    return np.array([[length]], np.int32)


def _context_logits(request: GptRequest, engine: GptEngine) -> Floats:
    if not engine.build.context_logits:
        return np.zeros((1, 1, 1), np.float32)
    assert request.message.keep is not None
    rows = request.message.keep.context_logits()
    if rows is None:  # stopped before its context was evaluated
        return np.zeros((1, 0, engine.engine.model.vocab_size), np.float32)
    logits: Floats = rows.numpy()[None]
    return logits


def _generation_logits(request: GptRequest, engine: GptEngine, length: int) -> Floats:
    if not engine.build.generation_logits:
        return np.zeros((1, 1, 1, 1), np.float32)
    assert request.message.keep is not None
    logits = np.zeros((1, request.message.beam_width, length, engine.engine.model.vocab_size), np.float32)
    for beam in range(request.message.beam_width):
        rows = request.message.keep.generation_logits(beam)
        if rows is not None:
            logits[0, beam, : len(rows)] = rows.numpy()
    return logits
