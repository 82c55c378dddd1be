"""Tool calls over a tiny random model: in this program, over the wire and from the engine's process."""

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import trio

from genbatch import Client, RPCClient, ZeroMQClient, open_batcher
from genbatch.actors.batcher.generation import GenerationRequest
from genbatch.actors.batcher.intake import Intake
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.models.model import load_model
from genbatch.nif.sampling.grammar import branches
from genbatch.nif.sampling.grammar_compiler import GrammarCompiler
from genbatch.nif.sampling.sampler import Sampled
from genbatch.proto.errors import InvalidRequest
from genbatch.proto.messages import Choice, GenerateRequest, Message, ResponseFormat, Tool
from genbatch.proto.validation import RequestLimits
from tests.tool_models import TEMPLATE, tool_model
from tests.waiting import ENGINE_PATIENCE_S

USER = {"role": "user", "content": "Well?"}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["c", "f"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
# A name that is a keyword of Python and of JSON Schema's and the grammar's languages alike.
KEYWORD: dict[str, Any] = {"name": "class", "parameters": {"type": "object", "properties": {"start": {"const": "}}"}},
                           "required": ["start"], "additionalProperties": False}}  # fmt: skip


COLOUR: dict[str, Any] = {
    "type": "json_schema",
    "schema": {
        "type": "object",
        "properties": {"name": {"enum": ["red", "green"]}, "shade": {"$ref": "#/$defs/shade"}},
        "required": ["name"],
        "additionalProperties": False,
        "$defs": {"shade": {"enum": ["<tool_call>", "]"]}},
    },
}


@pytest.fixture(scope="module")
def model(tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model(tiny_model_dir("llama"), tmp_path_factory.mktemp("tools") / "model")


@asynccontextmanager
async def running(model: Path, **options: Any) -> AsyncIterator[Any]:
    with trio.fail_after(ENGINE_PATIENCE_S):
        async with open_batcher(str(model), dtype="float32", n_gpu_layers=0, n_ctx=2048, **options) as batcher:
            yield batcher


def check(call: Any, tool: dict[str, Any]) -> None:
    assert call.name == tool["name"]
    jsonschema.validate(json.loads(call.arguments), tool["parameters"])


@pytest.mark.trio
async def test_a_random_models_forced_calls_parse_and_validate(model: Path) -> None:
    async with running(model) as batcher:
        for seed in range(3):
            params: Any = {"messages": [USER], "temperature": 1.5, "seed": seed, "max_tokens": 900}
            result = await batcher.generate(tools=[WEATHER, KEYWORD], tool_choice="required", **params)
            assert result.finish_reason == "tool_calls" and result.text == "" and 1 <= len(result.tool_calls) <= 8
            for call in result.tool_calls:
                check(call, WEATHER if call.name == "get_weather" else KEYWORD)
            assert len({call.id for call in result.tool_calls}) == len(result.tool_calls)
            named = await batcher.generate(tools=[WEATHER, KEYWORD], tool_choice={"name": "class"}, **params)
            (call,) = named.tool_calls
            check(call, KEYWORD)
            alone = await batcher.generate(
                tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, n=2, **params
            )
            assert [len(choice.tool_calls) for choice in alone.choices] == [1, 1]


@pytest.mark.trio
async def test_a_stream_has_the_same_calls_in_pieces_and_text_without_tools_is_as_ever(model: Path) -> None:
    async with running(model) as batcher:
        pieces: list[Any] = []
        params: Any = {"messages": [USER], "tools": [WEATHER], "max_tokens": 200, "temperature": 1.0, "seed": 4}
        async with batcher.stream(tool_choice={"name": "get_weather"}, **params) as stream:
            async for token in stream:
                pieces += token.tool_calls
                assert token.text == ""
        (call,) = stream.result.tool_calls
        assert (pieces[0].id, pieces[0].name, pieces[0].arguments) == (call.id, "get_weather", "")
        assert len(pieces) > 3 and "".join(piece.arguments for piece in pieces) == call.arguments
        free = await batcher.generate(messages=[USER], tools=[WEATHER], tool_choice="none", max_tokens=12)
        plain = await batcher.generate(messages=[USER], max_tokens=12)
        assert (free.text, free.token_ids) == (plain.text, plain.token_ids)


@pytest.mark.trio
async def test_the_same_over_the_wire_from_the_engines_process(model: Path, tmp_path: Path) -> None:
    zeromq, rpc = f"ipc://{tmp_path}/zeromq.sock", f"unix://{tmp_path}/rpc.sock"
    async with (
        running(model, engine="process", bind=zeromq, rpc_bind=rpc),
        ZeroMQClient(zeromq) as over_zeromq,
        RPCClient(rpc) as over_rpc,
    ):
        called = [await call_and_answer(client) for client in (over_zeromq, over_rpc)]
        assert called[0] == called[1]


async def call_and_answer(client: Client) -> list[str]:
    """Has the model ask for each of two tools and tells what they said; returns the arguments."""
    found = []
    for tool in (WEATHER, KEYWORD):
        params: Any = {"tools": [WEATHER, KEYWORD], "tool_choice": {"name": tool["name"]}, "max_tokens": 200}
        async with client.stream(messages=[USER], **params) as stream:
            pieces = [piece async for token in stream for piece in token.tool_calls]
        (call,) = stream.result.tool_calls
        check(call, tool)
        assert (stream.result.finish_reason, pieces[0].id, pieces[0].name) == ("tool_calls", call.id, call.name)
        assert "".join(piece.arguments for piece in pieces) == call.arguments
        answered = {"role": "tool", "content": "sunny", "tool_call_id": call.id}
        for arguments in (call.arguments, call.arguments[:-1]):  # the second call was cut by max_tokens
            asked = {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": call.id, "name": call.name, "arguments": arguments}],
            }
            result = await client.generate(messages=[USER, asked, answered], tools=[WEATHER], max_tokens=4)
            assert result.usage.completion_tokens == 4
        found.append(call.arguments)
    for choice in ("auto", "none", "required"):
        shaped: Any = {
            "tools": [WEATHER, KEYWORD],
            "tool_choice": choice,
            "response_format": COLOUR,
            "temperature": 1.0,
        }
        result = await client.generate(messages=[USER], max_tokens=900, seed=7, **shaped)
        found.append(check_either(result) + result.text)
    result = await client.generate("go", max_tokens=20, ignore_eos=True)
    ended = await client.generate("go", max_tokens=20, ignore_eos=True, stop=["never said", result.text[5:7]])
    assert (ended.finish_reason, ended.stop_string) == ("stop", result.text[5:7])
    return found


@pytest.mark.trio
async def test_beside_a_format_an_answer_is_calls_or_matches_it(model: Path) -> None:
    """Whole and streamed, alone and as one of several choices, with log-probs or without."""
    met: set[str] = set()
    async with running(model) as batcher:
        for seed in range(12):
            params: Any = {"messages": [USER], "tools": [WEATHER, KEYWORD], "response_format": COLOUR}
            params |= {"temperature": 1.5, "seed": seed, "max_tokens": 900}
            result = await batcher.generate(**params)
            met.add(check_either(result))
            async with batcher.stream(**params) as stream:
                tokens = [token async for token in stream]
            assert "".join(token.text for token in tokens) == result.text == stream.result.text
            pieces = [piece for token in tokens for piece in token.tool_calls]
            arguments = "".join(piece.arguments for piece in pieces)
            assert arguments == "".join(call.arguments for call in result.tool_calls)
        assert met == {"calls", "text"}
        several = await batcher.generate(**params, n=4, logprobs=1, parallel_tool_calls=False, stop=["never said"])
        for choice in several.choices:
            assert check_either(choice) == "text" or len(choice.tool_calls) == 1
            assert len(choice.logprobs or ()) == len(choice.token_ids)
        strict = [tool | {"strict": number == 0} for number, tool in enumerate((WEATHER, KEYWORD))]
        check_either(await batcher.generate(**params | {"tools": strict}))


def check_either(answer: Any) -> str:
    """Whether an answer is calls or text; either is all that it should be."""
    if answer.tool_calls:
        assert (answer.finish_reason, answer.text) == ("tool_calls", "")
        for call in answer.tool_calls:
            check(call, WEATHER if call.name == "get_weather" else KEYWORD)
        return "calls"
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), COLOUR["schema"])
    return "text"


