"""Records what the wire carries: the bytes of every method and stream, with the values that they stand for.

    python -m tests.proto.vectors           # writes proto/vectors/current.json and proto/schema.json

Each exchange is made by the two ends of `proto/rpc.py`: a client's messages, and a service's answers to them. The file
of a release is a copy of `current.json` at that release, and is never changed. Tests read all of the files.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import msgspec

from genbatch.proto.codec import to_generate_request
from genbatch.proto.errors import EngineLost, InvalidRequest, QueueFull
from genbatch.proto.messages import (
    DrawnTokens,
    Embeddings,
    GenerateRequest,
    Result,
    Scores,
    SessionState,
    Text,
    Token,
    TokenIds,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from genbatch.proto.methods import METHODS
from genbatch.proto.rpc import (
    PLAIN_STREAM,
    ClientConnection,
    ServerConnection,
    StreamOptions,
    error_message,
    goaway_message,
    token_message,
    tokens_message,
)
from genbatch.proto.schema import wire_schema
from genbatch.proto.service_messages import Drained, Health, Hello, ModelCard, Models
from genbatch.proto.validation import check_type

VECTORS = Path(__file__).parent.parent.parent / "proto" / "vectors"
CURRENT = VECTORS / "current.json"
SCHEMA_FILE = VECTORS.parent / "schema.json"

Vector = dict[str, Any]
Exchange = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """One call.

    Args:
        name: the exchange's name in the files.
        method: what is called.
        params: as a client writes them.
        answer: the result, or the error.
        options: of a stream.
        tokens: of a stream, one message each.
        together: whether the tokens come in one message.
        given_up: whether the client grants credit, and then cancels.
        retires: whether the service asks the client to open another connection.
    """

    name: str
    method: str
    params: Mapping[str, Any]
    answer: Any
    options: StreamOptions = PLAIN_STREAM
    tokens: Sequence[Token] = field(default=())
    together: bool = False
    given_up: bool = False
    retires: bool = False


USAGE = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
PLAIN_RESULT = Result(text=" blue", token_ids=[7, 2], finish_reason="stop", usage=USAGE)
CARD = ModelCard(
    id="smollm2", n_ctx=2048, n_parallel=4, vocab_size=49152, dtype="float32", quantize="none", runner="native",
    device="cpu",
)  # fmt: skip
TOOL = {"name": "weather", "description": "Tells the weather.", "parameters": {"type": "object"}, "strict": True}
EVERY_PARAMETER: dict[str, Any] = {
    "prompt": "The sky is", "max_tokens": 2, "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05,
    "repetition_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": -0.25, "logit_bias": {7: 1.5},
    "seed": 2**64 - 1, "stop": ["\n", "é"], "stop_token_ids": [2], "min_tokens": 1, "ignore_eos": True, "logprobs": 1,
    "prompt_logprobs": 0, "echo": True, "keep_stop": True, "n": 2, "priority": -1, "deadline_s": 60.0, "tenant": "a",
}  # fmt: skip

SAMPLES = (
    Sample("hello", "hello", {"token": "secret"}, Hello(methods=("hello", "generate"), tenant="a")),
    Sample("generate", "generate", {"prompt": "The sky is"}, PLAIN_RESULT),
    Sample(
        "generate with every parameter",
        "generate",
        EVERY_PARAMETER,
        Result(
            text="The sky is blue",
            token_ids=[7, 2],
            finish_reason="length",
            usage=USAGE,
            logprobs=[TokenLogprob(token_id=7, logprob=-0.5, top={7: -0.5}), TokenLogprob(token_id=2, logprob=-2.0)],
            prompt_logprobs=[None, TokenLogprob(token_id=5, logprob=-1.5)],
        ),
    ),
    Sample(
        "generate with tools",
        "generate",
        {
            "messages": [
                {"role": "user", "content": "Is it warm?"},
                {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "name": "weather", "arguments": "{}"}]},
                {"role": "tool", "content": "20", "tool_call_id": "1"},
            ],
            "tools": [TOOL],
            "tool_choice": {"name": "weather"},
            "parallel_tool_calls": False,
            "reasoning": True,
            "chat_template_kwargs": {"enable_thinking": True},
            "response_format": {"type": "json_schema", "schema": {"type": "object"}},
        },
        Result(
            text="",
            token_ids=[7, 2],
            finish_reason="tool_calls",
            usage=USAGE,
            reasoning="Hm.",
            tool_calls=(ToolCall(id="2", name="weather", arguments='{"city": "Oslo"}'),),
        ),
    ),
    Sample("generate with a regex", "generate", {"prompt": "A date:", "regex": "[0-9]+"}, PLAIN_RESULT),
    Sample("generate with a grammar", "generate", {"token_ids": [5, 6], "grammar": 'start: "a"'}, PLAIN_RESULT),
    Sample("generate refused", "generate", {"prompt": "x", "n": 9}, InvalidRequest("n", "must be 1 to 8")),
    Sample("generate too early", "generate", {"prompt": "x"}, QueueFull("16 requests wait", retry_after_ms=250)),
    Sample(
        "stream",
        "stream",
        {"prompt": "The sky is"},
        PLAIN_RESULT,
        tokens=(Token(text=" blue", token_id=7, index=0), Token(text="", token_id=2, index=1)),
    ),
    Sample(
        "stream with credit",
        "stream",
        {"prompt": "The sky is", "logprobs": 1, "n": 2},
        PLAIN_RESULT,
        options=StreamOptions(credit=64, coalesce=True),
        tokens=(
            Token(text=" blue", token_id=7, index=0, logprob=-0.5, top={7: -0.5}),
            Token(text=" grey", token_id=8, index=0, logprob=-1.5, top={7: -0.5}, choice=1),
        ),
        together=True,
    ),
    Sample(
        "stream that continues",
        "stream",
        {"prompt": "The sky is", "logprobs": 1, "n": 2, "seed": 5},
        PLAIN_RESULT,
        options=StreamOptions(credit=64, drawn=(DrawnTokens([7, 9], [(-0.5, {7: -0.5}), (-1.0, {})]), DrawnTokens([]))),
        tokens=(
            Token(text=".", token_id=2, index=2, logprob=-0.5),
            Token(text=" grey", token_id=8, index=0, logprob=-1.5, choice=1),
        ),
    ),
    Sample(
        "stream with tools",
        "stream",
        {"messages": [{"role": "user", "content": "Is it warm?"}], "tools": [TOOL]},
        PLAIN_RESULT,
        tokens=(
            Token(text="", token_id=7, index=0, reasoning="Hm."),
            Token(text="", token_id=8, index=1, tool_calls=(ToolCallDelta(index=0, id="2", name="weather"),)),
            Token(text="", token_id=2, index=2, tool_calls=(ToolCallDelta(index=0, arguments="{}"),)),
        ),
    ),
    Sample(
        "stream that is cancelled",
        "stream",
        {"prompt": "The sky is"},
        PLAIN_RESULT,
        options=StreamOptions(credit=1),
        tokens=(Token(text=" blue", token_id=7, index=0),),
        given_up=True,
    ),
    Sample(
        "stream of a service that is replaced",
        "stream",
        {"prompt": "The sky is"},
        PLAIN_RESULT,
        tokens=(Token(text=" blue", token_id=7, index=0), Token(text="", token_id=2, index=1)),
        retires=True,
    ),
    Sample(
        "stream whose engine is lost",
        "stream",
        {"prompt": "The sky is"},
        EngineLost("the engine process died", tokens_delivered=1),
        tokens=(Token(text=" blue", token_id=7, index=0),),
    ),
    Sample(
        "embed",
        "embed",
        {"input": ["a", "b"], "dimensions": 2},
        Embeddings(embeddings=[[0.5, -0.5], [1.0, 0.0]], usage=USAGE),
    ),
    Sample(
        "score",
        "score",
        {"documents": ["a", "b"], "query": "c", "truncate": True},
        Scores(scores=[[0.5], [1.0]], usage=USAGE),
    ),
    Sample("tokenize", "tokenize", {"prompt": "The sky", "add_special_tokens": False}, TokenIds(token_ids=[5, 6])),
    Sample("detokenize", "detokenize", {"token_ids": [5, 6]}, Text(text="The sky")),
    Sample(
        "keep_session",
        "keep_session",
        {"name": "trip", "messages": [{"role": "user", "content": "Name a colour."}]},
        SessionState(positions=32, num_bytes=9000),
    ),
    Sample("resume_session", "resume_session", {"name": "trip"}, SessionState(positions=32, num_bytes=9000)),
    Sample("models", "models", {}, Models(models=(CARD,))),
    Sample(
        "health",
        "health",
        {},
        Health(status="ready", steps=12, requests_running=1, requests_waiting=0, stalled_s=0.25),
    ),
    Sample("stats", "stats", {}, {"steps": 12, "finished": {"stop": 3}, "tokens_per_s": 20.5}),
    Sample("load_model", "load_model", {"model": "law", "keep_alive": 60.0}, Models(models=(CARD,))),
    Sample("load_adapter", "load_adapter", {"name": "law", "path": "/srv/law"}, Models(models=(CARD,))),
    Sample("unload_adapter", "unload_adapter", {"name": "law", "timeout_s": 5.0}, Drained(num_cancelled=0)),
    Sample("drain", "drain", {"timeout_s": 5.0}, Drained(num_cancelled=1)),
)


def recorded(sample: Sample) -> list[tuple[str, bytes]]:
    """The messages of one call: who sends each, and its bytes."""
    client, service = ClientConnection(), ServerConnection(max_calls=1)
    request = typed_params(sample.method, dict(sample.params))
    msgid, message = client.request(sample.method, request, sample.options)
    steps = [("client", client.heartbeat(5.0)), ("client", message)]
    for _, sent in steps:
        service.receive(sent)
    steps.append(("service", service.heartbeat()))
    arrays = [array for token in sample.tokens if (array := service.token(msgid, token)) is not None]
    messages = [tokens_message(arrays)] if sample.together else map(token_message, arrays)
    steps += [("service", data) for data in messages]
    if sample.retires:
        steps.append(("service", goaway_message()))
    if sample.given_up:
        steps += [("client", client.credit(msgid, 32)), ("client", client.cancel(msgid) or b"")]
    if isinstance(sample.answer, Exception):
        steps.append(("service", error_message(msgid, sample.answer)))  # type: ignore[arg-type]
    else:
        steps.append(("service", service.result(msgid, sample.answer)))
    return steps


def typed_params(method: str, params: dict[str, Any]) -> Any:
    """A method's parameters as its request type."""
    wanted = METHODS[method].request
    return to_generate_request(params) if wanted is GenerateRequest else check_type(params, wanted)


