"""What an editor does with a service: continue the text in front of the cursor, and give up when the user types on.

    python editor.py [URL] [MODEL]

docs/clients.md says what the editors themselves send, and how to set them up.
"""

import sys
from collections.abc import Iterator

from openai import BadRequestError, OpenAI


def complete(client: OpenAI, model: str, before: str, after: str = "") -> Iterator[str]:
    """The text that goes in between, piece by piece. Closing the iterator ends the request and frees its memory.

    With text behind the cursor the service fills in: models made for it, such as Qwen2.5-Coder, know how.
    """
    suffix = {"suffix": after} if after else {}
    with client.completions.create(
        model=model, prompt=before, temperature=0, max_tokens=24, stop=["\n\n"], stream=True, **suffix
    ) as stream:
        for chunk in stream:
            if chunk.choices and chunk.choices[0].text:
                yield chunk.choices[0].text


def main(url: str, model: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    print("whole:", repr("".join(complete(client, model, "def add(a, b):\n    return"))))

    pieces = complete(client, model, "def subtract(a, b):\n    return")
    print("shown:", repr(next(pieces)))
    pieces.close()  # the user typed on: what was asked is of no use any more

    try:
        print("between:", repr("".join(complete(client, model, "def add(a, b):\n    ", "\n\nprint(add(1, 2))"))))
    except BadRequestError as error:
        print("between:", error.body["message"] if isinstance(error.body, dict) else error)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ("http://127.0.0.1:8000/v1", "smollm2")))
