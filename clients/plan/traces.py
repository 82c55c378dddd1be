"""Traces: the requests' arrival times, lengths and shared prefixes.

    trace = read_trace(Path("conversation_trace.jsonl"))     # or chat_trace(TraceOptions(rate=50)), agents_trace, ...

A file has one JSON object per line, in the format of Mooncake's open traces:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in milliseconds. Each id names one block of `block_tokens` tokens (512 in those traces) together with
all blocks before it. Our own format has two more optional fields. Blocks of one `tenant` are not shared with other
tenants. `answer_ids` names the whole blocks of prompt and answer together, with which the next turn begins.
"""

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

# Tokens per block in Mooncake's files and in the generated traces.
FILE_BLOCK, MADE_BLOCK = 512, 64


class TraceError(Exception):
    """A trace cannot be read or made; the message says which line, or which value, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace.

    Args:
        at: arrival in seconds from the trace's start.
        prompt, output: numbers of tokens.
        blocks: names of the prompt's whole blocks; a name covers the tenant and all earlier blocks.
        answered: names of the following whole blocks of prompt and answer.
        tenant: the request's tenant.
    """

    at: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()
    answered: tuple[int, ...] = ()
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival.

    Args:
        block_tokens: tokens per named block.
    """

    name: str
    block_tokens: int
    requests: Sequence[TraceRequest]

    @property
    def duration_s(self) -> float:
        """Return the arrival of the last request in seconds."""
        return self.requests[-1].at


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """The options of generated traces.

    Args:
        rate: average requests per second.
        duration_s: the trace's duration in seconds.
        scale: multiplies every length; a value below 1 suits a small model.
        tenants: number of tenants; each request's tenant is drawn evenly.
    """

    rate: float = 10.0
    duration_s: float = 600.0
    seed: int = 20260101
    scale: float = 1.0
    tenants: int = 1

    def __post_init__(self) -> None:
        for name in ("rate", "duration_s", "scale", "tenants"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise TraceError(f"{name}: must be above 0, not {value:g}")


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []
    answer_ids: list[int] = []
    tenant: str = ""


def read_trace(path: Path, block_tokens: int = FILE_BLOCK) -> Trace:
    """Read a file and sort its requests by timestamp.

    Raises:
        TraceError: the file cannot be read, or a line is no request.
    """
    requests, decoder = [], msgspec.json.Decoder(_Line)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        if line.input_length < 1 or line.output_length < 1 or not 0 <= line.timestamp < math.inf:
            raise TraceError(f"{path}, line {number}: lengths start at 1 and times at 0")
        whole = line.input_length // block_tokens
        requests.append(
            TraceRequest(
                at=line.timestamp / 1e3,
                prompt=line.input_length,
                output=line.output_length,
                # The last block of a prompt is rarely whole, and only whole blocks are shared.
                blocks=_of_tenant(line.hash_ids[:whole], line.tenant),
                answered=_of_tenant(line.answer_ids, line.tenant),
                tenant=line.tenant,
            )
        )
    if not requests:
        raise TraceError(f"{path}: holds no requests")
    requests.sort(key=lambda request: request.at)
    return Trace(path.stem, block_tokens, requests)


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace for `read_trace` with the same block size."""
    with path.open("w") as file:
        for request in trace.requests:
            line = {
                "timestamp": round(request.at * 1e3, 3),
                "input_length": request.prompt,
                "output_length": request.output,
                "hash_ids": request.blocks,
            }
            if request.answered:
                line["answer_ids"] = request.answered
            if request.tenant:
                line["tenant"] = request.tenant
            file.write(json.dumps(line) + "\n")


def chat_trace(options: TraceOptions) -> Trace:
    """Generate chats: 40 applications with a system prompt each, some turns per chat, half a minute between turns."""
    draw = random.Random(f"chat {options.seed}")
    lengths = _Lengths(draw, options.scale)
    systems = [lengths.lognormal(300, 0.6, 2000) for _ in range(40)]
    mean_turns = 3.0

    def conversation(at: float, names: "_Names") -> Iterator[TraceRequest]:
        app = draw.choices(range(40), weights=[1 / (rank + 1) for rank in range(40)])[0]
        names.extend(f"app {app}", systems[app])
        while True:
            names.extend(None, lengths.lognormal(60, 1.0, 1024))
            request = names.request(at, lengths.lognormal(180, 0.8, 1024))
            yield request
            if draw.random() < 1 / mean_turns:
                return
            at += draw.expovariate(1 / 30)

    return _sessions("chat", options, draw, conversation, mean_turns, warm_s=300.0)