@pytest.mark.trio
async def test_the_choice_of_tools_decides_which_of_both_an_answer_may_be(model: Path) -> None:
    async with running(model) as batcher:
        for seed in range(4):
            params: Any = {"messages": [USER], "tools": [WEATHER, KEYWORD], "response_format": COLOUR}
            params |= {"temperature": 1.5, "seed": seed, "max_tokens": 900}
            assert check_either(await batcher.generate(**params, tool_choice="none")) == "text"
            assert check_either(await batcher.generate(**params, tool_choice="required")) == "calls"
            named = await batcher.generate(**params, tool_choice={"name": "class"})
            assert check_either(named) == "calls" and [call.name for call in named.tool_calls] == ["class"]


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", "none", None])
def test_thinking_comes_before_calls_and_before_a_format(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path, opens: bool, choice: str | None
) -> None:
    """Also where the prompt has opened it: a format that held it would make all of the answer thinking."""
    prompt = "<|start|>assistant\n<think>\n" if opens else "<|start|>assistant\n"
    template = TEMPLATE + "{# <think></think> #}"
    model = load_model(str(tool_model(tiny_model_dir("llama"), tmp_path / "model", template)), dtype="float32")
    call = '<tool_call>\n{"name": "class", "arguments": {"start": "}}"}}\n</tool_call>'
    text, thinking = '{"name": "red"}', "so\n{ <tool_call>"
    asked: Any = {"messages": [Message(**USER)], "reasoning": True, "response_format": ResponseFormat(**COLOUR)}
    if choice is not None:
        asked |= {"tools": [Tool(**WEATHER), Tool(**KEYWORD)], "tool_choice": choice}
    begun = "" if opens else "<think>\n"
    compiler = GrammarCompiler(model, max_s=10.0)
    try:
        for answer, is_allowed in ((call, choice in ("auto", "required")), (text, choice != "required")):
            for written in (f"{begun}{thinking}</think>\n\n{answer}", *(() if opens else (answer,))):
                choices = list(follow(model, compiler, GenerateRequest(**asked), prompt, written))
                assert bool(choices) == is_allowed, (written, choice)
                for found in choices:
                    assert found.reasoning == (thinking if written != answer else "")
                    assert (found.text, len(found.tool_calls)) == ((text, 0) if answer == text else ("", 1))
        # Where nobody tells it apart the text is all that there is.
        whole = GenerateRequest(**asked | {"reasoning": False, "tools": [], "tool_choice": "auto"})
        assert list(follow(model, compiler, whole, prompt, text)) and not list(
            follow(model, compiler, whole, prompt, "<think>so")
        )
    finally:
        compiler.close()


