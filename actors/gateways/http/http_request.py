"""HTTPRequest: one HTTP body, whichever API it is of, as requests of our own and as the answer is to be written.

An endpoint reads its body into a Struct of its own, which checks the types. `build_request` makes the GenerateRequest.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from genbatch.actors.gateways.http.bodies import renamed
from genbatch.proto.errors import InvalidRequest
from genbatch.proto.messages import GenerateRequest, check_type

# Parameters that a body's Struct leaves as JSON, in whole or in part: their types are checked here.
_AS_JSON = ("messages", "tools", "tool_choice", "response_format", "grammar", "regex")


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPRequest:
    """One body.

    Args:
        model: as it was named; None for the first model.
        requests: one for each prompt.
        stream: whether the answer comes token by token.
        names: the caller's names of parameters, by ours, where they differ.
        is_chat: whether an answer of OpenAI's has a message, and not a text.
        n: answers to each prompt.
        include_usage: whether a stream tells its usage.
        num_top: how many of the likeliest tokens to show with each one; None shows no log-probs.
        ids_for_text: whether log-probs name tokens by their ids.
        echo: whether the prompts come back in front of the answers.
        suffix: the text behind the gap to be filled; "" is none.
        body: what was asked, where the answer repeats it.
        namespaces: of functions within a namespace, by our name: the namespace, and the function's name there.
        custom: names of the functions that are custom tools to the caller.
        thinking: the fields that ask for thinking; they have no effect where the model does not think.
    """

    model: str | None
    requests: list[GenerateRequest]
    stream: bool
    names: dict[str, str]
    is_chat: bool = True
    n: int = 1
    include_usage: bool = True
    num_top: int | None = None
    ids_for_text: bool = False
    echo: bool = False
    suffix: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    custom: frozenset[str] = frozenset()
    thinking: Sequence[str] = ()


def build_request(params: dict[str, Any], names: dict[str, str]) -> GenerateRequest:
    """The request with these parameters, of which a body's Struct has checked those that are no JSON.

    Args:
        names: the caller's names of parameters, by ours.

    Raises:
        InvalidRequest: with the path of the first fault, under the caller's name.
    """
    as_json = {name: params[name] for name in _AS_JSON if name in params}
    try:
        checked: GenerateRequest = check_type(as_json, GenerateRequest)
    except InvalidRequest as error:
        raise renamed(error, names) from None
    plain = {name: value for name, value in params.items() if name not in as_json}
    if isinstance(plain.get("stop"), str):
        plain["stop"] = [plain["stop"]]
    return msgspec.structs.replace(checked, **plain)


def set_fields(body: msgspec.Struct, names: Iterable[str]) -> dict[str, Any]:
    """The values of these fields of a body, without those that it does not set."""
    return {name: value for name in names if (value := getattr(body, name)) is not None}


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampling parameters that OpenAI's, vLLM's, Ollama's and llama.cpp's API call as GenerateRequest does."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class LlamaSampling(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampling parameters of llama.cpp, which Ollama has taken over.

    Args:
        repeat_penalty: llama.cpp's name of `repetition_penalty`.
        seed: of the draws; a negative one draws a seed.
    """

    repeat_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


# Our names of LlamaSampling's fields, where they differ.
_OUR_NAMES = {"repeat_penalty": "repetition_penalty"}


def llama_params(fields: LlamaSampling, max_tokens: int | None) -> dict[str, Any]:
    """The parameters of a request; with None for `max_tokens` as many tokens as there is room for."""
    params = {
        _OUR_NAMES.get(name, name): value for name, value in set_fields(fields, LlamaSampling.__struct_fields__).items()
    }
    if params.get("seed", 0) < 0:
        del params["seed"]
    if max_tokens is not None:
        params["max_tokens"] = max_tokens
    return params


def llama_names(prefix: str) -> dict[str, str]:
    """The caller's names of the sampling parameters, by ours."""
    return {_OUR_NAMES.get(name, name): prefix + name for name in LlamaSampling.__struct_fields__}
