"""The contents of a flight record: a Header, then one record per message, each followed by the ticks that it caused.

Times are seconds on the event loop's clock. A request's number counts the accepted requests from 1. The file has a
first line, then frames of length, CRC-32 and a record in msgpack.
"""

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import msgspec

from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.scheduling.plan import BatchingType
from genbatch.actors.scheduling.scheduler import PauseOrder, SchedulerPolicy
from genbatch.proto.messages import GenerateRequest

FORMAT = 1


class RecordedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of BatcherOptions that plans depend on."""

    n_parallel: int
    batch_size: int
    max_batch_tokens: int
    fair_share: bool
    priority_ageing_s: float
    scheduler: str
    scheduler_policy: SchedulerPolicy
    batching_type: BatchingType
    cache_budget: int | None
    enable_chunked_context: bool
    margin: float | None
    pause_order: PauseOrder | None
    max_pauses: int
    cpu_offload_space: float
    max_held_prompts: int
    # Older records have the effective deadline in each request.
    default_deadline_s: float = 0.0
    max_answer_s: float = 0.0

    def options(self, system_prompts: Sequence[str], **others: Any) -> BatcherOptions:
        """Return the recorded options, with the changes in `others`."""
        return BatcherOptions(**{**msgspec.structs.asdict(self), "system_prompts": system_prompts, **others})


class RecordedContext(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of the context: sizes, windows and sinks per layer group, other fields as in Context and Model."""

    num_blocks: list[int]
    windows: list[int | None]
    bytes_per_block: list[int]
    block_size: int
    num_sequences: int
    n_batch: int
    n_ctx: int
    max_per_sequence: int | None
    allow_block_sharing: bool
    vocab_size: int
    eos_token_ids: list[int]
    max_position: int
    sink_tokens: list[int] = []


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """The Batcher's state at the start; `system_prompts` are the tokens of the prompts that it held at `time`."""

    format: int
    genbatch: str
    model: str
    began: str
    time: float
    options: RecordedOptions
    context: RecordedContext
    system_prompts: list[list[int]]


class Arrived(msgspec.Struct, frozen=True, kw_only=True, tag="arrived"):
    """A request was accepted; `params` is the request without its prompt.

    `adapter` is the digest of the request's adapter.
    """

    time: float
    request: int
    params: GenerateRequest = msgspec.field(name="wanted")  # its name in the file
    client: str
    request_id: str
    beam_width: int
    scores_prompt: bool
    adapter: str = ""


class EncodedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="encoded"):
    """A prompt was tokenized, or refused by the tokenizer; `prefix` has the tokens of its first message."""

    time: float
    request: int
    tokens: list[int] = []
    prefix: list[int] = []
    refusal: str | None = None


class Left(msgspec.Struct, frozen=True, kw_only=True, tag="left"):
    """A caller has left."""

    time: float
    request: int


class Draw(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The draw of a step's entry: a token and the end of its sequence, or a fault.

    `end` is "" while the sequence continues, and RAISED if the caller's function raised; `top` is set for beams.
    """

    token: int = 0
    end: str = ""
    fault: str | None = None
    by_request: bool = False
    top: list[tuple[int, float]] = []
    logprob: float | None = None


class SteppedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="stepped"):
    """A forward has ended: with a draw or None for each entry, or with the kind of its fault."""

    time: float
    draws: list[Draw | None] = []
    fault: str | None = None
    reason: str = ""


class DrainingRecord(msgspec.Struct, frozen=True, kw_only=True, tag="draining"):
    """New requests are refused from now on."""

    time: float
    timeout_s: float


class DrainOverRecord(msgspec.Struct, frozen=True, kw_only=True, tag="drain_over"):
    """The open requests were cancelled."""

    time: float


class Prompted(msgspec.Struct, frozen=True, kw_only=True, tag="prompted"):
    """A reason for a tick: the accumulation window has ended, or a constraint's mask is ready."""

    time: float


class RecordedEntry(msgspec.Struct, frozen=True, array_like=True):
    """An entry of a forward. Request 0 is a held prompt, and its `choice` identifies the prompt."""

    request: int
    choice: int
    slot: int
    start: int
    num_tokens: int


class TickRecord(msgspec.Struct, frozen=True, kw_only=True, tag="tick"):
    """A plan: its forwards, the paused and the refused units as (request, choice), and the ids that sat out.

    `prompt_budget` has the fields of PromptBudget, if the step had a budget.
    """

    groups: list[list[RecordedEntry]]
    paused: list[tuple[int, int]] = []
    refused: list[tuple[int, int]] = []
    sitting_out: list[int] = []
    prompt_budget: tuple[float, float, float, float] | None = None


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """The recording has ended."""

    time: float
    reason: str


MessageRecord: TypeAlias = (
    Arrived | EncodedRecord | Left | SteppedRecord | DrainingRecord | DrainOverRecord | Prompted | Ended
)
Record: TypeAlias = Header | MessageRecord | TickRecord
RAISED = "raised"


MAGIC = b"genbatch flight record\n"
_FRAME = struct.Struct("<II")
MAX_RECORD = 2**28


class RecordError(Exception):
    """A file is not a flight record, or cannot be played."""


class RecordWriter:
    """Appends records to a new file that only its owner may read; an existing file is never changed.

    Args:
        path: the file; ".1", ".2", … is added if it exists already.
        max_bytes: the limit of the file.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        self.path, self._file = _create(path)
        self._left = max_bytes - self._file.write(MAGIC)
        self._encoder = msgspec.msgpack.Encoder()

    def write(self, record: Record) -> bool:
        """Buffer one record; return False without room for it."""
        data = self._encoder.encode(record)
        self._left -= _FRAME.size + len(data)
        if self._left < 0:
            return False
        self._file.write(_FRAME.pack(len(data), zlib.crc32(data)) + data)
        return True

    def flush(self) -> None:
        """Pass the buffer to the kernel, so that the records outlive the process."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()


def _create(path: str) -> tuple[str, BinaryIO]:
    for number in count():
        name = f"{path}.{number}" if number else path
        try:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        return name, os.fdopen(descriptor, "wb", buffering=2**16)
    raise AssertionError


class RecordReader:
    """The records of a file, up to its end or its first damage; `fault` then describes the damage.

    Args:
        path: the file.

    Raises:
        RecordError: the file is not a flight record.
    """

    def __init__(self, path: Path) -> None:
        self.fault: str | None = None
        try:
            self._data = path.read_bytes()
        except OSError as error:
            raise RecordError(f"{path} cannot be read: {error.strerror}") from error
        if not self._data.startswith(MAGIC):
            raise RecordError(f"{path} is no flight record")

    def __iter__(self) -> Iterator[Record]:
        data, at = memoryview(self._data), len(MAGIC)
        decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
        for number in count(1):
            if at == len(data):
                return
            begin = at + _FRAME.size
            length, check = _FRAME.unpack_from(data, at) if begin <= len(data) else (0, 0)
            if begin > len(data) or (begin + length > len(data) and length <= MAX_RECORD):
                self.fault = f"the file ends inside record {number}, at byte {at} (its writer was killed)"
                return
            payload = data[begin : begin + length]
            if length > MAX_RECORD or zlib.crc32(payload) != check:
                self.fault = f"record {number}, at byte {at}, is damaged; nothing after it is read"
                return
            try:
                yield decoder.decode(payload)
            except msgspec.DecodeError as error:
                self.fault = f"record {number}, at byte {at}, is of another version of genbatch: {error}"
                return
            at = begin + length
