"""Programs as people write them, each in a process of its own: python agent_programs.py NAME URL.

The model is random, so what they show is that calls come through, validate, and can be answered.
"""

import json
import sys
from typing import Any, Literal

import openai
import pydantic

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["c", "f"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
USER: Any = {"role": "user", "content": "Well?"}


class Colour(pydantic.BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]
    share: Literal[1, 2, 3]


def openai_stream(url: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    with client.chat.completions.stream(
        model="model",
        messages=[USER],
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}
    answer: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    conversation: Any = [USER, choice.message, answer]
    after = client.chat.completions.create(model="model", messages=conversation, tools=[WEATHER], max_tokens=4)
    assert after.choices[0].message.role == "assistant"
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    whole = client.chat.completions.create(
        model="model", messages=[USER], tools=[WEATHER], max_tokens=300, tool_choice=named
    )
    assert whole.choices[0].message.content is None and len(whole.choices[0].message.tool_calls or ()) == 1


def langchain(url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=url, api_key="none", model="model", max_tokens=300, max_retries=0)
    bound = chat.bind_tools([WEATHER], tool_choice="any")
    answer = bound.invoke("Well?")
    first = answer.tool_calls[0]
    assert first["name"] == "get_weather" and set(first["args"]) == {"city", "unit"}
    streamed: Any = None
    for chunk in bound.stream("Well?"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls[0]["name"] == "get_weather"
    answers = [ToolMessage("sunny", tool_call_id=call["id"]) for call in answer.tool_calls]
    ChatOpenAI(base_url=url, api_key="none", model="model", max_tokens=4).bind_tools([WEATHER]).invoke(
        [HumanMessage("Well?"), answer, *answers]
    )
    for method in ("function_calling", "json_schema"):
        assert isinstance(chat.with_structured_output(Colour, method=method).invoke("Which?"), Colour)


def instructor(url: str) -> None:
    import instructor

    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0))
    found = client.chat.completions.create(
        model="model", messages=[USER], response_model=Colour, max_tokens=200, max_retries=0
    )
    assert isinstance(found, Colour)


def pydantic_ai(url: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    chat = OpenAIChatModel("model", provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = Agent(chat, output_type=Colour, model_settings={"max_tokens": 200})
    assert isinstance(agent.run_sync("Which?").output, Colour)


def openai_responses(url: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    plain = client.responses.create(model="model", input="Well?", max_output_tokens=5, temperature=0)
    chat = client.chat.completions.create(model="model", messages=[USER], max_tokens=5, temperature=0)
    assert plain.output_text == chat.choices[0].message.content
    assert (plain.status, plain.usage.output_tokens if plain.usage else 0) == ("incomplete", 5)
    on = client.responses.create(model="model", input="On?", previous_response_id=plain.id, max_output_tokens=2)
    assert on.usage is not None and plain.usage is not None and on.usage.input_tokens > plain.usage.input_tokens
    try:
        client.responses.create(model="model", input="On?", previous_response_id="resp_none")
        raise AssertionError("a response that nobody remembers was gone on with")
    except openai.NotFoundError as error:
        assert error.code == "previous_response_not_found"
    with client.responses.stream(model="model", input="Well?", max_output_tokens=5, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == plain.output_text
    tool: Any = {"type": "function", **WEATHER["function"]}
    asked: Any = {"model": "model", "input": "Well?", "tools": [tool], "tool_choice": "required"}
    with client.responses.stream(**asked, parallel_tool_calls=False, max_output_tokens=300) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds and kinds[-1] == "response.completed"
    (call,) = final.output
    assert call.type == "function_call" and set(json.loads(call.arguments)) == {"city", "unit"}
    said: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    client.responses.create(model="model", input=said, previous_response_id=final.id, tools=[tool], max_output_tokens=2)
    history: Any = [{"role": "user", "content": "Well?"}, call.model_dump(exclude_none=True), *said]
    client.responses.create(model="model", input=history, tools=[tool], max_output_tokens=2, store=False)
    parsed = client.responses.parse(model="model", input="Which?", text_format=Colour, max_output_tokens=100)
    assert isinstance(parsed.output_parsed, Colour)


def anthropic(url: str) -> None:
    from anthropic import Anthropic

    client = Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
    said: Any = {"model": "model", "max_tokens": 5, "messages": [USER], "extra_body": {"temperature": 0}}
    plain = client.messages.create(**said)
    with client.messages.stream(**said) as stream:
        assert "".join(stream.text_stream) == plain.content[0].text
        assert stream.get_final_message().stop_reason == plain.stop_reason == "max_tokens"
    counted = client.messages.count_tokens(model="model", messages=[USER], system="Be brief.")
    total = plain.usage.input_tokens + plain.usage.cache_read_input_tokens
    assert counted.input_tokens > total
    function = WEATHER["function"]
    tool: Any = {"name": function["name"], "description": "Weather", "input_schema": function["parameters"]}
    choice: Any = {"type": "tool", "name": "get_weather"}
    with client.messages.stream(**(said | {"max_tokens": 300}), tools=[tool], tool_choice=choice) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert "input_json" in kinds and message.stop_reason == "tool_use"
    (use,) = message.content
    assert use.type == "tool_use" and set(use.input) == {"city", "unit"}
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    answered: Any = [USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(model="model", max_tokens=3, messages=answered, tools=[tool])
    assert after.role == "assistant"


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