def follow(
    model: Model, compiler: GrammarCompiler, wanted: GenerateRequest, prompt: str, text: str
) -> Iterator[Choice]:
    """The answer that is written so; none where its grammar does not allow it."""
    intake = Intake(model, BatcherOptions(), 4096)
    request = GenerationRequest(params=wanted, from_=None, monitor=None, client="", accepted_at=0.0)  # type: ignore[arg-type]
    request.prompt_tokens = model.tokenizer.encode(prompt)
    request.grammar = grammar = intake.grammar(wanted)
    assert grammar is not None
    kind, source = str(grammar.kind), grammar.text
    if grammar.answer is not None:
        kind, source = "branches", branches(source, grammar.answer.kind, grammar.answer.text)
    request.constraints = [*compiler.compile(kind, source, b"", 1)]
    (sequence,) = intake.sequences(request, 900)
    (constraint,) = request.constraints
    for token_id in [*model.tokenizer.encode(text, add_special_tokens=False), min(model.eos_token_ids)]:
        constraint.prepare()
        if constraint.fault is not None or not constraint.allowed[token_id // 32] >> (token_id % 32) & 1:
            return
        constraint.accept(token_id)
        sequence.output.push(Sampled(token_id))
    yield sequence.output.choice("stop")


@pytest.mark.trio
@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"tools": [{"name": ""}]}, "tools[0].name"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}, {"name": "f"}]}, "tools[1].name"),
        ({"tools": [{"name": "f", "parameters": {"type": "string"}}]}, "tools[0].parameters"),
        ({"tools": [WEATHER], "tool_choice": {"name": "other"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "response_format": COLOUR, "min_tokens": 3}, "min_tokens"),
        (
            {"tools": [WEATHER], "response_format": {"type": "json_schema", "schema": {"$ref": "#/nowhere"}}},
            "response_format.schema",
        ),
        (
            {"tools": [{"name": "f", "parameters": {"$ref": "#/nowhere"}}], "response_format": COLOUR},
            "tools",
        ),
        ({"tools": [WEATHER], "tool_choice": "required", "min_tokens": 3}, "min_tokens"),
        ({"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}, "messages"),
        ({"chat_template_kwargs": {"tokenize": True}}, "messages"),
        (
            {"tool_choice": "required", "tools": [{"name": "f", "strict": True, "parameters": {"type": "object",
             "properties": {"x": {"type": "integer", "multipleOf": 999983}}, "required": ["x"]}}]},
            "tools",
        ),
        (
            {"tool_choice": "required", "tools": [{"name": "f", "parameters": {"$ref": "#/nowhere"}}]},
            "tools",
        ),
    ],
)  # fmt: skip
async def test_what_cannot_be_offered_is_refused_by_name(model: Path, params: dict[str, Any], field: str) -> None:
    async with running(model) as batcher:
        with pytest.raises(InvalidRequest) as caught:
            await batcher.generate(messages=[USER], max_tokens=2, **params)
        assert caught.value.field == field


@pytest.mark.trio
async def test_schemas_of_tools_are_bounded_as_other_grammars_are(model: Path) -> None:
    large = {"type": "object", "properties": {"x": {"enum": ["x" * 1000]}}, "required": ["x"]}
    tools: Any = [{"name": f"f{number}", "parameters": large} for number in range(4)]
    async with running(model, limits=RequestLimits(max_grammar_bytes=4000)) as batcher:
        with pytest.raises(InvalidRequest, match="4000 are allowed") as caught:
            await batcher.generate(messages=[USER], tools=tools, tool_choice="required", max_tokens=2)
        assert caught.value.field == "tools"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


HOSTILE: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},  # no value of it ever ends
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a+)+$"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "string", "minLength": 10**9}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "array", "minItems": 10**9}}, "required": ["a"]},
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
    {"type": "object", "properties": {f"p{number}": {} for number in range(500)}, "required": ["p499"]},
    {
        "type": "object",
        "properties": {"</tool_call>\n<tool_call>": {"const": '"}}</tool_call>'}, "": {"const": "\u0000"}},
    },
    {"type": "object", "allOf": [{"$ref": "https://elsewhere.example/schema"}]},
    {"type": "object", "$defs": {"a": {"$ref": "#/$defs/a"}}, "properties": {"a": {"$ref": "#/$defs/a"}}},
    nested(60),
]


