"""TextCalls: answers Tokenize and Detokenize, long ones from the tokenizer's thread."""

from collections.abc import Callable
from typing import Any

import outcome

from genbatch.actors.batching.batcher_messages import Detokenize, Tokenize
from genbatch.actors.batching.intake import Intake
from genbatch.actors.runtime.actor import From, reply, reply_error
from genbatch.actors.runtime.worker import Worker
from genbatch.proto.errors import EngineError, GenbatchError
from genbatch.proto.messages import Text, TokenIds

# What takes longer than some milliseconds would hold up every other caller.
INLINE_TOKEN_IDS = 2048


class TextCalls:
    """Calls that need the tokenizer and no model.

    Args:
        intake: knows vocabulary and template.
        worker: the tokenizer's thread.
        inline_chars: prompts with more characters are tokenized on the thread.
    """

    def __init__(self, intake: Intake, worker: Worker, inline_chars: int) -> None:
        self._intake = intake
        self._worker = worker
        self._inline_chars = inline_chars

    def answer(self, message: Tokenize | Detokenize, from_: "From[Any]") -> None:
        """Replies, now or from the thread."""
        try:
            if isinstance(message, Tokenize):
                self._intake.check_tokenize(message.request)
                is_long = self._intake.size(message.request) > self._inline_chars
            else:
                self._intake.check_detokenize(message.request)
                is_long = len(message.request.token_ids) > INLINE_TOKEN_IDS
        except GenbatchError as error:
            reply_error(from_, error)
            return
        job = self._job(message)
        if is_long:
            # Whoever has left by its turn costs nobody the time.
            self._worker.submit(lambda: job() if from_.alive else None, on_done=lambda result: _reply(from_, result))
        else:
            _reply(from_, outcome.capture(job))

    def _job(self, message: Tokenize | Detokenize) -> Callable[[], TokenIds | Text]:
        intake = self._intake
        if isinstance(message, Tokenize):
            wanted = message.request
            return lambda: TokenIds(token_ids=intake.tokenize(wanted))
        ids = message.request
        return lambda: Text(text=intake.detokenize(ids))


def _reply(from_: "From[Any]", result: "outcome.Outcome[TokenIds | Text | None]") -> None:
    if not from_.alive:
        return
    try:
        reply(from_, result.unwrap())
    except GenbatchError as error:
        reply_error(from_, error)
    except Exception as error:  # a tokenizer that chokes on a text fails that call
        reply_error(from_, EngineError(f"tokenizing failed: {error}"))
