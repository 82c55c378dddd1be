"""Programs as people write them, over frameworks: LangChain, pydantic-ai, smolagents, LiteLLM and others."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Literal

import pydantic
from tried import USER, WEATHER, Colour, is_weather, openai_client, tries

# langchain-openai


def langchain_chat(url: str) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=url, api_key="none", model="model", max_tokens=300, max_retries=0, temperature=0)


@tries("langchain-openai", "chat")
def _(url: str) -> None:
    chat = langchain_chat(url).bind(max_tokens=4)
    assert len({answer.content for answer in [chat.invoke("Well?"), *chat.batch(["Well?", "Well?"])]}) == 1


@tries("langchain-openai", "chat streamed")
def _(url: str) -> None:
    chat = langchain_chat(url).bind(max_tokens=4)
    assert "".join(chunk.content for chunk in chat.stream("Well?")) == chat.invoke("Well?").content


@tries("langchain-openai", "chat async")
def _(url: str) -> None:
    async def ask() -> Any:
        return await langchain_chat(url).bind(max_tokens=4).ainvoke("Well?")

    assert asyncio.run(ask()).usage_metadata["output_tokens"] == 4


@tries("langchain-openai", "bind_tools")
def _(url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = langchain_chat(url).bind_tools([WEATHER], tool_choice="any")
    answer = bound.invoke("Well?")
    assert all(is_weather(call["args"]) for call in answer.tool_calls) and answer.tool_calls
    streamed: Any = None
    for chunk in bound.stream("Well?"):
        streamed = chunk if streamed is None else streamed + chunk
    assert all(is_weather(call["args"]) for call in streamed.tool_calls) and streamed.tool_calls
    answers = [ToolMessage("sunny", tool_call_id=call["id"]) for call in answer.tool_calls]
    langchain_chat(url).bind_tools([WEATHER]).bind(max_tokens=4).invoke([HumanMessage("Well?"), answer, *answers])


@tries("langchain-openai", "structured output: function_calling, json_schema")
def _(url: str) -> None:
    for method in ("function_calling", "json_schema"):
        assert isinstance(langchain_chat(url).with_structured_output(Colour, method=method).invoke("Which?"), Colour)


# pydantic-ai


def pydantic_ai_agent(url: str, **options: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    chat = OpenAIChatModel("model", provider=OpenAIProvider(base_url=url, api_key="none"))
    return Agent(chat, **options)


@tries("pydantic-ai", "chat")
def _(url: str) -> None:
    agent = pydantic_ai_agent(url, model_settings={"max_tokens": 4, "temperature": 0})
    assert agent.run_sync("Well?").usage.output_tokens == 4


@tries("pydantic-ai", "chat streamed")
def _(url: str) -> None:
    agent = pydantic_ai_agent(url, model_settings={"max_tokens": 4, "temperature": 0})

    async def ask() -> str:
        async with agent.run_stream("Well?") as run:
            text: str = await run.get_output()
            return text

    assert asyncio.run(ask()) == agent.run_sync("Well?").output


@tries("pydantic-ai", "structured output by a tool")
def _(url: str) -> None:
    agent = pydantic_ai_agent(url, output_type=Colour, model_settings={"max_tokens": 200})
    assert isinstance(agent.run_sync("Which?").output, Colour)


@tries("pydantic-ai", "a function of one's own, then structured output")
def _(url: str) -> None:
    asked = []
    settings: Any = {"max_tokens": 400, "temperature": 1.0, "parallel_tool_calls": False}
    agent = pydantic_ai_agent(url, output_type=Colour, model_settings=settings)

    @agent.tool_plain
    def look(place: Literal["here", "there"]) -> str:
        """Looks somewhere."""
        asked.append(place)
        return "nothing"

    # A random model chooses either of the two tools; in some run it looks first.
    for seed in range(20):
        found = agent.run_sync("Which?", model_settings={"seed": seed, **settings})
        assert isinstance(found.output, Colour)
        if asked:
            break
    assert set(asked) <= {"here", "there"} and asked


@tries("pydantic-ai", "a function of one's own beside NativeOutput")
def _(url: str) -> None:
    from pydantic_ai import NativeOutput

    _pydantic_ai_with_a_tool(url, NativeOutput(Colour), Colour)


@tries("pydantic-ai", "a function of one's own beside PromptedOutput")
def _(url: str) -> None:
    from pydantic_ai import PromptedOutput

    # Its format is any JSON object, and the model has not read the prompt.
    _pydantic_ai_with_a_tool(url, PromptedOutput(AnyObject), AnyObject)


class AnyObject(pydantic.BaseModel, extra="allow"):
    """An object."""


def _pydantic_ai_with_a_tool(url: str, output_type: Any, expected: type) -> None:
    def ask(look: Callable[..., str], seed: int) -> Any:
        settings: Any = {"max_tokens": 400, "temperature": 1.0, "seed": seed}
        agent = pydantic_ai_agent(url, output_type=output_type, model_settings=settings)
        agent.tool_plain(look)
        return agent.run_sync("Which?").output

    until_looked(ask, expected)


def until_looked(ask: Callable[[Callable[..., str], int], Any], expected: type) -> None:
    """Asks with a tool and a format until the tool was called and then an answer of the format was given.

    A random model chooses either; it may also call for ever, or be cut short.
    """
    looked: list[str] = []

    def look(place: Literal["here", "there"]) -> str:
        """Looks somewhere."""
        looked.append(place)
        return "nothing"

    faults: list[Exception] = []
    for seed in range(20):
        looked.clear()
        try:
            answer = ask(look, seed)
        except Exception as error:
            faults.append(error)
            continue
        assert isinstance(answer, expected), answer
        if looked:
            assert set(looked) <= {"here", "there"}
            return
    raise AssertionError(f"it never looked and answered: {faults}")


# langchain


@tries("langchain", "create_agent with a tool and a provider strategy")
def _(url: str) -> None:
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ProviderStrategy
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    def ask(look: Callable[..., str], seed: int) -> Any:
        chat = ChatOpenAI(
            base_url=url, api_key="none", model="model", max_tokens=400, max_retries=0, temperature=1.0, seed=seed
        )  # type: ignore[call-arg]
        agent = create_agent(chat, tools=[tool(look)], response_format=ProviderStrategy(Colour))
        return agent.invoke({"messages": [{"role": "user", "content": "Which?"}]})["structured_response"]

    until_looked(ask, Colour)


# langgraph


@tries("langgraph", "a graph with a tool node, whole and streamed")
def _(url: str) -> None:
    from langchain_core.messages import AIMessage
    from langchain_core.tools import tool
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    looked: list[str] = []

    @tool
    def look(place: Literal["here", "there"]) -> str:
        """Looks somewhere."""
        looked.append(place)
        return "nothing"

    def ask(state: MessagesState) -> dict[str, Any]:
        # At first it must look; then it may answer.
        chat = langchain_chat(url).bind(max_tokens=60)
        bound = chat if looked else langchain_chat(url).bind_tools([look], tool_choice="any", parallel_tool_calls=False)
        return {"messages": [bound.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode([look]))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    app = graph.compile()
    question: Any = {"messages": [USER]}
    answer = app.invoke(question)["messages"][-1]
    assert isinstance(answer, AIMessage) and answer.content and looked[0] in ("here", "there")
    looked.clear()
    pieces = [piece for piece, _ in app.stream(question, stream_mode="messages") if piece.type == "AIMessageChunk"]
    assert looked and "".join(piece.content for piece in pieces) == answer.content


# smolagents


@tries("smolagents", "ToolCallingAgent with a tool and final_answer")
def _(url: str) -> None:
    import smolagents

    def ask(look: Callable[..., str], seed: int) -> Any:
        @smolagents.tool
        def peek(place: str) -> str:
            """Looks somewhere.

            Args:
                place: where to look.
            """
            return look("here")

        model = smolagents.OpenAIServerModel(
            "model", api_base=url, api_key="none", temperature=1.0, max_tokens=200, seed=seed
        )
        agent = smolagents.ToolCallingAgent(
            tools=[peek], model=model, max_steps=12, verbosity_level=smolagents.LogLevel.OFF
        )
        return str(agent.run("Which?"))

    until_looked(ask, str)


# openai-agents


def _openai_agent(url: str, kind: str) -> Callable[[Callable[..., str], int], Any]:
    import agents
    import openai

    agents.set_tracing_disabled(True)

    def ask(look: Callable[..., str], seed: int) -> Any:
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        settings = agents.ModelSettings(temperature=1.0, max_tokens=400, extra_body={"seed": seed})
        agent = agents.Agent(
            name="one",
            model=getattr(agents, kind)(model="model", openai_client=client),
            model_settings=settings,
            tools=[agents.function_tool(look)],
            output_type=Colour,
        )
        return agents.Runner.run_sync(agent, "Which?", max_turns=30).final_output

    return ask


@tries("openai-agents", "a tool and output_type over chat completions")
def _(url: str) -> None:
    until_looked(_openai_agent(url, "OpenAIChatCompletionsModel"), Colour)


@tries("openai-agents", "a tool and output_type over responses")
def _(url: str) -> None:
    until_looked(_openai_agent(url, "OpenAIResponsesModel"), Colour)


# litellm


def litellm_ask(url: str, **asked: Any) -> Any:
    import litellm

    common: Any = {"model": "openai/model", "api_base": url, "api_key": "none", "messages": [USER], "temperature": 0}
    return litellm.completion(**(common | {"max_tokens": 4} | asked))


@tries("litellm", "chat")
def _(url: str) -> None:
    assert litellm_ask(url).usage.completion_tokens == 4


@tries("litellm", "chat streamed")
def _(url: str) -> None:
    text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm_ask(url, stream=True))
    assert text == litellm_ask(url).choices[0].message.content


@tries("litellm", "chat async")
def _(url: str) -> None:
    import litellm

    said = litellm.acompletion(
        model="openai/model", api_base=url, api_key="none", messages=[USER], temperature=0, max_tokens=4
    )
    assert asyncio.run(said).choices[0].message.content == litellm_ask(url).choices[0].message.content


@tries("litellm", "tools")
def _(url: str) -> None:
    answer = litellm_ask(url, tools=[WEATHER], tool_choice="required", max_tokens=900).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert all(is_weather(call.function.arguments) for call in answer.message.tool_calls)


@tries("litellm", "structured output")
def _(url: str) -> None:
    text = litellm_ask(url, response_format=Colour, max_tokens=100).choices[0].message.content
    assert Colour.model_validate_json(text)


@tries("litellm", "Anthropic's messages over OpenAI's chat")
def _(url: str) -> None:
    import litellm

    async def ask() -> Any:
        return await litellm.anthropic.messages.acreate(
            model="openai/model", api_base=url, api_key="none", messages=[USER], max_tokens=4
        )

    message = asyncio.run(ask())
    assert (message["type"], message["role"]) == ("message", "assistant")


@tries("litellm", "Anthropic's messages")
def _(url: str) -> None:
    asked: Any = {"model": "anthropic/model", "max_tokens": 900, "tools": [WEATHER], "tool_choice": "required"}
    said = litellm_ask(url.removesuffix("/v1"), **asked).choices[0]
    assert all(is_weather(call.function.arguments) for call in said.message.tool_calls) and said.message.tool_calls


# llama-index


def llama_index_chat(url: str, **options: Any) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model="model", api_base=url, api_key="none", is_chat_model=True, is_function_calling_model=True,
        temperature=0, max_retries=0, **({"max_tokens": 4} | options),
    )  # fmt: skip


def _said() -> list[Any]:
    from llama_index.core.llms import ChatMessage

    return [ChatMessage(role="user", content="Well?")]


@tries("llama-index", "chat")
def _(url: str) -> None:
    assert llama_index_chat(url).chat(_said()).message.content


@tries("llama-index", "chat streamed")
def _(url: str) -> None:
    *_, last = llama_index_chat(url).stream_chat(_said())
    assert last.message.content == llama_index_chat(url).chat(_said()).message.content


@tries("llama-index", "chat async")
def _(url: str) -> None:
    assert asyncio.run(llama_index_chat(url).achat(_said())).message.content


@tries("llama-index", "tools")
def _(url: str) -> None:
    from llama_index.core.tools import FunctionTool

    def look(place: Literal["here", "there"]) -> str:
        """Looks somewhere."""
        return f"nothing {place}"

    chat = llama_index_chat(url, max_tokens=300)
    answered = chat.predict_and_call([FunctionTool.from_defaults(look)], user_msg="Well?", tool_required=True)
    assert str(answered).startswith("nothing ")


@tries("llama-index", "structured output")
def _(url: str) -> None:
    from llama_index.core.prompts import PromptTemplate

    chat = llama_index_chat(url, max_tokens=200)
    assert isinstance(chat.structured_predict(Colour, PromptTemplate("Which?")), Colour)


# instructor


@tries("instructor", "structured output: default mode, which is tools")
def _(url: str) -> None:
    import instructor

    client = instructor.from_openai(openai_client(url))
    asked: Any = {"model": "model", "messages": [USER], "response_model": Colour, "max_tokens": 200, "max_retries": 0}
    asked |= {"temperature": 1, "seed": 1}  # greedily a random model may write spaces for ever
    assert isinstance(client.chat.completions.create(**asked), Colour)


@tries("instructor", "structured output: JSON_SCHEMA, streamed")
def _(url: str) -> None:
    import instructor

    client = instructor.from_openai(openai_client(url), mode=instructor.Mode.JSON_SCHEMA)
    asked: Any = {"model": "model", "messages": [USER], "response_model": Colour, "max_tokens": 200, "max_retries": 0}
    asked |= {"temperature": 1, "seed": 1}  # greedily a random model may write spaces for ever
    assert isinstance(client.chat.completions.create(**asked), Colour)
    *_, last = client.chat.completions.create_partial(**asked)
    assert Colour.model_validate(last.model_dump())


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

    tool = Tool(name="get_weather", description="", parameters=WEATHER["function"]["parameters"], function=print)
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


# dspy


def dspy_ask(url: str, signature: Any, *, functions: bool = False, **inputs: Any) -> Any:
    """The prediction of a model that dspy does not know: it is told what the model's service can do."""
    import dspy
    from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider

    access = AccessPolicy("genbatch", base_url=url, env_keys=("GENBATCH_TOKEN",))
    register_provider(
        ProviderDefinition.chat(access, compat=OpenAIChatCompat.preset("vllm")),
        supports=ModelSupport(function_calling=True, response_schema=True),
    )
    model = dspy.LM("genbatch/model", api_base=url, api_key="none", max_tokens=400, temperature=1.0, cache=False)
    with dspy.context(lm=model, adapter=dspy.JSONAdapter(use_native_function_calling=functions)):
        return dspy.Predict(signature)(**inputs)