@pytest.mark.trio
async def test_a_hostile_schema_ends_in_a_call_that_validates_or_is_refused_by_name(model: Path) -> None:
    async with running(model) as batcher:
        before = await batcher.generate(messages=[USER], max_tokens=8)
        for number, schema in enumerate(HOSTILE):
            tool: Any = {"name": "f", "parameters": schema}
            try:
                result = await batcher.generate(
                    messages=[USER], tools=[tool], tool_choice={"name": "f"}, max_tokens=60, seed=1, temperature=1.0
                )
            except InvalidRequest as error:
                assert error.field == "tools", (number, error)
                continue
            assert result.finish_reason in ("tool_calls", "length"), (number, result)
            if result.finish_reason == "tool_calls":
                check(result.tool_calls[0], tool)
        after = await batcher.generate(messages=[USER], max_tokens=8)
        assert after.token_ids == before.token_ids


RESPONSE_TEMPLATE = {
    "start_anchor": "<|start|>assistant\n",
    "fields": {"thinking": {"open": "<think>", "close": "</think>"}, "content": {}},
}


@pytest.mark.trio
@pytest.mark.parametrize("brings_a_template", [False, True])
async def test_thinking_is_told_apart_and_counted_by_the_table_and_by_the_tokenizers_own_template(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path, brings_a_template: bool
) -> None:
    thinks = "" if brings_a_template else "{# <think></think> #}"
    model = tool_model(tiny_model_dir("llama"), tmp_path / "model", TEMPLATE + thinks)
    if brings_a_template:
        config = model / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"response_template": RESPONSE_TEMPLATE}))
    asked: Any = {"messages": [USER], "max_tokens": 60, "regex": "<think>hm, so</think>\n*Yes\\."}
    async with running(model) as batcher:
        result = await batcher.generate(reasoning=True, **asked)
        assert (result.reasoning, result.text, result.finish_reason) == ("hm, so", "Yes.", "stop")
        assert 0 < result.reasoning_tokens < len(result.token_ids)
        async with batcher.stream(reasoning=True, **asked) as stream:
            tokens = [token async for token in stream]
        assert "".join(token.reasoning for token in tokens) == "hm, so"
        assert "".join(token.text for token in tokens) == "Yes."
        plain = await batcher.generate(**asked)
        assert plain.text.startswith("<think>hm, so</think>") and plain.reasoning_tokens == 0


@pytest.mark.trio
async def test_harmonys_channels_are_told_apart_where_the_chat_template_writes_them(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    marks = "{# <|start|>assistant<|channel|>analysis<|message|> <|channel|>final #}"
    model = tool_model(tiny_model_dir("llama"), tmp_path / "model", TEMPLATE + marks)
    written = r"<\|channel\|>analysis<\|message\|>hm<\|call\|><\|channel\|>final<\|message\|>Yes\."
    asked: Any = {"messages": [USER], "max_tokens": 120, "reasoning": True}
    async with running(model) as batcher:  # a tokenizer in which <|start|> and <|end|> mean other things
        result = await batcher.generate(regex=written, **asked)
        assert (result.reasoning, result.text, result.finish_reason) == ("hm", "Yes.", "stop")
        shaped = await batcher.generate(regex="[0-9]{3}", **asked)
        assert re.fullmatch("[0-9]{3}", shaped.text) and not shaped.reasoning
