"""PromptReader: tokenizes prompts. A prompt that takes long delays no other request.

short text                     cut into tokens at once
long text                      on the tokenizer's thread
conversation                   rendered by the chat template first, in a process of its own (nif/text/templates.py)
    the template takes long    a thread waits for that process, then the tokenizer's thread goes on
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
# Seconds that the event loop waits for a chat template, which takes 0.0001 for most conversations of that length.
INLINE_RENDER_S = 0.005
# And the tokenizer's thread, for longer conversations.
LONG_RENDER_S = 0.02


@dataclass(frozen=True, slots=True)
class ReadJob(Generic[T]):
    """What is to be read.

    Args:
        begin: starts the chat template; returns None where there is no conversation.
        finish: cuts the text into tokens.
        size: characters that there are.
        client: takes turns with others at the tokenizer's thread; "" where a call asks for nothing but tokens or text.
    """

    begin: Callable[[], ChatPrompt | None]
    finish: Callable[[ChatPrompt | None], T]
    size: int
    client: str = ""


class PromptReader:
    """Used on the event loop.

    Args:
        worker: the tokenizer's thread.
        open_worker: makes the threads that wait for chat templates.
        inline_chars: texts with more characters are read on the thread.
    """

    def __init__(
        self, worker: Worker, open_worker: Callable[[str], Worker], inline_chars: int = INLINE_PROMPT_CHARS
    ) -> None:
        self._worker = worker
        self._turns = SharedWorker(worker)
        self._open_worker = open_worker
        self._inline_chars = inline_chars
        self._waiting: list[Worker] = []  # threads, all of them
        self._free: list[Worker] = []  # those that wait for nothing

    def read(
        self, reading: ReadJob[T], on_done: Callable[["outcome.Outcome[T]"], object]
    ) -> "outcome.Outcome[T] | None":
        """The outcome where it is there at once; else None, and `on_done` gets it."""
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
        """Reads off the event loop; `on_done` gets the outcome there."""

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
        """Ends the threads; each waits for its template, which has its limits."""
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
    """Something to read that is no conversation."""
    return ReadJob(lambda: None, partial(_ignoring_prompt, job), size, client)


def _ignoring_prompt(job: Callable[[], T], _: ChatPrompt | None) -> T:
    return job()