@tries("dspy", "structured output by its JSONAdapter")
def _(url: str) -> None:
    import dspy

    signature = dspy.Signature({"question": (str, dspy.InputField()), "colour": (Colour, dspy.OutputField())})
    assert isinstance(dspy_ask(url, signature, question="Which?").colour, Colour)


@tries("dspy", "native calls of a tool")
def _(url: str) -> None:
    import dspy

    def look(place: Literal["here", "there"]) -> str:
        """Looks somewhere."""
        return "nothing"

    inputs = {"question": (str, dspy.InputField()), "tools": (list[dspy.Tool], dspy.InputField())}
    signature = dspy.Signature(inputs | {"calls": (dspy.ToolCalls, dspy.OutputField())})
    for _ in range(20):  # a random model may call nothing
        found = dspy_ask(url, signature, functions=True, question="Look", tools=[dspy.Tool(look)])
        if found.calls is not None and found.calls.tool_calls:
            break
    assert all(call.args["place"] in ("here", "there") for call in found.calls.tool_calls)


# autogen


def autogen_run(url: str, use: Callable[[Any], Any], max_tokens: int = 400) -> Any:
    """What `use` returns of a client for a model that autogen does not know: it is told what the model can do."""
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    able: Any = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}

    async def ask() -> Any:
        client = OpenAIChatCompletionClient(
            model="model",
            base_url=url,
            api_key="none",
            model_info={**able, "family": "unknown"},
            max_tokens=max_tokens,
            temperature=1.0,
            seed=1,
        )
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(ask())


