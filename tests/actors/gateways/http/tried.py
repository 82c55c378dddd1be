"""What the programs over clients share: the table of them, a tool and a schema.

It needs nothing of ours, since the programs run in environments without it.
"""

import json
from collections.abc import Callable
from typing import Any, Literal

import pydantic

TRIED: dict[str, dict[str, Callable[[str], None]]] = {}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["c", 'ü"\n']}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
FUNCTION: Any = WEATHER["function"]
USER: Any = {"role": "user", "content": "Well?"}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
SCHEMA: Any = {
    "type": "object",
    "properties": {"name": {"enum": ["red", "green"]}},
    "required": ["name"],
    "additionalProperties": False,
}


class Colour(pydantic.BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]
    share: Literal[1, 2, 3]


def tries(client: str, what: str) -> Callable[[Callable[[str], None]], Callable[[str], None]]:
    """Puts a function among what is tried with a client."""

    def add(function: Callable[[str], None]) -> Callable[[str], None]:
        TRIED.setdefault(client, {})[what] = function
        return function

    return add


def is_weather(arguments: Any) -> bool:
    """Whether a call's arguments validate, as JSON or read already."""
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    return set(found) == {"city", "unit"} and len(found["city"]) <= 8 and found["unit"] in ("c", 'ü"\n')


def openai_client(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)
