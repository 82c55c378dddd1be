"""The process in which a tokenizer runs whose expressions nobody has checked; tokenizer_process.py starts it.

The tokenizers package searches with expressions of the model's file, and nothing can interrupt it. So the kernel ends
this process when one text takes more processor time than its limit: SIGPROF ends a process inside of C code, too.
"""

import json
import resource
import signal
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

JOB = struct.Struct("!dI")  # seconds of processor time that it may take, and its bytes of JSON
ANSWER = struct.Struct("!I")  # its bytes of JSON
MAX_ERROR = 300  # characters of an exception's text


def main() -> None:
    """Serves one job after another, the first of which is the tokenizer, until the input closes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # should the machine run out of memory, this process goes first
        Path("/proc/self/oom_score_adj").write_text("1000")
    tokenizer: Tokenizer | None = None
    reading, writing = sys.stdin.buffer, sys.stdout.buffer
    while len(header := reading.read(JOB.size)) == JOB.size:
        limit_s, size = JOB.unpack(header)
        data = reading.read(size)
        # The default action of SIGPROF ends the process.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            if tokenizer is None:
                tokenizer = _load(json.loads(data))
                answer: Any = [None, ""]
            else:
                answer = [_encode(tokenizer, *json.loads(data)), ""]
        except BaseException as fault:  # a panic of the package is no Exception
            answer = [None, (" ".join(str(fault).split()) or type(fault).__name__)[:MAX_ERROR]]
        signal.setitimer(signal.ITIMER_PROF, 0)
        told = json.dumps(answer).encode()
        writing.write(ANSWER.pack(len(told)) + told)
        writing.flush()


def _load(job: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a file, with the tokens that another file adds: a normalizer reads these, too."""
    tokenizer = Tokenizer.from_str(job["tokenizer"])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for token in job["added"]:
        tokenizer.add_tokens([AddedToken(token)])
    return tokenizer


def _encode(tokenizer: Tokenizer, text: str, pair: str | None, add_special_tokens: bool) -> list[Any]:
    found = tokenizer.encode(text, pair, add_special_tokens=add_special_tokens)
    return [found.ids, found.type_ids, found.offsets]
