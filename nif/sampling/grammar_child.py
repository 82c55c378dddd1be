"""The process that compiles each grammar first; grammar_compiler.py starts it.

llguidance's own limits bound most grammars, but some short regular expressions take seconds to compile. So the kernel
ends this process if one grammar exceeds its processor time or memory.
"""

import os
from typing import Any

from llguidance import LLTokenizer

from genbatch.nif.limited_process import serve
from genbatch.nif.sampling.grammar import build_tokenizer, compile_matcher, convert


def main() -> None:
    """Serve one job after another. The first job has the settings of the tokenizer.

    The other answers are the grammar in llguidance's form and "", or None and the reason of the refusal.
    """
    os.nice(10)  # the model has priority; the limit counts processor time, so waiting costs nothing
    tokenizers: list[LLTokenizer] = []

    def answer(job: dict[str, Any]) -> list[str | None] | None:
        if not tokenizers:
            tokenizers.append(build_tokenizer(job))
            return [None, ""]
        try:
            grammar = convert(job["kind"], job["text"])
            compile_matcher(tokenizers[0], grammar).prepare()
        except ValueError as error:
            return [None, str(error)]
        return [grammar, ""]

    serve(answer)
