"""The Batcher's calls that are not requests: tokenizing and detokenizing, session files, and adapters.

Adapters are loaded and unloaded while requests run. An adapter is read on its own thread, then prepared beside the
steps, so only its caller waits. Unloading an adapter refuses new requests at once. Accepted requests run to their end
or until `timeout_s`. Then, between two steps, the adapter's held prompts are dropped and its memory is freed.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import outcome

from genbatch.actors.batcher.arrivals import PromptReader, without_template
from genbatch.actors.batcher.intake import CHARS_PER_TOKEN, Intake
from genbatch.actors.batcher.messages import LoadSession, SaveSession
from genbatch.actors.batcher.open_requests import BatchState, End, Work
from genbatch.actors.batcher.requests import HeldPrompt, ReadJob, Request
from genbatch.actors.batcher.session_files import SessionFiles
from genbatch.actors.batcher.slots import HeldPrompts
from genbatch.actors.runtime.actor import From, Timer, reply, reply_error
from genbatch.actors.runtime.worker import Worker
from genbatch.nif.context import Context
from genbatch.nif.errors import AdapterError, BatchError, OutOfBlocks
from genbatch.nif.kv.block_pool import prefix_key
from genbatch.nif.runner import LoraAdapter
from genbatch.nif.text.tokenizer import ChatPrompt
from genbatch.proto.errors import (
    GenbatchError,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    Unavailable,
    to_genbatch_error,
)
from genbatch.proto.messages import (
    DetokenizeRequest,
    KeepSessionRequest,
    ResumeSessionRequest,
    SessionState,
    Text,
    TokenIds,
    TokenizeRequest,
)
from genbatch.proto.service_messages import Drained, LoadAdapterRequest, UnloadAdapterRequest


class TextCalls:
    """Calls that need the tokenizer and not the model.

    Args:
        intake: knows the vocabulary and the chat template.
        reader: tokenizes prompts.
    """

    def __init__(self, intake: Intake, reader: PromptReader) -> None:
        self.intake = intake
        self._reader = reader
        self._jobs: dict[type, Callable[[Any, From[Any]], ReadJob[TokenIds | Text | None]]] = {
            TokenizeRequest: self._tokenizing,
            DetokenizeRequest: self._text,
        }

    def read_messages(
        self, request: TokenizeRequest, client: str, on_done: "Callable[[outcome.Outcome[list[int]]], object]"
    ) -> None:
        """Tokenize a conversation off the event loop; `on_done` gets the token ids on the event loop.

        Args:
            client: the account for turns at the tokenizer's thread.

        Raises:
            GenbatchError: the conversation is refused.
        """
        intake = self.intake
        intake.check_text(request)
        begin, finish = partial(intake.start_text, request), partial(intake.token_ids, "")
        self._reader.submit(ReadJob(begin, finish, intake.text_size(request), client), on_done)

    def answer(self, message: object, from_: "From[Any]") -> None:
        """Reply now or later."""
        try:
            reading = self._jobs[type(message)](message, from_)
        except GenbatchError as error:
            reply_error(from_, error)
            return

        def done(result: "outcome.Outcome[TokenIds | Text | None]") -> None:
            _reply(from_, result, "tokenizing failed")

        result = self._reader.read(reading, done)
        if result is not None:
            done(result)

    def _tokenizing(self, request: TokenizeRequest, from_: "From[Any]") -> ReadJob[TokenIds | Text | None]:
        intake = self.intake
        intake.check_text(request)

        # A call that was cancelled before its turn takes no time from other calls.
        def begin() -> ChatPrompt | None:
            return intake.start_text(request) if from_.alive else None

        def finish(prompt: ChatPrompt | None) -> TokenIds | None:
            if not from_.alive:
                return None
            tokens = intake.token_ids(request.prompt or "", prompt, add_special_tokens=request.add_special_tokens)
            written = request.prompt if prompt is None else prompt.text
            return TokenIds(token_ids=tokens, text=written if request.return_text else None)

        return ReadJob(begin, finish, intake.text_size(request))

    def _text(self, request: DetokenizeRequest, from_: "From[Any]") -> ReadJob[TokenIds | Text | None]:
        intake = self.intake

        def text() -> Text | None:
            if not from_.alive:
                return None
            intake.check_detokenize(request)
            return Text(text=intake.detokenize(request))

        return without_template(text, CHARS_PER_TOKEN * len(request.token_ids))


# Milliseconds after which to retry. By then, requests that hold blocks may have ended.
RETRY_AFTER_BLOCKS_MS = 1000
SESSION_FAULT = "the session's KV cannot be copied"
FILE_FAULT = "the session cannot be written"


@dataclass(frozen=True, slots=True)
class SessionRead:
    """The conversation of a session call was tokenized."""

    message: SaveSession
    from_: "From[Any]"
    tokens: "outcome.Outcome[list[int]]"
    deliver: "Callable[[outcome.Outcome[Any]], None]"


@dataclass(frozen=True, slots=True)
class WorkEnded:
    """Work that needed the context to itself is done; `end` books the outcome."""

    end: Callable[[], None]


@dataclass(frozen=True, slots=True)
class SavedState:
    """A saved conversation: its number of positions, and the bytes of `seq_save`; empty for no positions."""

    positions: int
    state: bytes


@dataclass(frozen=True, slots=True)
class SessionFileRead:
    """The file of a session was read."""

    request: ResumeSessionRequest
    from_: "From[Any]"
    state: "outcome.Outcome[bytes]"


Deliver: TypeAlias = "Callable[[outcome.Outcome[Any]], None]"
# The most sessions in memory, which are being read or written. Each may take a gigabyte.
MAX_SESSION_FILES = 2


class SessionCalls:
    """Session calls, which wait for a free context. `next` runs on the event loop; its work runs on the worker thread.

    A loaded conversation is held like a shared prompt: the next request with this prefix does not evaluate it again.

    Args:
        ctx: the context that holds the sequences.
        held_prompts: stores loaded conversations, and lends its slots to a call while it runs.
        texts: tokenizes conversations; its intake knows the adapters.
        send: delivers SessionRead and SessionFileRead to the actor that owns this object.
        files: the operator's folder; None if there is none.
        open_worker: makes the thread that reads and writes files, on the first call.
    """

    def __init__(
        self,
        ctx: Context,
        held_prompts: HeldPrompts,
        texts: TextCalls,
        send: Callable[[SessionRead | SessionFileRead], None],
        files: SessionFiles | None,
        open_worker: Callable[[str], Worker],
    ) -> None:
        self._ctx = ctx
        self._held_prompts = held_prompts
        self._texts = texts
        self._intake = texts.intake
        self._send = send
        self._files = files
        self._open_worker = open_worker
        self._worker: Worker | None = None
        self._num_files = 0
        self._reading: list[From[Any]] = []
        self.calls: deque[tuple[Callable[[], tuple[Work, End]], From[Any], Deliver]] = deque()

    def save(self, message: SaveSession, from_: "From[Any]") -> None:
        """Take a call to save a session; the reply follows after its conversation was tokenized and `next` ran it."""
        try:
            self._tokenize(
                message, from_, lambda saved: _reply(from_, saved, SESSION_FAULT, lambda saving: saving.state)
            )
        except GenbatchError as error:
            reply_error(from_, error)

    def _tokenize(self, message: SaveSession, from_: "From[Any]", deliver: Deliver) -> None:
        def tokenized(tokens: "outcome.Outcome[list[int]]") -> None:
            self._send(SessionRead(message, from_, tokens, deliver))

        self._texts.read_messages(TokenizeRequest(messages=message.messages), message.tenant, tokenized)
        self._reading.append(from_)

    def load(self, message: LoadSession, from_: "From[Any]", deliver: "Deliver | None" = None) -> None:
        """Take a call to load a session; the reply follows once `next` has run the call.

        Args:
            deliver: takes the outcome in place of the caller.
        """
        deliver = deliver or (lambda length: _reply(from_, length, SESSION_FAULT))
        self.calls.append((partial(self._loading, message), from_, deliver))

    def read(self, message: SessionRead) -> None:
        """Continue a call after its conversation was tokenized."""
        self._reading.remove(message.from_)
        saving = partial(self._saving, message.message, message.tokens)
        self.calls.append((saving, message.from_, message.deliver))

    def keep(self, request: KeepSessionRequest, from_: "From[Any]") -> None:
        """Take a call to keep a session in the operator's folder."""
        files, worker = self._begin_file(from_)

        def written(size: "outcome.Outcome[int]", positions: int) -> None:
            self._num_files -= 1
            _reply(from_, size, FILE_FAULT, lambda num_bytes: SessionState(positions=positions, num_bytes=num_bytes))

        def saved(result: "outcome.Outcome[SavedState]") -> None:
            try:
                state = result.unwrap()
            except Exception as error:
                written(outcome.Error(error), 0)
                return
            if not state.state:
                written(outcome.Value(0), 0)
                return
            worker.submit(files.write, request, state.state, on_done=lambda size: written(size, state.positions))

        try:
            self._tokenize(SaveSession(request.messages, request.tenant, request.model), from_, saved)
        except GenbatchError:
            self._num_files -= 1
            raise

    def resume(self, request: ResumeSessionRequest, from_: "From[Any]") -> None:
        """Take a call to load a session of the operator's folder; `file_read` continues it."""
        files, worker = self._begin_file(from_)
        worker.submit(files.read, request, on_done=lambda state: self._send(SessionFileRead(request, from_, state)))

    def file_read(self, message: SessionFileRead) -> None:
        """Continue a call after its file was read."""

        def loaded(length: "outcome.Outcome[int]", size: int) -> None:
            def session() -> SessionState:
                try:
                    return SessionState(positions=length.unwrap(), num_bytes=size)
                except InvalidRequest as error:
                    raise InvalidRequest("name", error.message) from error

            self._num_files -= 1
            _reply(message.from_, outcome.capture(session), SESSION_FAULT)

        try:
            state, request = message.state.unwrap(), message.request
        except Exception as error:
            loaded(outcome.Error(error), 0)
            return
        load = LoadSession(state, request.tenant, request.model)
        self.load(load, message.from_, lambda length: loaded(length, len(state)))

    def _begin_file(self, from_: "From[Any]") -> tuple[SessionFiles, Worker]:
        """Count a call that needs a file.

        Raises:
            InvalidRequest: the service keeps no sessions.
            QueueFull: too many files are in work.
        """
        if self._files is None:
            raise InvalidRequest(None, "this service keeps no sessions: its operator has named no session_dir")
        # guard: sessions in memory
        if self._num_files >= MAX_SESSION_FILES:
            raise QueueFull("other sessions are being kept or resumed", retry_after_ms=RETRY_AFTER_BLOCKS_MS)
        if self._worker is None:
            self._worker = self._open_worker("genbatch-sessions")
        self._num_files += 1
        return self._files, self._worker

    async def close(self) -> None:
        """End the thread."""
        if self._worker is not None:
            await self._worker.close()

    def next(self) -> tuple[Work, End]:
        """Return the next call's work, and the function that takes the outcome of that work."""
        call = self.calls.popleft()
        prepare, _, deliver = call
        try:
            work, end = prepare()
        except Exception as error:  # the conversation cannot be read, or no slot is free
            failed = outcome.Error(error)
            return lambda: None, lambda _: deliver(failed)

        def finish(result: "outcome.Outcome[Any]") -> None:
            end(result)
            if isinstance(result, outcome.Error) and isinstance(result.error, Unavailable) and self._drop_oldest():
                self.calls.appendleft(call)  # unused sessions must not refuse a new one: the oldest makes room
            else:
                deliver(result)

        return work, finish

    def end_all(self, error: GenbatchError) -> None:
        """Reply to every call with an error."""
        for from_ in [*self._reading, *[from_ for _, from_, _ in self.calls]]:
            reply_error(from_, error)
        self._reading.clear()
        self.calls.clear()

    def _saving(self, message: SaveSession, prompt: "outcome.Outcome[list[int]]") -> tuple[Work, End]:
        adapter, key = self._owner(message)
        tokens = prompt.unwrap()[: self._ctx.max_positions]
        donor = self._held_prompts.find(tokens, key, adapter)
        slot = self._slot(donor)
        ctx = self._ctx

        def save() -> SavedState:
            if donor is not None and donor.ready and donor.seq_id is not None:
                ctx.seq_cp(donor.seq_id, slot)
            ctx.attach_prefix(slot, tokens, key)
            positions = ctx.kv.length(slot)
            return SavedState(positions, ctx.seq_save(slot, adapter) if positions else b"")

        def end(_: "outcome.Outcome[Any]") -> None:
            ctx.seq_rm(slot)
            self._held_prompts.return_slot(slot)

        return save, end

    def _loading(self, message: LoadSession) -> tuple[Work, End]:
        adapter, key = self._owner(message)
        slot = self._slot()
        ctx = self._ctx

        def load() -> int:
            try:
                return ctx.seq_load(slot, message.state, key, adapter)
            except BatchError as error:
                raise InvalidRequest("state", str(error)) from error
            except OutOfBlocks as error:
                if error.needed > max(ctx.kv.num_blocks):
                    raise InvalidRequest("state", str(error)) from error
                raise Unavailable(f"{error}: others hold them", retry_after_ms=RETRY_AFTER_BLOCKS_MS) from error

        def end(result: "outcome.Outcome[Any]") -> None:
            if isinstance(result, outcome.Error):
                ctx.seq_rm(slot)
                self._held_prompts.return_slot(slot)
                return
            prompt = self._intake.held_prompt(list(ctx.kv.tokens(slot)), key, adapter)
            self._held_prompts.adopt(prompt, slot)
            self._held_prompts.used(prompt)

        return load, end

    def _owner(self, message: SaveSession | LoadSession) -> tuple[LoraAdapter | None, bytes]:
        """Return the adapter that evaluates the conversation, and the key of its blocks."""
        adapter = self._intake.adapter(message.model)
        return adapter, prefix_key(message.tenant, "" if adapter is None else adapter.digest)

    def _slot(self, needed: HeldPrompt | None = None) -> int:
        """Return a free slot; drop the least recently used prompt if there is none.

        Raises:
            Unavailable: every slot holds a prompt that must stay.
        """
        slot = self._held_prompts.take_slot()
        if slot is None and self._drop_oldest(needed):
            slot = self._held_prompts.take_slot()
        if slot is None:
            raise Unavailable("no sequence is free to hold the session")
        return slot

    def _drop_oldest(self, needed: HeldPrompt | None = None) -> bool:
        """Drop the least recently used prompt besides `needed`; returns whether there was one."""
        oldest = self._held_prompts.least_recent(besides=needed)
        if oldest is not None:
            self._ctx.seq_rm(self._held_prompts.drop(oldest))
        return oldest is not None


