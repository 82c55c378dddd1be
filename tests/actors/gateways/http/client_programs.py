"""Programs as people write them, over the clients that people use: python client_programs.py CLIENT URL.

Runs everything that is tried with one client and prints, as JSON, its version and what passed. It needs that client and
nothing of ours. The model is random: what is shown is that calls come through, validate, and can be answered.
"""

import json
import sys
import traceback
from importlib.metadata import version

import api_programs  # noqa: F401  # its programs are added to TRIED, as those of the next module
import framework_programs  # noqa: F401
from tried import TRIED

# haystack


def haystack_ask(url: str, messages: Any = None, *, to: Any = None, tools: Any = None, **params: Any) -> Any:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    chat = OpenAIChatGenerator(
        api_key=Secret.from_token("none"), model="model", api_base_url=url, max_retries=0, tools=tools,
        streaming_callback=to, generation_kwargs={"temperature": 0, "max_tokens": 4} | params,
    )  # fmt: skip
    (reply,) = chat.run(messages or [ChatMessage.from_user("Well?")])["replies"]
    return reply


@tries("haystack", "chat, whole and streamed")
def _(url: str) -> None:
    pieces: list[str] = []
    streamed = haystack_ask(url, to=lambda chunk: pieces.append(chunk.content))
    assert "".join(pieces) == streamed.text == haystack_ask(url).text


@tries("haystack", "tools, with the answer sent back")
def _(url: str) -> None:
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool

    tool = Tool(name="get_weather", description="", parameters=FUNCTION["parameters"], function=print)
    asked = ChatMessage.from_user("Well?")
    reply = haystack_ask(url, [asked], tools=[tool], tool_choice="required", max_tokens=900)
    assert reply.tool_calls and all(is_weather(call.arguments) for call in reply.tool_calls)
    results = [ChatMessage.from_tool(tool_result="sun", origin=call) for call in reply.tool_calls]
    assert haystack_ask(url, [asked, reply, *results], tools=[tool], tool_choice="none").text is not None


@tries("haystack", "structured output")
def _(url: str) -> None:
    assert Colour.model_validate_json(haystack_ask(url, response_format=Colour, max_tokens=200).text)


# semantic-kernel


def kernel_ask(url: str, *, streams: bool = False, kernel: Any = None, **params: Any) -> str:
    from openai import AsyncOpenAI
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
    from semantic_kernel.contents import ChatHistory

    settings = OpenAIChatPromptExecutionSettings(**({"temperature": 0, "max_tokens": 4} | params))

    async def ask() -> str:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            chat = OpenAIChatCompletion(ai_model_id="model", async_client=client)
            history = ChatHistory()
            history.add_user_message("Well?")
            if streams:
                parts = chat.get_streaming_chat_message_contents(history, settings)
                return "".join([str(part[0]) async for part in parts if part])
            return str(await chat.get_chat_message_content(history, settings, kernel=kernel))

    return asyncio.run(ask())


@tries("semantic-kernel", "chat, whole and streamed")
def _(url: str) -> None:
    assert kernel_ask(url, streams=True) == kernel_ask(url)


@tries("semantic-kernel", "a plugin's function, called by itself")
def _(url: str) -> None:
    from semantic_kernel import Kernel
    from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
    from semantic_kernel.functions import kernel_function

    seen: list[bool] = []

    class Weather:
        @kernel_function(name="look", description="The weather, today or tomorrow")
        def look(self, tomorrow: bool) -> str:
            seen.append(tomorrow)
            return "sun"

    kernel = Kernel()
    kernel.add_plugin(Weather(), "weather")
    required = FunctionChoiceBehavior.Required(auto_invoke=True)
    kernel_ask(url, kernel=kernel, function_choice_behavior=required, max_tokens=200, temperature=1)
    assert seen and set(map(type, seen)) == {bool}


@tries("semantic-kernel", "structured output")
def _(url: str) -> None:
    assert Colour.model_validate_json(kernel_ask(url, response_format=Colour, max_tokens=200))


PACKAGES = {
    "llama-index": "llama-index-llms-openai-like",
    "pydantic-ai": "pydantic-ai-slim",
    "haystack": "haystack-ai",
}


def main(client: str, url: str) -> None:
    """Prints {"version", "passed": [...], "failed": {what: traceback}}."""
    passed, failed = [], {}
    for what, function in TRIED[client].items():
        try:
            function(url)
            passed.append(what)
        except Exception:
            failed[what] = traceback.format_exc()[-2000:]
    print(json.dumps({"version": version(PACKAGES.get(client, client)), "passed": passed, "failed": failed}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
