"""The processes that run chat templates. templates.py starts them and sends them jobs.

There are three kinds. Each is forked from the previous kind, has one socket to the parent, and ends when that closes.

    root      imports jinja2 and loads no model: forks a keeper for each tokenizer
    keeper    compiles the tokenizer's templates, once: forks workers
    worker    renders one job after another

A fork of such a small process takes a millisecond, so replacing a killed worker delays no request. A template comes
from a model's file and may be malicious. So compiling and rendering have limits of processor time and memory
(limited_process.py).

The environment is that of transformers' `apply_chat_template`, which takes half a second and 45 MB to import.
"""

import gc
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from genbatch.nif.limited_process import address_space, harden, limited

FORK, KILL, YIELD, COMPILE, RENDER = b"F", b"K", b"Y", b"C", b"R"
HEADER = struct.Struct("!cI")  # the command, and a child's number or the number of following bytes
LENGTH = struct.Struct("!I")  # the number of bytes of an answer

COMPILE_S = 2.0
# Most templates take less than a millisecond, and ten milliseconds for a conversation of a megabyte.
RENDER_S = 0.25
RENDER_S_PER_BYTE = 4e-6
MAX_MEMORY = 128 * 2**20  # bytes beyond what the process has when it starts
MEMORY_PER_BYTE = 32
# Most characters of all prompts of a job.
MAX_PROMPT = 2**20
PROMPT_PER_BYTE = 16
MAX_ERROR = 300  # characters of an exception's text
NICENESS = 15  # for a slow worker, because the model has priority

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def main() -> None:
    """Run the root process; its argument is its socket."""
    harden()
    serve(socket.socket(fileno=int(sys.argv[1])), {})


def serve(parent: socket.socket, templates: dict[str, jinja2.Template]) -> None:
    """Run the parent's commands until the parent closes the socket.

    Args:
        templates: the templates that the forking process has compiled.
    """
    children = _Children(parent, templates)
    memory = address_space()
    while True:
        header, sockets = _receive_header(parent)
        if header is None:
            return
        kind, number = HEADER.unpack(header)
        if kind == FORK:
            children.fork(number, sockets)
            continue
        if kind in (KILL, YIELD):
            children.signal(kind, number)
            continue
        data = _receive(parent, number)
        if kind == COMPILE:
            with limited(COMPILE_S, memory + MAX_MEMORY):
                answer = _compile(json.loads(data), templates)
        else:
            with limited(RENDER_S + RENDER_S_PER_BYTE * number, memory + MAX_MEMORY + MEMORY_PER_BYTE * number):
                answer = _render(json.loads(data), templates, MAX_PROMPT + PROMPT_PER_BYTE * number)
        parent.sendall(LENGTH.pack(len(answer)) + answer)


class _Children:
    """Processes forked from this one. An ended child stays a zombie until the next call, so its id is not reused."""

    def __init__(self, parent: socket.socket, templates: dict[str, jinja2.Template]) -> None:
        self._parent = parent
        self._templates = templates
        self._pids: dict[int, int] = {}

    def fork(self, number: int, sockets: Sequence[int]) -> None:
        """Fork a child that serves on the socket that came with the message."""
        self._reap()
        gc.freeze()  # otherwise a collection in the child would copy every page
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                self._parent.close()
                serve(socket.socket(fileno=sockets[0]), self._templates)
            os._exit(0)
        self._pids[number] = pid
        for descriptor in sockets:
            os.close(descriptor)

    def signal(self, kind: bytes, number: int) -> None:
        """Kill a child, or lower its priority."""
        self._reap()
        pid = self._pids.get(number)
        if pid is None:
            return  # the child has ended
        if kind == KILL:
            os.kill(pid, signal.SIGKILL)
        else:
            os.setpriority(os.PRIO_PROCESS, pid, NICENESS)

    def _reap(self) -> None:
        for number, pid in list(self._pids.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._pids[number]


def _receive_header(parent: socket.socket) -> tuple[bytes | None, Sequence[int]]:
    try:
        header, sockets, _, _ = socket.recv_fds(parent, HEADER.size, 1)
    except ConnectionError:
        return None, ()
    if not header:
        return None, ()
    return header + _receive(parent, HEADER.size - len(header)), sockets


def _receive(parent: socket.socket, size: int) -> bytes:
    if not size:
        return b""
    data = parent.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        sys.exit()  # the parent is gone
    return data


# Commands of a keeper and a worker


def _compile(sources: dict[str, str], templates: dict[str, jinja2.Template]) -> bytes:
    """Compile the templates; returns for each its variables and "", or no variables and the reason of the refusal."""
    environment = _environment()
    answer: dict[str, tuple[list[str], str]] = {}
    for name, source in sources.items():
        try:
            templates[name] = environment.from_string(source)
            answer[name] = sorted(jinja2.meta.find_undeclared_variables(environment.parse(source))), ""
        except Exception as fault:  # of any kind: the model's file has the compiled text
            answer[name] = [], _error_text(fault)
    return json.dumps(answer).encode()


def _render(job: dict[str, Any], templates: dict[str, jinja2.Template], most: int) -> bytes:
    """Render conversations; returns for each the prompt and "", or "" and a reason; last, whether memory ran out."""
    template = templates[job["template"]]
    answer: list[tuple[str, str]] = []
    has_memory = True
    for messages in job["conversations"]:
        try:
            prompt = _prompt(template, messages, job["variables"], goes_on=job["goes_on"])
            most -= len(prompt)
            if most < 0:
                raise ValueError("the prompt that it writes is too long")
            answer.append((prompt, ""))
        except MemoryError:
            has_memory = False
            answer.append(("", "it takes too much memory"))
        except Exception as fault:  # of any kind: the model's file has the code that runs
            answer.append(("", _error_text(fault)))
    return json.dumps([answer, has_memory]).encode()


def _error_text(fault: Exception) -> str:
    """Return an exception's text, cut to one line."""
    try:
        text = str(fault)
    except Exception:
        text = ""
    return (text[:MAX_ERROR] + "…" if len(text) > MAX_ERROR else text) or type(fault).__name__


def _prompt(
    template: jinja2.Template, messages: list[dict[str, Any]], variables: dict[str, Any], *, goes_on: bool
) -> str:
    """Render as `apply_chat_template` does; a continued prompt ends within the last message."""
    messages = [_with_reasoning(message) for message in messages]
    if not goes_on:
        return template.render(messages=messages, add_generation_prompt=True, **variables)
    final = messages[-1]["content"]
    messages[-1]["content"] = final + _CONTINUE_TAG
    text = template.render(messages=messages, add_generation_prompt=False, **variables)
    place = text.rfind(_CONTINUE_TAG.strip())
    if place < 0 or final.strip() not in text:
        raise ValueError("it does not write the last message as it is, so that cannot be continued")
    is_whole = text[place : place + len(_CONTINUE_TAG)] == _CONTINUE_TAG
    return text[:place] if is_whole else text[:place].rstrip()


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning under the names that templates read, and without fields that are None."""
    message = {name: value for name, value in message.items() if value is not None}
    reasoning = next((message[name] for name in _REASONING_FIELDS if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Generation(jinja2.ext.Extension):
    """Renders transformers' block {% generation %}, which marks the model's output, as its content."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """Forbids names that begin with an underscore, as transformers does."""

    def __init__(*args: Any, **named: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **named)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")


class _Dict:
    """`dict` without the attributes of the class."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **named)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)  # a template writes the local date


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment
