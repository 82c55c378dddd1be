"""Writes tools, calls and their answers into a conversation's texts, for chat templates that have no place for them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from genbatch.nif.text.tools import LFM2, ToolFormat

_OFFER = """You may call functions to help with the user's request. They are described in JSON, one a line:
<tools>
{tools}
</tools>

To call a function, answer with a JSON object of its name and arguments inside <tool_call></tool_call>:
<tool_call>
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def plain_conversation(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Write tools, calls and their answers into a conversation's texts, in Hermes' format.

    Args:
        messages: messages in the form of transformers' templates, with objects as `arguments`.
        tools: the offered tools; may be empty.
    """
    turns: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            if turns and turns[-1]["role"] == "user" and turns[-1]["content"].startswith("<tool_response>"):
                turns[-1]["content"] += f"\n{content}"
                continue
        for call in message.get("tool_calls") or ():
            shown = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            content += ("\n" if content else "") + _hermes(shown)
        turns.append({"role": role, "content": content})
    if tools:
        offer = _OFFER.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if turns and turns[0]["role"] == "system":
            turns[0]["content"] += f"\n\n{offer}"
        else:
            turns.insert(0, {"role": "system", "content": offer})
    return turns


def with_calls_in_text(messages: Sequence[Mapping[str, Any]], format: ToolFormat) -> list[dict[str, Any]]:
    """Write earlier calls into their messages' texts, for a chat template that shows tools but no calls."""
    return [
        {**message, "content": _called(message.get("content") or "", message["tool_calls"], format)}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _called(content: str, calls: Sequence[Mapping[str, Any]], format: ToolFormat) -> str:
    """Return a message's text with its calls, as its model writes them."""
    functions = [call["function"] for call in calls]
    if format is not LFM2:
        return "\n".join(filter(None, [content, *map(_hermes, functions)]))
    written = (
        f"{function['name']}({', '.join(f'{name}={value!r}' for name, value in function['arguments'].items())})"
        for function in functions
    )
    return f"{LFM2.opens[0]}[{', '.join(written)}]{LFM2.closes}{content}"


def _hermes(call: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