def _reply(
    from_: "From[Any]", result: "outcome.Outcome[Any]", fault: str, answer: Callable[[Any], Any] = lambda value: value
) -> None:
    """Reply to a caller that is still connected; a fault of a call ends this call only.

    Args:
        answer: makes the answer from the result's value.
    """
    if not from_.alive:
        return
    try:
        reply(from_, answer(result.unwrap()))
    except Exception as error:
        reply_error(from_, to_genbatch_error(error, fault))


@dataclass(frozen=True, slots=True)
class AdapterReady:
    """An adapter was read and packed, or reading it failed."""

    name: str
    adapter: "outcome.Outcome[LoraAdapter]"


@dataclass(frozen=True, slots=True)
class UnloadOver:
    """The timeout of an UnloadAdapterRequest has passed."""

    name: str


@dataclass(slots=True)
class _Unloading:
    """An adapter that is being unloaded."""

    adapter: LoraAdapter
    callers: "list[From[Any]]"
    timer: Timer
    cancelled: int = 0


@dataclass(slots=True)
class AdapterCalls:
    """Load and unload adapters; see the module's docstring. Use this object on the event loop.

    Args:
        state: the Batcher's shared state, with the context that holds the adapters.
        open_worker: makes the thread that reads adapters, on the first load.
        send: delivers AdapterReady to the actor that owns this object.
        send_after: delivers UnloadOver after a number of seconds.
        on_change: called when an adapter was added or removed.
    """

    state: BatchState
    open_worker: Callable[[str], Worker]
    send: Callable[[AdapterReady], None]
    send_after: Callable[[float, UnloadOver], Timer]
    on_change: Callable[[], None]
    _loading: "dict[str, From[Any]]" = field(default_factory=dict)
    unloading: dict[str, _Unloading] = field(default_factory=dict)
    _worker: Worker | None = None

    # Loading

    def load(self, request: LoadAdapterRequest, from_: "From[Any]") -> None:
        """Begin to read an adapter; `ready` leads to the reply."""
        try:
            if request.name in self._loading:
                raise InvalidRequest("name", f"an adapter {request.name!r} is being loaded")
            with _naming_path():
                self.state.ctx.adapters.check(request.name)
        except GenbatchError as error:
            reply_error(from_, error)
            return
        self._loading[request.name] = from_
        if self._worker is None:
            self._worker = self.open_worker("genbatch-adapters")
        self._worker.submit(
            self._read,
            request.name,
            Path(request.path),
            on_done=lambda adapter: self.send(AdapterReady(request.name, adapter)),
        )

    def ready(self, message: AdapterReady) -> "From[Any] | None":
        """Serve a loaded adapter; return the caller to reply to, or None after the caller got an error."""
        from_ = self._loading.pop(message.name)
        try:
            with _naming_path():
                self.state.ctx.add_adapter(message.adapter.unwrap())
        except Exception as error:  # a runner without memory for it raises, too
            reply_error(from_, to_genbatch_error(error, "loading it failed"))
            return None
        self.on_change()
        return from_

    def _read(self, name: str, path: Path) -> LoraAdapter:
        adapter = self.state.ctx.adapters.read(name, path)
        self.state.ctx.prepare_adapter(adapter)
        return adapter

    # Unloading

    def unload(self, request: UnloadAdapterRequest, from_: "From[Any]") -> None:
        """Refuse new requests for an adapter; `settle` replies to the caller."""
        try:
            if request.name not in self.state.ctx.adapters:
                loaded = ", ".join(self.state.ctx.adapters) or "none"
                raise ModelNotFound(f"no adapter {request.name[:128]!r} is loaded; there is {loaded}", field="name")
        except GenbatchError as error:
            reply_error(from_, error)
            return
        going = self.unloading.get(request.name)
        timer = self.send_after(request.timeout_s, UnloadOver(request.name))
        if going is not None:  # the shortest timeout applies
            going.callers.append(from_)
            if timer.deadline < going.timer.deadline:
                timer, going.timer = going.timer, timer
            timer.cancel()
            return
        self.unloading[request.name] = _Unloading(self.state.ctx.adapters[request.name], [from_], timer)
        self.state.ctx.adapters.retire(request.name)
        self.on_change()

    def over(self, message: UnloadOver) -> None:
        """Cancel the open requests of an adapter after its timeout."""
        going = self.unloading.get(message.name)
        for request in self._with(going.adapter) if going is not None else ():
            if request.abandoned is None:
                request.abandoned = "cancelled"
                assert going is not None
                going.cancelled += 1

    def can_settle(self) -> bool:
        """Return whether an adapter to unload has no open request."""
        return any(not self._with(going.adapter) for going in self.unloading.values())

    def settle(self) -> bool:
        """Free unloaded adapters without open requests, between two steps; return whether a held prompt was dropped."""
        has_dropped = False
        for name, going in list(self.unloading.items()):
            if self._with(going.adapter):
                continue
            for prompt in [prompt for prompt in self.state.held_prompts if prompt.adapter is going.adapter]:
                self.state.slots.drop_held(prompt)
                has_dropped = True
            self.state.ctx.drop_adapter(going.adapter)
            going.timer.cancel()
            del self.unloading[name]
            for from_ in going.callers:
                reply(from_, Drained(num_cancelled=going.cancelled))
        return has_dropped

    async def close(self) -> None:
        """Reply to every caller with an error, since the actor stops."""
        callers = [*self._loading.values(), *(from_ for going in self.unloading.values() for from_ in going.callers)]
        for from_ in callers:
            reply_error(from_, Unavailable("the batcher has stopped"))
        self._loading.clear()
        self.unloading.clear()
        if self._worker is not None:
            await self._worker.close()

    def _with(self, adapter: LoraAdapter) -> list[Request]:
        return [request for request in self.state.requests if request.adapter is adapter]


@contextmanager
def _naming_path() -> Iterator[None]:
    """Turn an error of the adapter's files into one that names the request's field `path`."""
    try:
        yield
    except AdapterError as error:
        raise InvalidRequest("path", str(error)) from error
