"""The process that runs a tokenizer with unchecked expressions; tokenizer_process.py starts it.

The tokenizers package searches with expressions of the model's file, and nothing can interrupt it. So the kernel ends
this process if one text exceeds its processor time. SIGPROF also ends a process inside C code.
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

JOB = struct.Struct("!dI")  # the limit in seconds of processor time, and the number of bytes of JSON
ANSWER = struct.Struct("!I")  # the number of bytes of JSON
MAX_ERROR = 300  # characters of an exception's text


def main() -> None:
    """Serve one job after another until the input closes. The first job loads the tokenizer."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # if the machine runs out of memory, this process is killed first
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
        except BaseException as fault:  # a panic of the package does not derive from Exception
            answer = [None, (" ".join(str(fault).split()) or type(fault).__name__)[:MAX_ERROR]]
        signal.setitimer(signal.ITIMER_PROF, 0)
        payload = json.dumps(answer).encode()
        writing.write(ANSWER.pack(len(payload)) + payload)
        writing.flush()


def _load(job: dict[str, Any]) -> Tokenizer:
    """Load the tokenizer of a file, with another file's added tokens, because the normalizer reads these, too."""
    tokenizer = Tokenizer.from_str(job["tokenizer"])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for token in job["added"]:
        tokenizer.add_tokens([AddedToken(token)])
    return tokenizer


def _encode(tokenizer: Tokenizer, text: str, pair: str | None, add_special_tokens: bool) -> list[Any]:
    encoding = tokenizer.encode(text, pair, add_special_tokens=add_special_tokens)
    return [encoding.ids, encoding.type_ids, encoding.offsets]
