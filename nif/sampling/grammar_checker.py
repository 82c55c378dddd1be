"""GrammarChecker: compiles a grammar in a child process first, because a child process can be killed.

llguidance's own limits bound most grammars, but some short regular expressions take seconds to compile. The child
compiles under limits of processor time and memory, which the kernel enforces.

Both sides write one JSON value per line: first the settings, then grammars and answers in turn.
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

MAX_MEMORY = 512 * 2**20  # bytes that the child may grow by for one grammar


class GrammarChecker:
    """Starts the child with the first grammar at the latest, and again after a child was killed. Use it from one thread
    at a time.

    Args:
        settings: the argument of `build_tokenizer`.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._child: subprocess.Popen[bytes] | None = None

    def check(self, kind: str, text: str, max_s: float) -> tuple[str | None, str]:
        """Compile a grammar in the child.

        Args:
            max_s: the limit in seconds of processor time.

        Returns:
            The grammar in llguidance's form and "", or None and the reason of the refusal.
        """
        self.start()
        answer = self._ask({"kind": kind, "text": text, "max_s": max_s})
        if answer is None:
            self.close()
            return None, f"takes more than {max_s:g} s or {MAX_MEMORY >> 20} MiB to compile"
        return answer["grammar"], answer["error"]

    def close(self) -> None:
        """End the child."""
        if self._child is None:
            return
        self._child.kill()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # the child is gone, and unread input with it
                pipe.close()
        self._child.wait()
        self._child = None

    def start(self) -> None:
        """Start the child, unless there is one, and wait until it has imported its libraries."""
        if self._child is not None:
            return
        command = [sys.executable, "-m", "genbatch.nif.sampling.grammar_checker"]
        # Start a new session, so that the terminal's Ctrl-C does not reach the child.
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._write(self._settings)

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the child's answer; None if the child died."""
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
            pass  # reading the answer will find the child dead


def main() -> None:
    """Run the child: answer until the input ends, or until a signal ends the child at a limit."""
    from genbatch.nif.sampling.grammar import build_tokenizer, compile_matcher, convert

    # Ignore signals: the parent ends this child. A service manager sends SIGTERM to all processes of a service, and
    # requests that still drain may need a grammar.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)  # the model has priority; the limit counts processor time, so waiting costs nothing
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = build_tokenizer(json.loads(source.readline()))
    for line in source:
        question = json.loads(line)
        _limit_memory()
        # The default action of SIGPROF ends the process in any code.
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
    """Limit the process's growth to MAX_MEMORY; without /proc/self/statm there is no limit."""
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
