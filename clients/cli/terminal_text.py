"""Makes a model's text safe to print: a terminal obeys control characters, and a model may be talked into them."""

import re

# C0 but tab and newline, DEL, C1; and what reorders or hides other text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str, *, is_terminal: bool) -> str:
    """`text` without the characters that a terminal would act on; as it is where it goes to a file or a pipe."""
    return _CONTROL.sub("", text) if is_terminal else text