def agents_trace(options: TraceOptions) -> Trace:
    """Generate agents' tasks: 30 kinds of agents with some thousand tokens of instructions and tools each.

    A task has ten calls, some seconds apart. Each call has the whole task so far and a tool's result as its prompt.
    """
    draw = random.Random(f"agents {options.seed}")
    lengths = _Lengths(draw, options.scale)
    instructions = [lengths.lognormal(3000, 0.5, 8000) for _ in range(30)]
    mean_calls = 10.0

    def task(at: float, names: "_Names") -> Iterator[TraceRequest]:
        kind = draw.choices(range(30), weights=[1 / (rank + 1) for rank in range(30)])[0]
        names.extend(f"agent {kind}", instructions[kind])
        names.extend(None, lengths.lognormal(200, 0.8, 2000))
        while True:
            yield names.request(at, lengths.lognormal(80, 0.7, 500))
            if draw.random() < 1 / mean_calls:
                return
            names.extend(None, lengths.lognormal(250, 1.0, 3000))
            at += draw.expovariate(1 / 4)

    return _sessions("agents", options, draw, task, mean_calls, warm_s=120.0)


def batch_trace(options: TraceOptions) -> Trace:
    """Generate a batch; all prompts arrive at the start, with equal instructions, a document and a short answer."""
    draw = random.Random(f"batch {options.seed}")
    lengths = _Lengths(draw, options.scale)
    instructions = lengths.scaled(512)

    def session(at: float, names: "_Names") -> Iterator[TraceRequest]:
        names.extend("instructions", instructions)
        names.extend(None, lengths.lognormal(600, 0.7, 4000))
        yield names.request(0.0, lengths.lognormal(100, 0.5, 400))

    return _sessions("batch", options, draw, session, 1.0, warm_s=0.0)


MADE: dict[str, Callable[[TraceOptions], Trace]] = {"chat": chat_trace, "agents": agents_trace, "batch": batch_trace}


class _Lengths:
    def __init__(self, draw: random.Random, scale: float) -> None:
        self._draw, self._scale = draw, scale

    def scaled(self, length: float) -> int:
        return max(1, round(length * self._scale))

    def lognormal(self, median: float, sigma: float, cap: int) -> int:
        return self.scaled(min(cap, median * self._draw.lognormvariate(0.0, sigma)))


class _Names:
    """Names the blocks of one session; its prompt only grows."""

    def __init__(self, tenant: str, draw: random.Random) -> None:
        self._tenant, self._draw = tenant, draw
        self._parent = hash_of(tenant)
        self._names: list[int] = []
        self.num_tokens = 0

    def extend(self, what: str | None, length: int) -> None:
        """Add tokens. Equal `what` after equal prefixes gives equal block names; None gives unique names."""
        self.num_tokens += length
        self._parent = hash_of(what or str(self._draw.getrandbits(60)), self._parent)
        while len(self._names) < self.num_tokens // MADE_BLOCK:
            self._names.append(hash_of(str(len(self._names)), self._parent))

    def request(self, at: float, output: int) -> TraceRequest:
        """Make the request at this point, and add its answer to the session."""
        blocks, prompt = tuple(self._names), self.num_tokens
        self.extend(None, output)
        return TraceRequest(
            at=at,
            prompt=prompt,
            output=output,
            blocks=blocks,
            answered=tuple(self._names[len(blocks) :]),
            tenant=self._tenant,
        )


def _sessions(
    name: str,
    options: TraceOptions,
    draw: random.Random,
    session: Callable[[float, _Names], Iterator[TraceRequest]],
    mean_requests: float,
    *,
    warm_s: float,
) -> Trace:
    """Draw the starts of sessions. The first begins `warm_s` before the trace, so that the trace starts under load."""
    requests: list[TraceRequest] = []
    at = -warm_s
    while (at := at + draw.expovariate(options.rate / mean_requests)) < options.duration_s:
        tenant = "" if options.tenants == 1 else f"tenant {draw.randrange(options.tenants)}"
        requests += session(at, _Names(tenant, draw))
    # Cut the sessions at the trace's end; otherwise the load would fade out.
    requests = [request for request in requests if 0 <= request.at < options.duration_s]
    if not requests:
        raise TraceError(f"rate: {options.rate:g} a second brings no request in {options.duration_s:g} s")
    requests.sort(key=lambda request: request.at)
    return Trace(name, MADE_BLOCK, requests)


def hash_of(text: str, parent: int = 0) -> int:
    """Return a hash of 60 bits that is equal in every process, unlike `hash`."""
    return int.from_bytes(blake2b(f"{parent} {text}".encode(), digest_size=8).digest()) >> 4


def _of_tenant(ids: Sequence[int], tenant: str) -> tuple[int, ...]:
    return tuple(ids) if not tenant else tuple(hash_of(tenant, name) for name in ids)
