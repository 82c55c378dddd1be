"""TemplateRenderer: renders chat templates in processes that can be ended.

    renderer = TemplateRenderer({"default": source})
    rendering = renderer.start("default", [messages], variables)      # returns at once
    if rendering.wait(0.005):                                         # else it continues, soon at low priority
        prompt = rendering.prompt(0)

A template is a program from a model's file: it may loop, or allocate too much memory. So a process renders it, under
limits of processor time and memory (template_child.py). The next rendering gets another worker, so no rendering waits
behind a slow one.
"""

import atexit
import json
import os
import select
import socket
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import count
from threading import RLock
from typing import Any

from genbatch.nif.errors import NativeError
from genbatch.nif.limited_process import start_child
from genbatch.nif.text.template_child import (
    COMPILE,
    COMPILE_S,
    FORK,
    HEADER,
    KILL,
    LENGTH,
    MAX_MEMORY,
    MAX_PROMPT,
    MEMORY_PER_BYTE,
    PROMPT_PER_BYTE,
    RENDER,
    RENDER_S,
    RENDER_S_PER_BYTE,
    YIELD,
)

# Most bytes of a template's source; the longest known source has 20 kB.
MAX_SOURCE = 2**20
# Most renderings at once. One more ends the oldest.
MAX_RENDERINGS = 8
# Seconds after which a rendering gets a low priority.
YIELD_S = 0.05
# Idle workers: one for the next rendering, and a spare for when that rendering is slow.
MAX_IDLE = 2
# The timeout of a rendering in wall time, for a machine too busy to grant its processor time.
MAX_WAIT_S = 30.0
# A worker that has processed more than this many bytes is not reused, because it keeps the memory.
MAX_REUSED = 2**18
_CHARACTER_BYTES = 12  # most bytes of one character in JSON


class ChatTemplateError(NativeError):
    """A conversation cannot become a prompt: the model has no template, or its template refuses it."""


class NothingToContinue(ChatTemplateError):
    """The last message cannot be continued: it has no content, or the template writes none."""


class TemplateEnded(ChatTemplateError):
    """A rendering was ended to make room for others; the caller may retry the conversation."""


class _Node:
    """This process's end of the socket to one of the processes of template_child.py."""

    def __init__(self, parent: "_Node | None", number: int = 0) -> None:
        self._parent = parent
        self._number = number
        self._numbers = count(1)
        self._lock = RLock()  # keeps each message whole while several threads send
        ours, theirs = socket.socketpair()
        self.socket = ours
        with theirs:
            try:
                if parent is None:
                    self._process = start_child(
                        "genbatch.nif.text.template_child",
                        str(theirs.fileno()),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                    )
                else:
                    parent._tell(FORK, number, theirs)
            except OSError:
                ours.close()
                raise

    def fork(self) -> "_Node":
        """Fork a child of this node.

        Raises:
            OSError: the node has ended.
        """
        return _Node(self, next(self._numbers))

    def kill(self) -> None:
        """Kill the process, even in the middle of a job."""
        self._tell_parent(KILL)

    def yield_to_others(self) -> None:
        """Lower the process's priority."""
        self._tell_parent(YIELD)

    def send(self, kind: bytes, payload: bytes) -> None:
        """Send a job; blocks only if the job is larger than the socket's buffer.

        Raises:
            OSError: the process has ended.
        """
        self.socket.settimeout(MAX_WAIT_S)
        self.socket.sendall(HEADER.pack(kind, len(payload)) + payload)

    def close(self) -> None:
        """End the process and its children once they are idle."""
        self.socket.close()
        if self._parent is None:
            self._process.wait()

    def _tell_parent(self, kind: bytes) -> None:
        assert self._parent is not None
        with suppress(OSError):  # then it has ended already
            self._parent._tell(kind, self._number)

    def _tell(self, kind: bytes, number: int, hand_over: socket.socket | None = None) -> None:
        with self._lock:
            sockets = [] if hand_over is None else [hand_over.fileno()]
            socket.send_fds(self.socket, [HEADER.pack(kind, number)], sockets)


@lru_cache(maxsize=1)
def _root(_process_id: int) -> _Node:
    """Return this process's root. A fork of this process gets a root of its own."""
    node = _Node(None)
    atexit.register(node.close)
    return node


def _new_keeper() -> _Node:
    for _ in range(2):
        root = _root(os.getpid())
        try:
            return root.fork()
        except OSError:  # it was killed from outside
            _root.cache_clear()
            atexit.unregister(root.close)
            root.close()
    raise ChatTemplateError("the process that renders chat templates ends as soon as it is started")


class TemplateRenderer:
    """Renders the chat templates of one tokenizer. The processes start at the first use and end with this object.

    Threads may share a renderer.

    Args:
        sources: the templates by name.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._fitting = {name: source for name, source in sources.items() if len(source) <= MAX_SOURCE}
        self._lock = RLock()
        self._keeper: _Node | None = None
        self._idle: list[_Node] = []
        self._running: list[Rendering] = []
        self._answer: _Answer | None = None
        self._compiled: dict[str, tuple[list[str], str]] = {}  # its variables, and the reason of a refusal
        self._open: set[_Node] = set()
        weakref.finalize(self, _close_all, self._open)

    def prepare(self) -> None:
        """Start the processes and the compilation of the templates, without waiting for them."""
        with self._lock:
            if self._keeper is not None:
                return
            self._keeper = keeper = _new_keeper()
            self._open.add(keeper)
            self._answer = _Answer(keeper)
            with suppress(OSError):  # `_compile` will notice the ended process
                keeper.send(COMPILE, json.dumps(self._fitting).encode())

    def fault(self, name: str) -> str:
        """Return the reason why a template cannot be compiled; "" if it can."""
        return self._facts(name)[1]

    def variables(self, name: str) -> frozenset[str]:
        """Return the variables of a template; empty if the template cannot be compiled."""
        return frozenset(self._facts(name)[0])

    def start(
        self,
        name: str,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        variables: Mapping[str, Any],
        *,
        goes_on: bool = False,
    ) -> "Rendering":
        """Start rendering conversations with one template, one after another.

        Args:
            goes_on: whether the prompts end within their last message.

        Raises:
            ChatTemplateError: the template cannot be compiled, or the conversations cannot be written as JSON.
            NothingToContinue: the last message has no content, or the template does not name it.
        """
        if self.fault(name):
            raise ChatTemplateError(f"the model's chat template cannot be compiled: {self.fault(name)}")
        if goes_on:
            self._check_goes_on(name, conversations)
        job = {"template": name, "conversations": conversations, "variables": variables, "goes_on": goes_on}
        try:
            payload = json.dumps(job, default=_placeholder).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatTemplateError(f"a conversation for a chat template must be JSON: {error}") from error
        with self._lock:
            if len(self._running) >= MAX_RENDERINGS:
                self._running[0].end_for_others()
            worker = self._take_worker()
            rendering = Rendering(self, worker, len(payload))
            self._running.append(rendering)
        with suppress(OSError):  # the waiting caller will notice the ended process
            worker.send(RENDER, payload)
        return rendering

    def _check_goes_on(self, name: str, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Refuse to continue the messages that transformers refuses: the cut could fall inside a message's JSON."""
        if any(conversation[-1].get("content") is None for conversation in conversations):
            raise NothingToContinue("the last message has no content to continue")
        if "content" not in self._sources[name]:
            raise NothingToContinue("the model's chat template does not name `content`, so no message can be continued")

    def _facts(self, name: str) -> tuple[list[str], str]:
        with self._lock:
            if not self._compiled:
                self._compile()
        return self._compiled[name]

    def _compile(self) -> None:
        compiled: dict[str, tuple[list[str], str]] = dict.fromkeys(
            self._sources, ([], f"its source has more than {MAX_SOURCE} characters")
        )
        fault = f"it takes more than {COMPILE_S:g} s or {MAX_MEMORY >> 20} MiB"
        compiled.update(dict.fromkeys(self._fitting, ([], fault)))
        for _ in range(2):  # the first process may have been killed from outside
            self.prepare()
            assert self._keeper is not None and self._answer is not None
            if self._answer.receive(MAX_WAIT_S) and self._answer.value is not None:
                compiled.update(self._answer.value)
                break
            self._keeper.kill()
            self._close(self._keeper)
            self._keeper = None
        self._compiled = compiled

    def _take_worker(self) -> _Node:
        worker = None
        while self._idle and worker is None:
            worker = self._idle.pop()
            if _has_ended(worker):
                self._close(worker)
                worker = None
        worker = worker or self._fork()
        if not self._idle:  # the next one comes while this one works
            self._idle.append(self._fork())
        return worker

    def _fork(self) -> _Node:
        for _ in range(2):
            self.prepare()
            assert self._keeper is not None
            try:
                worker = self._keeper.fork()
            except OSError:  # it was killed from outside
                self._close(self._keeper)
                self._keeper = None
            else:
                self._open.add(worker)
                return worker
        raise ChatTemplateError("the process that renders chat templates ends as soon as it is started")

    def _ended(self, rendering: "Rendering", worker: _Node, *, reusable: bool) -> None:
        with self._lock:
            if rendering in self._running:
                self._running.remove(rendering)
            if reusable and len(self._idle) < MAX_IDLE:
                self._idle.append(worker)
            else:
                self._close(worker)

    def _close(self, node: _Node) -> None:
        self._open.discard(node)
        node.close()


