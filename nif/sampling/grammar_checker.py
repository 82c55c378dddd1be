"""GrammarChecker: tries a grammar in a process that can be killed, before this one compiles it.

llguidance's own limits bound most grammars, but not all: there are regular expressions of a few bytes that it compiles
for seconds. The child compiles under a limit of processor time and memory, which the kernel enforces.

Both sides write one JSON value a line: first the settings, then grammars and answers in turn.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

MAX_MEMORY = 512 * 2**20  # bytes that one grammar may take beyond what the child had before


class GrammarChecker:
    """Starts the child when it is first needed, and again after one was killed. One caller at a time.

    Args:
        settings: what `build_tokenizer` takes.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._child: subprocess.Popen[bytes] | None = None

    def check(self, kind: str, text: str, max_s: float) -> tuple[str | None, str]:
        """Compiles a grammar in the child.

        Args:
            max_s: seconds of processor time.

        Returns:
            The grammar in llguidance's form and "", or None and why it is refused.
        """
        if self._child is None:
            self._start()
        answer = self._ask({"kind": kind, "text": text, "max_s": max_s})
        if answer is None:
            self.close()
            return None, f"takes more than {max_s:g} s or {MAX_MEMORY >> 20} MiB to compile"
        return answer["grammar"], answer["error"]

    def close(self) -> None:
        """Ends the child."""
        if self._child is None:
            return
        self._child.kill()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what it did not read is lost with it
                pipe.close()
        self._child.wait()
        self._child = None

    def _start(self) -> None:
        command = [sys.executable, "-m", "genbatch.nif.sampling.grammar_checker"]
        # A session of its own: the terminal's Ctrl-C is not for it.
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._write(self._settings)

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any] | None:
        """The child's answer; None if it died over it."""
        assert self._child is not None and self._child.stdout is not None
        self._write(question)
        line = self._child.stdout.readline()
        if not line.endswith(b"\n"):
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _write(self, value: Mapping[str, Any]) -> None:
        assert self._child is not None and self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(value).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            pass  # its end shows when the answer is read


def main() -> None:
    """The child: answers until its input ends, or until a signal ends it over a grammar."""
    from genbatch.nif.sampling.grammar import build_tokenizer, compile_matcher, convert

    # The parent ends it by closing its input. A service manager's SIGTERM goes to all processes of a service, and the
    # requests that are still served may need a grammar.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)  # the model goes first; the limit counts processor time, however long that takes to get
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = build_tokenizer(json.loads(source.readline()))
    for line in source:
        question = json.loads(line)
        _limit_memory()
        # The default action of SIGPROF ends the process, whatever code it is in.
        signal.setitimer(signal.ITIMER_PROF, question["max_s"])
        try:
            grammar = convert(question["kind"], question["text"])
            compile_matcher(tokenizer, grammar).prepare()
            answer: dict[str, str | None] = {"grammar": grammar, "error": ""}
        except ValueError as error:
            answer = {"grammar": None, "error": str(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write_line(sink, answer)


def _limit_memory() -> None:
    """Lets the process grow by MAX_MEMORY from where it is; only where the kernel tells where that is."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MAX_MEMORY, hard))


def _write_line(sink: IO[bytes], value: Mapping[str, Any]) -> None:
    sink.write(json.dumps(value).encode() + b"\n")
    sink.flush()


if __name__ == "__main__":
    main()
