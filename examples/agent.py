"""An agent with a tool, over OpenAI's API: the model asks, this program does it and tells, until the model answers.

python agent.py [URL] [MODEL]
"""

import json
import sys
from typing import Any

from openai import OpenAI

STOCK = {"tea": 12, "coffee": 0}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "in_stock",
        "description": "How many packs of something there are.",
        "strict": True,  # arguments always validate, whatever the model
        "parameters": {
            "type": "object",
            "properties": {"thing": {"enum": ["tea", "coffee"]}},
            "required": ["thing"],
            "additionalProperties": False,
        },
    },
}
MOST_TURNS = 4


def in_stock(thing: str) -> int:
    """The tool."""
    return STOCK[thing]


def main(url: str, model: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    messages: list[Any] = [{"role": "user", "content": "Is there any coffee left?"}]
    for turn in range(MOST_TURNS):
        # At first it must look; from then on it may answer.
        choice: Any = "required" if turn == 0 else "auto"
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=100
        ).choices[0]
        messages.append(answer.message)
        if not answer.message.tool_calls:
            print(answer.message.content)
            return
        for call in answer.message.tool_calls:
            found = in_stock(**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) -> {found}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(found)})
    print("no answer yet")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ("http://127.0.0.1:8000/v1", "smollm2")))