def _close_all(nodes: set[_Node]) -> None:
    for node in nodes:
        node.close()


def _has_ended(worker: _Node) -> bool:
    return bool(select.select([worker.socket], [], [], 0)[0])


def _placeholder(value: object) -> str:
    """Convert an object that JSON lacks to the value that a template sees, as transformers does."""
    return f"<{type(value).__name__}>"


class _Answer:
    """A process's answer to its job."""

    def __init__(self, node: _Node, most: int = 2**24) -> None:
        self._socket = node.socket
        self._most = most  # bytes
        self._data = bytearray()
        self._size = LENGTH.size
        self._has_length = False
        self.value: Any = None  # None if the process ended without an answer
        self.is_there = False  # True also if the process has ended

    def receive(self, timeout_s: float) -> bool:
        """Wait for the answer; returns whether it has arrived."""
        until = time.monotonic() + timeout_s
        while not self.is_there:
            self._socket.settimeout(max(until - time.monotonic(), 0.0))
            try:
                data = self._socket.recv(self._size - len(self._data))
            except (TimeoutError, BlockingIOError):
                return False
            except OSError:
                data = b""
            self._take(data)
        return True

    def _take(self, data: bytes) -> None:
        self._data += data
        if not data:
            self.is_there = True
        elif len(self._data) == self._size:
            if self._has_length:
                self.is_there = True
                with suppress(ValueError, RecursionError):
                    self.value = json.loads(self._data)
            else:
                self._has_length = True
                self._size = LENGTH.unpack(self._data)[0]
                self._data.clear()
                self.is_there = self._size > self._most


class Rendering:
    """A worker's job; one thread at a time may wait for it."""

    def __init__(self, renderer: TemplateRenderer, worker: _Node, size: int) -> None:
        self._renderer = renderer
        self._worker = worker
        self._size = size  # bytes
        most = _CHARACTER_BYTES * (MAX_PROMPT + PROMPT_PER_BYTE * size)
        self._answer = _Answer(worker, most)
        began = time.monotonic()
        self._yields_at = began + YIELD_S
        self._until = began + MAX_WAIT_S
        self._has_yielded = False
        self._makes_room = False
        self._is_done = False
        self._prompts: list[tuple[str, str]] = []

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the rendering has ended; returns whether it has.

        Args:
            timeout_s: the timeout in seconds.
        """
        if self._is_done:
            return True
        now = time.monotonic()
        until = self._until if timeout_s is None else min(self._until, now + timeout_s)
        is_there = self._answer.receive(min(until, self._yields_at) - now)
        if not is_there and until > self._yields_at:
            if not self._has_yielded:
                self._worker.yield_to_others()
                self._has_yielded = True
            is_there = self._answer.receive(until - time.monotonic())
        if not is_there and until == self._until:
            self._worker.kill()
            is_there = True
        if is_there:
            self._finish()
        return is_there

    @property
    def num_characters(self) -> int:
        """Return the length of all prompts in characters. Call this after `wait` has returned True."""
        return sum(len(text) for text, _ in self._prompts)

    def prompt(self, index: int) -> str:
        """Return the prompt of one conversation. Call this after `wait` has returned True.

        Raises:
            TemplateEnded: the rendering was ended to make room for others.
            ChatTemplateError: the template refuses the conversation, or exceeds a limit.
        """
        assert self._is_done
        if self._prompts:
            text, fault = self._prompts[index]
            if not fault:
                return text
            raise ChatTemplateError(f"the model's chat template refuses these messages: {fault}")
        if self._makes_room:
            raise TemplateEnded("the model's chat template took too long while other conversations waited")
        seconds = RENDER_S + RENDER_S_PER_BYTE * self._size
        memory = MAX_MEMORY + MEMORY_PER_BYTE * self._size >> 20
        raise ChatTemplateError(
            f"the model's chat template takes more than {seconds:.2g} s or {memory} MiB for these messages"
        )

    def end_for_others(self) -> None:
        """Kill the worker. The caller that waits for it gets an error."""
        self._makes_room = True
        self._renderer._running.remove(self)
        self._worker.kill()

    def _finish(self) -> None:
        self._is_done = True
        reusable = False
        if self._answer.value is not None:
            self._prompts, has_memory = self._answer.value
            reusable = has_memory and not self._has_yielded and self._size < MAX_REUSED
        self._renderer._ended(self, self._worker, reusable=reusable)
