"""PromptReader: tokenize prompts without delaying other requests.

short text                     tokenized at once
long text                      tokenized on the tokenizer's thread
conversation                   first rendered by the chat template, in another process (nif/text/templates.py)
    slow template              a thread waits for that process, then the tokenizer's thread continues
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import outcome

from genbatch.actors.runtime.worker import SharedWorker, Worker
from genbatch.nif.text.tokenizer import ChatPrompt

T = TypeVar("T")

# Prompts with more characters than this are tokenized off the event loop.
INLINE_PROMPT_CHARS = 8192
# Seconds that the event loop waits for a chat template. Most conversations of that length take 0.0001 s.
INLINE_RENDER_S = 0.005
# Seconds that the tokenizer's thread waits for a chat template, for longer conversations.
LONG_RENDER_S = 0.02


@dataclass(frozen=True, slots=True)
class ReadJob(Generic[T]):
    """A text or a conversation to tokenize.

    Args:
        begin: starts the chat template; returns None for a text.
        finish: tokenizes the text.
        size: the number of characters.
        client: the account for turns at the tokenizer's thread; "" for a call for tokens or text only.
    """

    begin: Callable[[], ChatPrompt | None]
    finish: Callable[[ChatPrompt | None], T]
    size: int
    client: str = ""


class PromptReader:
    """Tokenizes prompts; use it on the event loop.

    Args:
        worker: the tokenizer's thread.
        open_worker: makes the threads that wait for chat templates.
        inline_chars: texts with more characters are tokenized on the thread.
    """

    def __init__(
        self, worker: Worker, open_worker: Callable[[str], Worker], inline_chars: int = INLINE_PROMPT_CHARS
    ) -> None:
        self._worker = worker
        self._turns = SharedWorker(worker)
        self._open_worker = open_worker
        self._inline_chars = inline_chars
        self._waiting: list[Worker] = []  # all threads
        self._free: list[Worker] = []  # idle threads

    def read(
        self, reading: ReadJob[T], on_done: Callable[["outcome.Outcome[T]"], object]
    ) -> "outcome.Outcome[T] | None":
        """Return the outcome if it is available at once; else return None, and call `on_done` with it later."""
        if reading.size > self._inline_chars:
            self.submit(reading, on_done)
            return None
        begun = outcome.capture(reading.begin)
        if isinstance(begun, outcome.Error):
            return begun
        prompt = begun.value
        if prompt is None:
            return outcome.capture(reading.finish, None)
        if not self._worker.wait(prompt.rendering.wait, INLINE_RENDER_S):
            self._set_aside(reading, prompt, on_done)
            return None
        if prompt.num_characters > self._inline_chars:
            self._turns.submit(reading.client, partial(reading.finish, prompt), on_done=on_done)
            return None
        return outcome.capture(reading.finish, prompt)

    def submit(self, reading: ReadJob[T], on_done: Callable[["outcome.Outcome[T]"], object]) -> None:
        """Tokenize off the event loop; `on_done` gets the outcome on the event loop."""

        def work() -> tuple[ChatPrompt | None, Any]:
            prompt = reading.begin()
            if prompt is None or prompt.rendering.wait(LONG_RENDER_S):
                return None, reading.finish(prompt)
            return prompt, None

        def done(result: "outcome.Outcome[tuple[ChatPrompt | None, Any]]") -> None:
            if isinstance(result, outcome.Error):
                on_done(result)
                return
            prompt, value = result.unwrap()
            if prompt is None:
                on_done(outcome.Value(value))
            else:
                self._set_aside(reading, prompt, on_done)

        self._turns.submit(reading.client, work, on_done=done)

    async def close(self) -> None:
        """End the threads after their current templates, which have time limits."""
        for waiting in self._waiting:
            await waiting.close()

    def _set_aside(
        self, reading: ReadJob[T], prompt: ChatPrompt, on_done: Callable[["outcome.Outcome[T]"], object]
    ) -> None:
        if not self._free:
            self._free.append(self._open_worker("genbatch-template"))
            self._waiting.append(self._free[0])
        waiting = self._free.pop()

        def rendered(_: "outcome.Outcome[bool]") -> None:
            self._free.append(waiting)
            self._turns.submit(reading.client, partial(reading.finish, prompt), on_done=on_done)

        waiting.submit(prompt.rendering.wait, on_done=rendered)


def without_template(job: Callable[[], T], size: int, client: str = "") -> ReadJob[T]:
    """Return a job for a text without a chat template."""
    return ReadJob(lambda: None, partial(_ignoring_prompt, job), size, client)


def _ignoring_prompt(job: Callable[[], T], _: ChatPrompt | None) -> T:
    return job()