def autogen_answer(url: str, max_tokens: int = 400, **options: Any) -> Any:
    """The last message of an agent."""
    from autogen_agentchat.agents import AssistantAgent

    async def run(client: Any) -> Any:
        return (await AssistantAgent("agent", model_client=client, **options).run(task="Well?")).messages[-1]

    return autogen_run(url, run, max_tokens)


@tries("autogen-agentchat", "an agent's answer, whole and streamed")
def _(url: str) -> None:
    whole, streamed = [autogen_answer(url, 4, model_client_stream=streams) for streams in (False, True)]
    assert whole.content == streamed.content and whole.models_usage.completion_tokens == 4


@tries("autogen-agentchat", "a required call of a tool")
def _(url: str) -> None:
    from autogen_core.models import UserMessage
    from autogen_core.tools import FunctionTool

    async def look(place: Literal["here", "there"]) -> str:
        """Looks somewhere."""
        return "nothing"

    message, tool = UserMessage(content="Well?", source="user"), FunctionTool(look, description="Looks somewhere")
    found = autogen_run(url, lambda client: client.create([message], tools=[tool], tool_choice="required"))
    assert all(json.loads(call.arguments)["place"] in ("here", "there") for call in found.content) and found.content


@tries("autogen-agentchat", "an agent's structured output")
def _(url: str) -> None:
    assert isinstance(autogen_answer(url, output_content_type=Colour).content, Colour)


# crewai


def crewai_task(url: str, **options: Any) -> Any:
    """The output of a crew of one agent with one task."""
    from crewai import LLM, Agent, Crew, Task

    model = LLM(model="openai/model", base_url=url, api_key="none", max_tokens=400, temperature=1.0)
    tools = options.pop("tools", [])
    agent = Agent(role="r", goal="g", backstory="b", llm=model, max_iter=1, tools=tools)
    task = Task(description="Well?", expected_output="a word", agent=agent, **options)
    return Crew(agents=[agent], tasks=[task]).kickoff()


@tries("crewai", "a call of the model")
def _(url: str) -> None:
    from crewai import LLM

    model = LLM(model="openai/model", base_url=url, api_key="none", max_tokens=4, temperature=0)
    assert model.call("Well?") == model.call("Well?")


@tries("crewai", "a crew with structured output")
def _(url: str) -> None:
    assert isinstance(crewai_task(url, output_pydantic=Colour).pydantic, Colour)
