"""Programs as people write them, over the clients of the APIs: openai, anthropic, ollama and mistralai."""

import asyncio
import json
import re
from typing import Any, Literal

import pydantic
from tried import FUNCTION, NAMED, SCHEMA, USER, WEATHER, Colour, is_weather, openai_client, tries

# openai


@tries("openai", "chat")
def _(url: str) -> None:
    said = openai_client(url).chat.completions.create(model="model", messages=[USER], max_tokens=5, temperature=0)
    choice = said.choices[0]
    assert (choice.finish_reason, said.usage.completion_tokens) == ("length", 5)
    ended = openai_client(url).chat.completions.create(
        model="model", messages=[USER], max_tokens=5, temperature=0, stop=[choice.message.content[1:2]]
    )
    assert ended.choices[0].finish_reason == "stop" and ended.choices[0].message.content == choice.message.content[:1]


@tries("openai", "chat streamed")
def _(url: str) -> None:
    asked: Any = {"model": "model", "messages": [USER], "max_tokens": 5, "temperature": 0}
    whole = openai_client(url).chat.completions.create(**asked)
    chunks = list(openai_client(url).chat.completions.create(**asked, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content and chunks[-1].choices[0].finish_reason == "length"


@tries("openai", "chat async")
def _(url: str) -> None:
    import openai

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            asked: Any = {"model": "model", "messages": [USER], "max_tokens": 4, "temperature": 0}
            one, other = await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(2)))
            assert one.choices[0].message.content == other.choices[0].message.content
            stream = await client.chat.completions.create(**asked, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert text == one.choices[0].message.content

    asyncio.run(ask())


@tries("openai", "tools by the streaming helper")
def _(url: str) -> None:
    client = openai_client(url)
    asked: Any = {"model": "model", "messages": [USER], "tools": [WEATHER], "max_tokens": 300}
    with client.chat.completions.stream(**asked, tool_choice="required", parallel_tool_calls=False) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    choice = final.choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and is_weather(call.function.arguments)
    answer: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    conversation: Any = [USER, choice.message, answer]
    after = client.chat.completions.create(model="model", messages=conversation, tools=[WEATHER], max_tokens=4)
    assert after.choices[0].message.role == "assistant"
    whole = client.chat.completions.create(**asked, tool_choice=NAMED)
    assert whole.choices[0].message.content is None and len(whole.choices[0].message.tool_calls) == 1


@tries("openai", "custom tools in chats and responses, streamed")
def _(url: str) -> None:
    client = openai_client(url)
    grammar = {"type": "grammar", "syntax": "regex", "definition": "[a-c]{3}\\n"}
    tool: Any = {"type": "custom", "name": "p", "format": grammar}
    asked: Any = {"model": "model", "input": "Well?", "tools": [tool], "max_output_tokens": 300}
    with client.responses.stream(**asked, tool_choice="required", parallel_tool_calls=False) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert {"response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"} <= set(kinds)
    (call,) = final.output
    assert call.type == "custom_tool_call" and re.fullmatch("[a-c]{3}\n", call.input), call
    said: Any = [{"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}]
    client.responses.create(model="model", input=said, previous_response_id=final.id, tools=[tool], max_output_tokens=2)
    chat_tool: Any = {"type": "custom", "custom": {"name": "p", "format": {"type": "grammar", "grammar": grammar}}}
    named: Any = {"type": "custom", "custom": {"name": "p"}}
    chat: Any = {"model": "model", "messages": [USER], "tools": [chat_tool], "tool_choice": named, "max_tokens": 300}
    (whole,) = client.chat.completions.create(**chat).choices[0].message.tool_calls
    assert whole.type == "custom" and re.fullmatch("[a-c]{3}\n", whole.custom.input), whole
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**chat, stream=True)]
    pieces: Any = [piece.model_dump() for delta in deltas for piece in delta.tool_calls or ()]
    assert pieces[0]["type"] == "custom"
    assert "".join(piece["custom"]["input"] for piece in pieces) == whole.custom.input


@tries("openai", "parallel tool calls of two choices, streamed")
def _(url: str) -> None:
    nothing: Any = {"type": "object", "properties": {}, "additionalProperties": False}
    other: Any = {"type": "function", "function": {"name": "o" * 64, "parameters": nothing}}
    asked: Any = {"model": "model", "messages": [USER], "max_tokens": 900, "n": 2, "stream": True, "temperature": 1}
    for seed in range(20):  # how many calls there are is drawn
        calls: dict[tuple[int, int], list[str]] = {}
        ends = {}
        stream = openai_client(url).chat.completions.create(
            **asked, tools=[WEATHER, other], tool_choice="required", seed=seed
        )
        for choice in (choice for chunk in stream for choice in chunk.choices):
            assert not choice.delta.content
            ends[choice.index] = choice.finish_reason
            for piece in choice.delta.tool_calls or ():
                if piece.id is not None:
                    assert (choice.index, piece.index) not in calls and piece.function.name
                    calls[choice.index, piece.index] = [piece.function.name, ""]
                calls[choice.index, piece.index][1] += piece.function.arguments or ""
        assert ends == {0: "tool_calls", 1: "tool_calls"}
        for name, arguments in calls.values():
            assert is_weather(arguments) if name == "get_weather" else json.loads(arguments) == {}, (name, arguments)
        if max(index for _, index in calls) > 0:
            return
    raise AssertionError("no answer had several calls")


@tries("openai", "structured output")
def _(url: str) -> None:
    parsed = openai_client(url).chat.completions.parse(
        model="model", messages=[USER], response_format=Colour, max_tokens=100
    )
    assert isinstance(parsed.choices[0].message.parsed, Colour)


@tries("openai", "completions")
def _(url: str) -> None:
    client = openai_client(url)
    both = client.completions.create(model="model", prompt=["def f(", "x ="], max_tokens=3, temperature=0)
    assert len(both.choices) == 2
    asked: Any = {"model": "model", "prompt": "def f(", "max_tokens": 3, "temperature": 0, "stream": True}
    assert "".join(each.choices[0].text for each in client.completions.create(**asked)) == both.choices[0].text


@tries("openai", "responses")
def _(url: str) -> None:
    import openai

    client = openai_client(url)
    plain = client.responses.create(model="model", input="Well?", max_output_tokens=5, temperature=0)
    chat = client.chat.completions.create(model="model", messages=[USER], max_tokens=5, temperature=0)
    assert plain.output_text == chat.choices[0].message.content
    assert (plain.status, plain.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (plain.output[0].status, plain.usage.output_tokens) == ("incomplete", 5)
    on = client.responses.create(model="model", input="On?", previous_response_id=plain.id, max_output_tokens=2)
    assert on.usage.input_tokens > plain.usage.input_tokens
    try:
        client.responses.create(model="model", input="On?", previous_response_id="resp_none")
        raise AssertionError("a response that nobody remembers was gone on with")
    except openai.NotFoundError as error:
        assert error.code == "previous_response_not_found"


@tries("openai", "responses streamed")
def _(url: str) -> None:
    client = openai_client(url)
    asked: Any = {"model": "model", "input": "Well?", "max_output_tokens": 5, "temperature": 0}
    plain = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == plain.output_text and events[-1].type == "response.incomplete"
    assert events[-1].response.output[0].status == "incomplete"


@tries("openai", "responses with tools")
def _(url: str) -> None:
    client = openai_client(url)
    tool: Any = {"type": "function", **FUNCTION}
    asked: Any = {"model": "model", "input": "Well?", "tools": [tool], "tool_choice": "required"}
    with client.responses.stream(**asked, parallel_tool_calls=False, max_output_tokens=300) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds and kinds[-1] == "response.completed"
    (call,) = final.output
    assert call.type == "function_call" and is_weather(call.arguments)
    said: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    client.responses.create(model="model", input=said, previous_response_id=final.id, tools=[tool], max_output_tokens=2)
    history: Any = [{"role": "user", "content": "Well?"}, call.model_dump(exclude_none=True), *said]
    client.responses.create(model="model", input=history, tools=[tool], max_output_tokens=2, store=False)
    # A call that was cut short is no part of what is remembered.
    cut = client.responses.create(**asked, max_output_tokens=12)
    assert cut.output[-1].status == "incomplete"
    client.responses.create(model="model", input="On?", previous_response_id=cut.id, tools=[tool], max_output_tokens=2)


@tries("openai", "responses with structured output")
def _(url: str) -> None:
    parsed = openai_client(url).responses.parse(
        model="model", input="Which?", text_format=Colour, max_output_tokens=100
    )
    assert isinstance(parsed.output_parsed, Colour)


# anthropic


def anthropic_client(url: str) -> Any:
    from anthropic import Anthropic

    return Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)


MESSAGE: Any = {"model": "model", "max_tokens": 5, "messages": [USER], "extra_body": {"temperature": 0}}


@tries("anthropic", "chat")
def _(url: str) -> None:
    from anthropic import NotFoundError

    client = anthropic_client(url)
    plain = client.messages.create(**MESSAGE)
    counted = client.messages.count_tokens(model="model", messages=[USER], system="Be brief.")
    assert counted.input_tokens > plain.usage.input_tokens + plain.usage.cache_read_input_tokens
    assert plain._request_id == plain.id and plain.stop_reason == "max_tokens"
    try:
        client.messages.create(**(MESSAGE | {"model": "none"}))
        raise AssertionError("an unknown model answered")
    except NotFoundError as error:
        assert (error.type, error.body["type"]) == ("not_found_error", "error")


@tries("anthropic", "chat streamed")
def _(url: str) -> None:
    client = anthropic_client(url)
    with client.messages.stream(**MESSAGE) as stream:
        assert "".join(stream.text_stream) == client.messages.create(**MESSAGE).content[0].text
        assert stream.get_final_message().stop_reason == "max_tokens"


@tries("anthropic", "chat async")
def _(url: str) -> None:
    from anthropic import AsyncAnthropic

    async def ask() -> str:
        client = AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
        async with client, client.messages.stream(**MESSAGE) as stream:
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(ask()) == anthropic_client(url).messages.create(**MESSAGE).content[0].text


@tries("anthropic", "stop sequences")
def _(url: str) -> None:
    client = anthropic_client(url)
    stop = client.messages.create(**MESSAGE).content[0].text[1:3]
    plain = client.messages.create(**MESSAGE, stop_sequences=["never said", stop])
    with client.messages.stream(**MESSAGE, stop_sequences=["never said", stop]) as stream:
        streamed = stream.get_final_message()
    for message in (plain, streamed):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


@tries("anthropic", "tools")
def _(url: str) -> None:
    client = anthropic_client(url)
    tool: Any = {"name": FUNCTION["name"], "description": "Weather", "input_schema": FUNCTION["parameters"]}
    choice: Any = {"type": "tool", "name": "get_weather"}
    with client.messages.stream(**(MESSAGE | {"max_tokens": 300}), tools=[tool], tool_choice=choice) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    (use,) = message.content
    assert "input_json" in kinds and message.stop_reason == "tool_use" and is_weather(use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    answered: Any = [USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(model="model", max_tokens=3, messages=answered, tools=[tool])
    assert after.role == "assistant"
    several = client.messages.create(**(MESSAGE | {"max_tokens": 900}), tools=[tool], tool_choice={"type": "any"})
    assert several.stop_reason == "tool_use" and all(is_weather(block.input) for block in several.content)


@tries("anthropic", "structured output")
def _(url: str) -> None:
    shape: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = anthropic_client(url).messages.create(**(MESSAGE | {"max_tokens": 60}), output_config=shape)
    assert json.loads(message.content[0].text)["name"] in ("red", "green")


# ollama


def ollama_client(url: str) -> Any:
    import ollama

    return ollama.Client(host=url.removesuffix("/v1"))


@tries("ollama", "chat, whole and streamed")
def _(url: str) -> None:
    asked: Any = {"model": "model", "messages": [USER], "options": {"num_predict": 5, "temperature": 0}}
    whole = ollama_client(url).chat(**asked)
    pieces = list(ollama_client(url).chat(**asked, stream=True))
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert (pieces[-1].done_reason, pieces[-1].eval_count) == (whole.done_reason, whole.eval_count) == ("length", 5)


@tries("ollama", "generate, whole and streamed")
def _(url: str) -> None:
    asked: Any = {"model": "model", "prompt": "Well?", "options": {"num_predict": 5, "temperature": 0}}
    whole = ollama_client(url).generate(**asked)
    assert "".join(piece.response for piece in ollama_client(url).generate(**asked, stream=True)) == whole.response


@tries("ollama", "structured output")
def _(url: str) -> None:
    answer = ollama_client(url).chat(model="model", messages=[USER], format=SCHEMA)
    assert json.loads(answer.message.content)["name"] in ("red", "green")


@tries("ollama", "tools, with the answer sent back")
def _(url: str) -> None:
    def look(place: Literal["here", "there"]) -> str:
        """Looks somewhere."""
        return f"nothing {place}"

    client, options = ollama_client(url), {"num_predict": 60, "temperature": 0}
    # Ollama has no way to demand a call, so this one is the client's own.
    call = {"function": {"name": "look", "arguments": {"place": "here"}}}
    answers: Any = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    answers += [{"role": "tool", "tool_name": "look", "content": look("here")}]
    said = client.chat(model="model", messages=[USER, *answers], tools=[look], options=options)
    assert said.message.role == "assistant" and said.done


@tries("ollama", "thinking, log-probs and embeddings")
def _(url: str) -> None:
    import ollama

    client, options = ollama_client(url), {"num_predict": 3}
    said = client.chat(
        model="model", messages=[USER], options=options, think="low", logprobs=True, top_logprobs=2, keep_alive="5m"
    )
    assert len(said.logprobs) == 3 and all(len(entry.top_logprobs) == 2 for entry in said.logprobs)
    try:
        client.embed(model="model", input=["a", "b"])
        raise AssertionError("a model that continues text gave embeddings")
    except ollama.ResponseError as error:
        assert error.status_code == 400 and "embeddings" in str(error)


@tries("ollama", "list, ps and show")
def _(url: str) -> None:
    [listed] = ollama_client(url).list().models
    [loaded] = ollama_client(url).ps().models
    assert listed.model == loaded.model
    assert "completion" in ollama_client(url).show(listed.model).capabilities


# mistralai


def mistral_client(url: str) -> Any:
    from mistralai import Mistral

    return Mistral(server_url=url.removesuffix("/v1"), api_key="none")


@tries("mistralai", "chat, whole and streamed")
def _(url: str) -> None:
    asked: Any = {"model": "model", "messages": [USER], "max_tokens": 5, "temperature": 0.0, "random_seed": 7}
    whole = mistral_client(url).chat.complete(**asked)
    choice = whole.choices[0]
    assert (choice.finish_reason, whole.usage.completion_tokens) == ("length", 5)
    pieces = [event.data.choices[0].delta.content or "" for event in mistral_client(url).chat.stream(**asked)]
    assert "".join(pieces) == choice.message.content


@tries("mistralai", "tools")
def _(url: str) -> None:
    asked: Any = {"model": "model", "messages": [USER], "tools": [WEATHER], "tool_choice": "any", "max_tokens": 900}
    (call, *_) = mistral_client(url).chat.complete(**asked).choices[0].message.tool_calls
    assert is_weather(call.function.arguments)


@tries("mistralai", "structured output")
def _(url: str) -> None:
    class Named(pydantic.BaseModel):  # the package's own helper takes no numbers in a Literal
        name: Literal["red", "green"]

    parsed = mistral_client(url).chat.parse(Named, model="model", messages=[USER], max_tokens=100, temperature=1.0)
    assert isinstance(parsed.choices[0].message.parsed, Named)


@tries("mistralai", "fim, whole and streamed")
def _(url: str) -> None:
    asked: Any = {"model": "model", "prompt": "def f(", "max_tokens": 5, "temperature": 0.0}
    whole = mistral_client(url).fim.complete(**asked)
    pieces = [event.data.choices[0].delta.content or "" for event in mistral_client(url).fim.stream(**asked)]
    assert "".join(pieces) == whole.choices[0].message.content