def as_json(value: Any) -> Any:
    """The value as JSON has it: keys that are integers become text."""
    return json.loads(json.dumps(value))


def exchange(sample: Sample) -> Exchange:
    """What the files hold of one call."""
    steps = [
        {"from": sender, "hex": data.hex(), "message": as_json(msgpack.unpackb(data, strict_map_key=False))}
        for sender, data in recorded(sample)
    ]
    return {"name": sample.name, "method": sample.method, "steps": steps}


def file_text(exchanges: Sequence[Exchange]) -> str:
    """A file of exchanges, one step a line."""
    return "[\n" + ",\n".join(_lines(exchanges)) + "\n]\n"


def _lines(exchanges: Sequence[Exchange]) -> Iterator[str]:
    for one in exchanges:
        steps = ",\n  ".join(json.dumps(step, ensure_ascii=False) for step in one["steps"])
        yield f'{{"name": {json.dumps(one["name"])}, "method": {json.dumps(one["method"])}, "steps": [\n  {steps}]}}'


def main() -> None:
    CURRENT.write_text(file_text([exchange(sample) for sample in SAMPLES]))
    SCHEMA_FILE.write_text(msgspec.json.format(msgspec.json.encode(wire_schema())).decode() + "\n")
    print(f"wrote {CURRENT.name} and {SCHEMA_FILE.name}: look at what git says has changed")


if __name__ == "__main__":
    main()
