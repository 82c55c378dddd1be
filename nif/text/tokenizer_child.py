"""The process that runs a tokenizer with unchecked expressions; tokenizer_process.py starts it.

The tokenizers package searches with expressions of the model's file, and nothing can interrupt it. So the kernel ends
this process if one text exceeds its processor time.
"""

from typing import Any

from tokenizers import AddedToken, Tokenizer

from genbatch.nif.limited_process import serve

MAX_ERROR = 300  # characters of an exception's text


def main() -> None:
    """Serve one job after another. The first job loads the tokenizer."""
    loaded: list[Tokenizer] = []

    def answer(job: Any) -> list[Any]:
        try:
            if loaded:
                return [_encode(loaded[0], *job), ""]
            loaded.append(_load(job))
            return [None, ""]
        except BaseException as fault:  # a panic of the package does not derive from Exception
            return [None, (" ".join(str(fault).split()) or type(fault).__name__)[:MAX_ERROR]]

    serve(answer)


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
